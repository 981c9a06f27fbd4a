"""A request on its way through the admission queue: its ticket, its places, and why it was refused."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator

from cluster.admission.demand import Demand
from cluster.admission.dispatcher import Dispatcher, NotAdmitted
from cluster.admission.read_limiter import release_read_slot
from cluster.admission.records import Refusal
from deployments.errors import DeadlineExceeded, ModelUnavailable, QueueFull, ServiceError


class Slot:
    """The ticket of one request, and what became of it: the queue learns from that."""

    def __init__(self, queue: Dispatcher, ticket: int) -> None:
        self.is_answered = False
        self.switch_s = 0.0
        self._queue = queue
        self._ticket = ticket
        self._had_replica = False
        self._is_unable = False

    def is_elsewhere(self) -> bool:
        """Take in that the replica could not load the model. Return whether another one may be asked."""
        self._is_unable = self._queue.note_unable(self._ticket)
        return self._is_unable

    def replica(self) -> Awaitable[str]:
        """Return the replica to wait for, "" for whichever Serve chooses. Asked again, another one."""
        if self._had_replica:
            is_lost, self._is_unable = not self._is_unable, False
            return self._queue.reassign(self._ticket, is_lost=is_lost)
        self._had_replica = True
        return self._queue.slot(self._ticket)


@contextlib.contextmanager
def admitted(queue: Dispatcher, demand: Demand) -> Iterator[Slot]:
    """Let a request in for as long as the context lasts, however it ends.

    Raises QueueFull, DeadlineExceeded or ModelUnavailable when it is refused, at once or while it waits for its place.
    """
    ticket = queue.submit(demand)
    release_read_slot()
    slot = Slot(queue, ticket)
    try:
        yield slot
    except NotAdmitted as error:
        raise refusal_error(error.refusal, demand.deadline_s, demand.model) from None
    finally:
        queue.leave(ticket, is_answered=slot.is_answered, switch_s=slot.switch_s)


def refusal_error(refusal: Refusal, left_s: float, model: str = "") -> ServiceError:
    """Return a refusal as the error that clients get. `left_s` is what was left of the request's time when it came."""
    after_s = refusal.retry_after_s
    match refusal.reason:
        case "expired" if left_s <= 0:
            return DeadlineExceeded("the request timed out before it could be read", "timeout")
        case "expired":
            return DeadlineExceeded(f"the request exceeded its timeout of {left_s:g} s", "timeout")
        case "hopeless":
            needs = f"the request takes about {refusal.needs_s:.3g} s"
            return DeadlineExceeded(f"{needs}, more than its timeout of {left_s:g} s leaves", "timeout")
        case "unservable":
            return ModelUnavailable(f"model {model!r}: {refusal.text}", "model")
        case "unread":
            text = "server overloaded: the request would spend most of its timeout queued"
        case "late":
            text = f"server overloaded: the request would take about {refusal.needs_s:.3g} s, longer than its timeout"
        case "crowded":
            text = "queue full: more requests of this length would not be done in time"
        case "model_full":
            text = f"queue full: {refusal.limit} requests wait for model {model!r}, the maximum"
        case "queue_full":
            text = f"queue full: {refusal.limit} requests wait, the maximum"
    return QueueFull(text + (f"; try again in {after_s:.3g} s" if after_s is not None else ""), retry_after_s=after_s)
