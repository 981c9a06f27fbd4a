"""The messages of ranks: plans as they were said, sums in one order, and the loss of a rank within a bound."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import run_ranks
from kit.seeding import seeded_rng

from deployments.engines.ranks.following import TO, follow
from deployments.engines.ranks.group import RankGroup, RankLost, forms_of
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.ranks.links import Meeting, listening

PAIR = RankLayout(tensor=2)


class HeardGroup:
    """Rank 1 of a group in which these plans are said."""

    rank = 1

    def __init__(self, *plans: dict[str, Any]) -> None:
        self.plans, self.has_left = list(plans), False

    def hear(self) -> dict[str, Any] | None:
        return self.plans.pop(0) if self.plans else None

    def leave(self) -> None:
        self.has_left = True


@pytest.mark.parametrize("error", [ValueError("torn"), RankLost("rank 0 is gone", [0])])
def test_a_follower_that_fails_ends_the_group_that_is_not_lost_already(error: Exception) -> None:
    group: Any = HeardGroup({TO: "a", "x": 1}, {TO: "b"}, {TO: "a"})
    heard = list[Any]()

    def fail(plan: Any) -> None:
        raise error

    with pytest.raises(RankLost) as lost:
        follow(group, {"a": heard.append, "b": fail})
    is_lost = isinstance(error, RankLost)
    told = "rank 0 is gone" if is_lost else "rank 1 failed in a step: torn"
    assert (str(lost.value), lost.value.ranks, group.has_left) == (told, (0,) if is_lost else (1,), not is_lost)
    assert heard == [{TO: "a", "x": 1}]


def test_followers_hear_what_rank_0_says() -> None:
    rng = seeded_rng()
    plans: list[dict[str, Any]] = [
        {"rows": rng.integers(0, 2**31, size).tolist(), "name": "LoRA \u00e9\u4e16", "scale": 0.1 + size}
        for size in (0, 1, 370, 371, 372, 380, 5000)  # some on either side of one frame
    ]

    def rank_of(group: RankGroup) -> list[Any]:
        if group.rank:
            return list(iter(group.hear, None))
        for plan in plans:
            group.say(plan)
        group.close()
        return plans

    assert run_ranks(RankLayout(sequence=3), rank_of) == [plans] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [(3,), (70_001,), (129, 130)])
def test_a_sum_is_that_in_the_order_of_the_ranks(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    rng = seeded_rng()
    parts = [torch.from_numpy(rng.normal(size=size)).to(dtype) for _ in range(4)]
    layout = RankLayout(tensor=4)
    sums = run_ranks(layout, lambda group: group.all_reduce(parts[group.rank], "tensor"))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (((parts[0].to(wide) + parts[1].to(wide)) + parts[2].to(wide)) + parts[3].to(wide)).to(dtype)
    assert all(torch.equal(one, expected) and one.dtype == dtype for one in sums)


def test_the_sum_of_a_row_is_the_same_beside_any_rows() -> None:
    rng = seeded_rng()
    rows = [torch.from_numpy(rng.normal(size=(40, 700))).float() for _ in range(3)]
    whole = run_ranks(RankLayout(tensor=3), lambda group: group.all_reduce(rows[group.rank], "tensor"))[0]
    alone = run_ranks(RankLayout(tensor=3), lambda group: group.all_reduce(rows[group.rank][7:8], "tensor"))[0]
    assert torch.equal(whole[7:8], alone)


def test_exchanges_go_along_their_axis_alone_and_are_counted() -> None:
    layout = RankLayout(cfg=2, sequence=2)

    def rank_of(group: RankGroup) -> tuple[Any, Any, Any, dict[Any, int]]:
        own = torch.tensor([float(group.rank)])
        gathered = [int(one) for one in group.gather(own, "cfg")]
        parts = torch.tensor([[group.rank * 10.0], [group.rank * 10.0 + 1]])
        exchanged = group.exchange(parts, "sequence").flatten().tolist()
        alone = group.gather(own, "tensor")
        return gathered, exchanged, alone[0] is own, dict(group.sent_bytes)

    found = run_ranks(layout, rank_of)
    assert [one[0] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [one[1] for one in found] == [[0.0, 10.0], [1.0, 11.0], [20.0, 30.0], [21.0, 31.0]]
    assert all(one[2] and one[3] == {"cfg": 4, "sequence": 4} for one in found)


def test_an_element_that_was_expanded_is_sent() -> None:
    """Torch calls it contiguous, with a stride of 0 that has no bytes."""
    element = torch.tensor(0.37).expand(1)

    def rank_of(group: RankGroup) -> list[torch.Tensor]:
        if group.rank == 0:
            group.spread([element])
        found = [element] if group.rank == 0 else group.receive(forms_of([element]))
        return [*found, *group.gather(element, "sequence")]

    assert [torch.cat(found).tolist() for found in run_ranks(RankLayout(sequence=2), rank_of)] == [
        [element.item()] * 3
    ] * 2


def test_tensors_that_cannot_be_sent_end_the_group() -> None:
    """The others wait for them already."""

    def rank_of(group: RankGroup) -> None:
        if group.rank == 0:
            with pytest.raises(RankLost, match="a plan failed: "):
                group.spread([torch.empty(1, device="meta")])
        with pytest.raises(RankLost):
            group.receive([("float32", [1])])

    run_ranks(RankLayout(sequence=2), rank_of)


def test_a_rank_that_stands_still_is_named_and_ends_the_group() -> None:
    is_over = threading.Event()

    def rank_of(group: RankGroup) -> RankLost | None:
        if group.rank == 2:
            is_over.wait(60)
            return None
        with pytest.raises(RankLost) as caught:
            group.all_reduce(torch.ones(5), "tensor")
        with pytest.raises(RankLost):  # at once
            group.say({})
        if group.rank == 0:
            is_over.set()
        return caught.value

    lost = run_ranks(RankLayout(tensor=3), rank_of, bound_s=1.5)
    assert lost[0] is not None
    assert 2 in lost[0].ranks
    assert "ranks that do not answer" in str(lost[0])


DYING = """
import os, sys
from deployments.engines.ranks.group import RankGroup
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.ranks.links import Meeting
import torch
meeting = Meeting(port=int(sys.argv[1]))
group = RankGroup.join(RankLayout(tensor=2), 1, meeting.open(1, 2, 60), bound_s=60)
assert group.hear() == {"step": 1}
group.all_reduce(torch.ones(1), "tensor")
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_is_seen_at_once() -> None:
    meeting, listener = listening()
    child = subprocess.Popen([sys.executable, "-c", DYING, str(meeting.port)], cwd=Path(__file__).parents[5])
    try:
        group = RankGroup.join(PAIR, 0, meeting.open(0, 2, 60, listener), bound_s=600)
        group.say({"step": 1})
        assert group.all_reduce(torch.ones(1), "tensor").tolist() == [2.0]
        with pytest.raises(RankLost, match="rank 1 does not answer") as caught:
            group.all_reduce(torch.ones(1), "tensor")
        assert caught.value.ranks == (1,)
    finally:
        child.kill()
        child.wait()


def test_a_rank_that_does_not_come_is_waited_for_within_the_bound(tmp_path: Path) -> None:
    store = Meeting(file=tmp_path / "met").open(0, 2, 0.2)
    with pytest.raises(RankLost, match=r"rank 0 did not meet all of 2 ranks within 0.2 s") as caught:
        RankGroup.join(PAIR, 0, store, bound_s=0.2)
    assert caught.value.ranks == (1,)


def test_one_rank_alone_needs_no_one() -> None:
    (found,) = run_ranks(RankLayout(), lambda group: group.all_reduce(torch.ones(2), "tensor"))
    assert found.tolist() == [1.0, 1.0]
