"""The order of copies on a card, as its streams and events are told of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from weights.memory.device_space import DeviceSpace
from weights.memory.transfer import HostCopy, Pair, TransferReport


class Card:
    """The streams and events of a card, and what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def Stream(self, device: torch.device) -> str:
        return f"own stream of {device}"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.told.append(f"use the {stream}")
        yield
        self.told.append("as before")

    def wait(self, stream: str) -> None:
        """Be the event, too."""
        self.told.append(f"the {stream} waits")


class ToldCopy(HostCopy):
    """Copies, and tells the card."""

    def __init__(self, card: Card) -> None:
        super().__init__(num_threads=1)
        self._card = card

    def copy(self, pairs: Sequence[Pair]) -> TransferReport:
        self._card.told.append("copy")
        return super().copy(pairs)


def test_memory_that_others_may_still_read_is_filled_after_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    monkeypatch.setattr(torch, "get_device_module", lambda device: card)
    space = DeviceSpace("cpu-private", ToldCopy(card))
    host, (target,) = torch.arange(64, dtype=torch.uint8), space.allocate([64])
    space.fill([(host, target)], after=card)
    assert torch.equal(host, target)
    own = "own stream of cpu"
    assert card.told == [f"the {own} waits", f"use the {own}", "copy", "as before"]


def test_where_nothing_was_told_the_copies_wait_for_nothing() -> None:
    card = Card()
    space = DeviceSpace("cpu-private", ToldCopy(card))
    host, (target,) = torch.arange(64, dtype=torch.uint8), space.allocate([64])
    space.fill([(host, target)], after=space.work_so_far())
    assert torch.equal(host, target)
    assert card.told == ["copy"]
