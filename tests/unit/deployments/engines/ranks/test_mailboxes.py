"""Exchanges through memory that ranks share: the values of any size and type, slow and lost ranks, and the bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from kit.seeding import seeded_random
from kit.waiting import wait_until
from torch import distributed

from deployments.engines.ranks import mailboxes
from deployments.engines.ranks.mailboxes import SharedLink, _Mailbox

T = TypeVar("T")
BOUND_S = 60.0


def on_links(size: int, call: Callable[[SharedLink], T]) -> list[T]:
    """Return the result of each rank, a thread with mailboxes of its own."""
    store = distributed.HashStore()

    def run(rank: int) -> T:
        link = SharedLink.join(store, rank, size)
        assert link is not None
        try:
            return call(link)
        finally:
            link.close()

    with ThreadPoolExecutor(size) as threads:
        return [one.result() for one in [threads.submit(run, rank) for rank in range(size)]]


def drawn(size: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float64).mul(0.37).add(rank).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_get_what_the_others_sent(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many exchanges of any size follow each other, while ranks are slow now and then."""
    monkeypatch.setattr(mailboxes, "_SLOT", 4096)
    monkeypatch.setattr(mailboxes, "_NBYTES", mailboxes._HEADER + 2 * 4096)
    monkeypatch.setattr(mailboxes, "_SPINS", 3)  # they sleep as well
    random = seeded_random()
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]
    steps = [(random.choice("bge"), random.choice((0, 1, 7, 1024, 5000)), random.choice(dtypes)) for _ in range(60)]
    slow = [random.randrange(size) if random.random() < 0.2 else None for _ in steps]

    def call(link: SharedLink) -> None:
        for (kind, count, dtype), late in zip(steps, slow, strict=True):
            if late == link.rank:
                threading.Event().wait(0.003)
            own, of_all = drawn(count, link.rank, dtype), [drawn(count, rank, dtype) for rank in range(size)]
            if kind == "b":
                link.broadcast(own, BOUND_S)
                assert torch.equal(own, of_all[0])
            elif kind == "g":
                found = link.gather_all(own, BOUND_S)
                assert all(torch.equal(one, other) for one, other in zip(found, of_all, strict=True))
            else:
                parts = torch.stack([own + to for to in range(size)])
                expected = torch.stack([one + link.rank for one in of_all])
                assert torch.equal(link.exchange(parts, BOUND_S), expected)

    on_links(size, call)


def test_numbers_of_rounds_go_around() -> None:
    both = threading.Barrier(2)

    def call(link: SharedLink) -> list[float]:
        link._round = 2**32 - 3
        link._boxes[link.rank]._count[0] = link._round
        both.wait()
        return [float(link.gather_all(torch.tensor(float(link.rank)), BOUND_S)[1]) for _ in range(6)]

    assert on_links(2, call) == [[1.0] * 6] * 2


def test_a_rank_that_stands_still_is_waited_for_within_the_bound() -> None:
    is_over = threading.Event()

    def call(link: SharedLink) -> None:
        if link.rank == 1:
            is_over.wait(BOUND_S)
            return
        with pytest.raises(RuntimeError, match="nothing came from number 1 of 2"):
            link.gather_all(torch.ones(3), 0.2)
        is_over.set()

    on_links(2, call)


def test_a_closed_link_fails_the_others_at_once() -> None:
    def call(link: SharedLink) -> None:
        link.gather_all(torch.ones(3), BOUND_S)
        if link.rank == 1:
            link.close()
        with pytest.raises(RuntimeError, match="is closed" if link.rank else "number 1 of 2 is gone"):
            link.gather_all(torch.ones(3), BOUND_S)

    on_links(2, call)


def test_what_a_rank_sent_before_it_ended_arrives() -> None:
    def call(link: SharedLink) -> list[float]:
        tensor = torch.tensor([7.0 if link.rank == 0 else 0.0])
        if link.rank:
            wait_until(lambda: link._boxes[0].is_gone())
        link.broadcast(tensor, BOUND_S)
        return tensor.tolist()

    assert on_links(2, call) == [[7.0], [7.0]]


@pytest.mark.parametrize("cause", ["another processor", "no memory", "another process"])
def test_without_shared_memory_no_rank_has_such_a_link(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("no memory")

    if cause == "another processor":
        monkeypatch.setattr(mailboxes.platform, "machine", lambda: "aarch64")
    elif cause == "no memory":
        monkeypatch.setattr(mailboxes.os, "posix_fallocate", refuse)
    else:
        monkeypatch.setattr(_Mailbox, "said", lambda box: [1, box._file, "00" * 16])
    store = distributed.HashStore()
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(SharedLink.join, store, rank, 2) for rank in range(2)]
        assert [one.result() for one in joining] == [None, None]
