"""The parts of ranks: each rank has one place, and the peers of an axis differ in it alone."""

from __future__ import annotations

import itertools
import re

import pytest
from kit.seeding import seeded_random

from deployments.engines.ranks.layout import AXES, MAX_RANKS, RankLayout, adjacent_places
from deployments.engines.records.protocol import EngineError


def drawn_layout() -> RankLayout:
    random = seeded_random()
    return RankLayout(random.randint(1, 2), random.randint(1, 5), random.randint(1, 5))


def test_each_rank_has_a_place_of_its_own() -> None:
    layout = drawn_layout()
    places = [layout.place(rank) for rank in range(layout.size)]
    assert len(set(places)) == layout.size == layout.cfg * layout.sequence * layout.tensor
    assert [layout.number(place) for place in places] == list(range(layout.size))
    assert all(0 <= place[at] < getattr(layout, axis) for place in places for at, axis in enumerate(AXES))


@pytest.mark.parametrize("at", range(3))
def test_peers_differ_along_their_axis_alone(at: int) -> None:
    layout = drawn_layout()
    for rank in range(layout.size):
        peers = layout.peers(rank, AXES[at])
        alike = [layout.place(one) for one in range(layout.size)]
        own = layout.place(rank)
        expected = [layout.number(one) for one in alike if one[:at] + one[at + 1 :] == own[:at] + own[at + 1 :]]
        assert list(peers) == expected
        assert [layout.place(peer)[at] for peer in peers] == list(range(getattr(layout, AXES[at])))


def test_slices_of_one_tensor_are_adjacent() -> None:
    assert RankLayout(2, 2, 4).peers(5, "tensor") == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((3, 1, 1), "ranks: cfg is 3, expected 1 to 2"),
        ((1, 0, 1), "ranks: sequence is 0, expected 1 to 64"),
        ((1, 1, 65), "ranks: tensor is 65, expected 1 to 64"),
        ((1, True, 1), "ranks: sequence is True"),
        ((1, 1, 2.0), "ranks: tensor is 2.0"),
        ((2, 8, 8), "cfg 2, sequence 8, tensor 8 are 128 ranks, at most 64"),
    ],
)
def test_counts_are_bounded(counts: tuple[int, int, int], message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        RankLayout(*counts)
    assert MAX_RANKS == 64


def test_a_rank_that_is_none_of_them_is_refused() -> None:
    with pytest.raises(EngineError, match=r"rank 4 is none of 4 ranks, which are 0 to 3"):
        RankLayout(tensor=4).place(4)


def test_ranks_of_a_node_are_adjacent_and_rank_0_has_the_first_place() -> None:
    random = seeded_random()
    nodes = [random.choice("abc") for _ in range(random.randint(1, 12))]
    places = adjacent_places(nodes)
    assert places[0] == 0
    assert sorted(places) == list(range(len(nodes)))
    of_ranks = [nodes[place] for place in places]
    changes = sum(one != other for one, other in itertools.pairwise(of_ranks))
    assert changes == len(set(nodes)) - 1
    assert all(one < other for one, other in itertools.pairwise(places) if nodes[one] == nodes[other])
