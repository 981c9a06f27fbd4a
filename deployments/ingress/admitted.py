"""A request on its way through the admission queue: its ticket, its places, and why it was refused."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator

from cluster.control.admission_records import Refusal
from cluster.control.dispatcher import Dispatcher, NotAdmitted
from cluster.control.lanes import Ask
from cluster.control.shared_queue_client import SharedQueueClient
from deployments.errors import DeadlineExceeded, ModelUnavailable, QueueFull, ServiceError
from deployments.ingress.turns import end_turn

RequestQueue = Dispatcher | SharedQueueClient  # of this ingress alone, or of several


class Slot:
    """The ticket of one request, and what became of it: the queue learns from that."""

    def __init__(self, queue: RequestQueue, ticket: int) -> None:
        self.is_answered = False
        self.switch_s = 0.0
        self._queue = queue
        self._ticket = ticket
        self._had_place = False

    def place(self) -> Awaitable[str]:
        """Return the place to wait for: its replica, or "" for whichever Serve chooses. Once had, the replica died."""
        if self._had_place:
            return self._queue.place_again(self._ticket)
        self._had_place = True
        return self._queue.place(self._ticket)


@contextlib.contextmanager
def admitted(queue: RequestQueue, ask: Ask) -> Iterator[Slot]:
    """Let a request in for as long as the context lasts, however it ends.

    Raises QueueFull, DeadlineExceeded or ModelUnavailable when it is refused, at once or while it waits for its place.
    """
    ticket = queue.submit(ask)
    end_turn(ask)
    slot = Slot(queue, ticket)
    try:
        yield slot
    except NotAdmitted as error:
        raise refusal_error(error.refusal, ask) from None
    finally:
        queue.leave(ticket, is_answered=slot.is_answered, switch_s=slot.switch_s)


def refusal_error(refusal: Refusal, ask: Ask) -> ServiceError:
    """Return a refusal as the error that clients get. `ask.deadline_s` is from now."""
    after_s = refusal.retry_after_s
    if ask.deadline_s <= 0:
        return DeadlineExceeded("the request's timeout was over before the request could be read", "timeout")
    if refusal.reason == "expired":
        return DeadlineExceeded(f"the request's timeout of {ask.deadline_s:g} s is over", "timeout")
    if refusal.reason == "hopeless":
        return DeadlineExceeded(
            f"the request takes about {refusal.needs_s:.3g} s, and its timeout of {ask.deadline_s:g} s leaves less",
            "timeout",
        )
    if refusal.reason == "unservable":
        return ModelUnavailable(f"model {ask.model!r}: {refusal.text}", "model")
    when = f"; try again in {after_s:.3g} s" if after_s is not None else ""
    if refusal.reason == "late":
        text = f"it would take about {refusal.needs_s:.3g} s until this request is done, longer than its time{when}"
    elif refusal.reason == "crowded":
        text = f"too many requests wait: longer ones would never be in time behind any more of them{when}"
    elif refusal.reason == "model_full":
        text = f"{refusal.limit} requests wait for model {ask.model!r}, as many as may{when}"
    else:
        text = f"{refusal.limit} requests wait, as many as may{when}"
    return QueueFull(text, retry_after_s=after_s)
