"""The groups of extents that nodes hold whole, followed by changes, beside looking at all of them."""

from __future__ import annotations

import random
from typing import Any

from kit.drawing import seeds
from unit.counting import operations

from cluster.peers.protocol import PeerAddress, ResidencyReport
from cluster.registry.extent_locations import HeldComponents, ResidencyMap

ADDRESS = PeerAddress("10.0.0.1", 7000)
EXTENTS = [f"e{number}" for number in range(12)]


def new_map(seed: int) -> ResidencyMap:
    return ResidencyMap(lambda: 0.0, random.Random(seed))


def asked(held: HeldComponents, found: ResidencyMap, wanted: Any) -> int:
    """Ask once; return how many extents were named."""
    revision, added, removed = held.query(wanted)
    held.apply_update(found.follow_groups(revision, added, removed))
    return sum(map(len, added.values()))


@seeds(50)
def test_at_random_the_copy_is_what_looking_at_all_extents_finds(seed: int) -> None:
    chance = random.Random(seed)
    found, held, wanted = new_map(seed), HeldComponents(), dict[str, tuple[str, ...]]()
    nodes: dict[str, set[str]] = {}
    for _ in range(150):
        event = chance.choice(["report", "report", "full", "forget", "want", "unwant", "restart", "lost", "other"])
        node, some = f"n{chance.randrange(4)}", chance.sample(EXTENTS, chance.randrange(5))
        if event in ("report", "full"):
            gone = chance.sample(EXTENTS, chance.randrange(4)) if event == "report" else []
            gone = [id_ for id_ in gone if id_ not in some]
            found.report_residency(node, ResidencyReport(ADDRESS, some, gone, is_full=event == "full"))
            nodes[node] = {*some} if event == "full" else (nodes.get(node, set()) | {*some}) - {*gone}
        elif event == "forget":
            found.forget(node)
            nodes.pop(node, None)
        elif event == "want":
            wanted[f"g{chance.randrange(8)}"] = tuple(chance.sample(EXTENTS, chance.randrange(4)))
        elif event == "unwant":
            wanted.pop(f"g{chance.randrange(8)}", None)
        elif event == "restart":  # of the registry: the nodes report all to the new one
            found = new_map(chance.randrange(1000))
            for each, ids in nodes.items():
                found.report_residency(each, ResidencyReport(ADDRESS, [*ids], [], is_full=True))
            asked(held, found, wanted)  # it is told that its revision is of another life
        elif event == "lost":
            found.follow_groups(*held.query(wanted))  # whose answer does not come
        else:
            asked(HeldComponents(), found, {"x": ("e1",)})  # somebody else begins
            asked(held, found, wanted)
        asked(held, found, wanted)
        assert held.nodes == {
            node: {name for name, ids in wanted.items() if ids_held.issuperset(ids)} for node, ids_held in nodes.items()
        }


def test_what_does_not_change_is_not_asked_again_however_much_is_followed() -> None:
    def second(number: int) -> tuple[int, int]:
        found, held = new_map(0), HeldComponents()
        wanted = {f"g{each}": (f"e{2 * each}", f"e{2 * each + 1}") for each in range(number)}
        found.report_residency("n", ResidencyReport(ADDRESS, [f"e{each}" for each in range(number)], [], is_full=True))
        assert asked(held, found, wanted) == 2 * number
        assert asked(held, found, wanted) == 0
        found.report_residency("n", ResidencyReport(ADDRESS, [f"e{2 * number - 1}"], [], is_full=False))
        found.report_residency("n", ResidencyReport(ADDRESS, [f"e{2 * number - 2}"], [], is_full=False))
        question = held.query(wanted)
        assert sum(map(len, question[1].values())) == 0
        return operations(lambda: found.follow_groups(*question)), len(held.nodes["n"])

    few, many = second(100), second(1000)
    assert few[1] == 50
    assert many[0] < 1.1 * few[0]
