"""The report of what is resident on which node."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cluster.registry.extent_locations import cluster_residency


@dataclass(frozen=True)
class Stats:
    node_id: str
    resident_bytes: int = 30


def extent(id_: str, *holders: str, pinned: bool = False) -> Any:
    return SimpleNamespace(id=id_, nbytes=10, holders=holders, pinned=pinned, source="storage", hits=2)


def test_the_report_has_the_resident_bytes_of_each_model_by_node() -> None:
    residents = {
        "n1": [extent("a", "worker-1"), extent("shared", "worker-2", "worker-1", pinned=True)],
        "n2": [extent("shared", pinned=True)],
    }
    stats = {"n1": Stats("n1"), "n2": Stats("n2")}
    found = cluster_residency(stats, residents, {"m": ("a", "shared", "absent"), "s": ("shared",), "cold": ("x",)})
    assert found["models"]["m"]["n1"] == {
        "host_bytes": 20,
        "num_extents": 2,
        "pinned": False,
        "holders": ["worker-1", "worker-2"],
        "hits": 4,
    }
    assert found["models"]["s"]["n2"]["pinned"]
    assert set(found["models"]) == {"m", "s"}
    assert found["nodes"] == [{"node_id": "n1", "resident_bytes": 30}, {"node_id": "n2", "resident_bytes": 30}]
    assert json.loads(json.dumps(found)) == found


def test_a_node_that_does_not_answer_is_shown_as_unreachable() -> None:
    stats = {"n1": Stats("n1"), "n2": TimeoutError(), "n3": ConnectionError("gone")}
    found = cluster_residency(stats, {"n1": ConnectionError("later"), "n2": TimeoutError(), "n3": []}, {"m": ("a",)})
    assert found["nodes"][0]["resident_bytes"] == 30
    assert [node.get("unreachable") for node in found["nodes"]] == [None, "TimeoutError", "gone"]
    assert found["models"] == {}


def test_it_looks_once_at_each_extent_of_the_models_and_of_the_nodes() -> None:
    looks = Counter[str]()

    class Counted(list[Any]):
        def __init__(self, sort: str, items: Iterable[Any]) -> None:
            super().__init__(items)
            self._sort = sort

        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                looks[self._sort] += 1
                yield item

    def cost(num_models: int, num_nodes: int) -> int:
        looks.clear()
        models = {f"m{n}": Counted("model", [f"{n}-{number}" for number in range(20)]) for n in range(num_models)}
        nodes = [f"n{n}" for n in range(num_nodes)]
        here = {node: Counted("node", [extent(f"{n}-0", "w") for n in range(5)]) for node in nodes}
        found = cluster_residency({node: Stats(node) for node in nodes}, here, models)
        assert len(found["models"]) == 5
        assert {len(by_node) for by_node in found["models"].values()} == {num_nodes}
        return looks.total()

    assert cost(100, 50) == 100 * 20 + 50 * 5
    assert cost(1000, 500) == 10 * cost(100, 50)
