"""A request and the future that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.batching.queue import QueuedRequest
from deployments.errors import GenerationFailed, InvalidRequest, Overloaded


class MergerClosed(Overloaded):
    """The replica is ending: it takes nothing more."""


class Answer(asyncio.Future[list[Any]]):
    """Cancelling takes its request out of the queue at once; a done callback would run a turn too late."""

    on_cancel: Callable[[], None] | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        was_open = super().cancel(msg)
        if was_open and self.on_cancel is not None:
            self.on_cancel()
        return was_open


@dataclass(eq=False, slots=True)
class MergeRequest(QueuedRequest):
    answer: Answer = field(kw_only=True)
    results: list[Any] = field(default_factory=list)  # by item, where it takes several calls
    num_missing: int = 0
    num_running: int = 0  # calls
    running_priority: int = 0  # as counted: a retune may change the other one


def refuse(request: MergeRequest, error: BaseException) -> None:
    """Its answer is this error, unless it has one already."""
    if not request.answer.done():
        request.answer.on_cancel = None
        if not isinstance(error, Exception) or isinstance(error, StopIteration):  # a future takes neither as its own
            error = GenerationFailed(f"the model failed: {error!r}")
        request.answer.set_exception(error)


def check(items: Sequence[Any], costs: Sequence[int] | None, timeout_s: float | None) -> None:
    """Raises InvalidRequest."""
    if costs is not None and len(costs) != len(items):
        raise InvalidRequest(f"{len(items)} items came with {len(costs)} costs; one each is expected")
    if costs is not None and min(costs, default=0) < 0:
        raise InvalidRequest(f"the cost of an item cannot be below 0, got {min(costs)}")
    if timeout_s is not None and not timeout_s >= 0:
        raise InvalidRequest(f"a timeout is 0 s or more, got {timeout_s}", "timeout")
