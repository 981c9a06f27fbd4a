"""Models ready on a worker beside a plain search of all, and values that are made anew only for other inputs."""

from __future__ import annotations

from typing import Any

from kit.seeding import seeded_random
from unit.cluster.placement.reporting import need

from cluster.placement import seen_workers
from cluster.placement.seen_workers import DescribedModels, Remade
from cluster.placement.state import Components

PARTS = "pqrst"


def test_ready_models_are_those_all_of_whose_parts_are_ready() -> None:
    random = seeded_random()
    for _ in range(30):
        described, needs = DescribedModels(), dict[str, Any]()
        for step in range(40):
            model = random.choice("abcdef")
            if model in needs and random.random() < 0.2:
                described.forget(model)
                del needs[model]
            else:
                sizes = dict.fromkeys(random.sample(PARTS, random.randrange(4)), 1)
                before = described.revision
                is_same = needs.get(model) == (found := need(str(random.randrange(2)), **sizes))
                needs[model] = found
                described.note_need(model, found, Components(sizes))
                assert (described.revision == before) is is_same
            ready = dict.fromkeys(random.sample(PARTS, random.randrange(6)), 1)
            expected = sorted(name for name, one in needs.items() if one.sizes and one.sizes.keys() <= ready.keys())
            assert described.ready_models("w", ready) == tuple(expected), step
            assert described.components.keys() == needs.keys()


def test_a_value_is_made_anew_for_other_inputs_and_few_are_kept(monkeypatch: Any) -> None:
    monkeypatch.setattr(seen_workers, "MAX_LEFT", 2)
    made, remade = list[Any](), Remade[str]()

    def make(name: str, *inputs: Any) -> str:
        made.append((name, *inputs))
        return f"{name}{inputs}"

    for inputs in ((1, 2), (1, 2), (1, 3), (1, 2)):
        assert remade.value(make, "a", *inputs) == f"a{inputs}"
    assert made == [("a", 1, 2), ("a", 1, 3), ("a", 1, 2)]
    for name in "bcd":
        remade.value(make, name)
    made.clear()
    remade.keep(["a"])  # four are no more than twice one, and two
    remade.value(make, "b")
    assert made == []
    remade.value(make, "e")
    remade.keep(["a", "gone"])  # five are no more than six
    remade.keep(["a"])
    for name in "ab":
        remade.value(make, name, *((1, 2) if name == "a" else ()))
    assert made == [("e",), ("b",)]
