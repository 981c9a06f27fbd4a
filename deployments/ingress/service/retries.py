"""Retries: a request whose replica dies is sent to another one. Its answer depends on no state of the dead replica.

A request may also be the cause of the death. So it is sent again once, and requests that were in flight on a replica
that died are sent again one at a time: when another replica dies, only one of them was there for the second time.
One request takes at most two replicas with it, and no other request fails for it.

A replica that was out of reach, or whose node fell silent, does not count against the request: it is sent again
until a replica is reached, and one of them may be on this side of a cut that heals.

Most replicas die of other causes, and then all of their requests wait for each other. A request that has waited for
`MAX_TURN_WAIT_S` goes on beside the others; if the guilty one is still among them, they may fail with it.

A request whose replica could not load its model is sent again once too, to a replica that has not failed with it.
Images go on elsewhere after their last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.records import Demand
from deployments.ingress.messages.terms import AdmissionSlot, admitted
from deployments.pipelines.plans import SegmentCall, SegmentResult
from deployments.pipelines.runner import SegmentReply
from deployments.records import ImageProgress
from deployments.records.errors import CannotLoad, ReplicaLost
from deployments.records.tasks import Deadline
from deployments.replicas.replica_calls import OnPiece, ReplicaCalls

MAX_RETRIES: Final = 1  # after the death of a replica
MAX_MISSED: Final = 60  # tries that reached no replica
MAX_TURN_WAIT_S: Final = 30.0
PAUSE_S: Final = 0.1  # the router learns of a death a moment after the caller
_NODE_DIED: Final = "its node has died"  # Ray's words; a crash says other ones
LONGEST_PAUSE_S: Final = 1.0  # between tries that reach no replica


def _is_lost(error: BaseException | None) -> bool:
    """Return whether a replica on the request's way is gone or out of reach: the called one, or one that it called.

    A replica out of reach (ActorUnavailableError, gRPC's only sign of a death) may still be working on the request.
    To send it again is safe all the same: a request changes nothing, and `ReplicaCalls` has cancelled the first call.
    """
    if isinstance(error, RayActorError | ReplicaUnavailableError):
        return True
    # Serve's own wrapper around the death of a replica further on.
    return error is not None and isinstance(error.__cause__, RayActorError)


class _Retries:
    """The count of retries of one request.

    With a `slot`, another replica may have it if one could not load the model.
    """

    def __init__(self, slot: AdmissionSlot | None = None) -> None:
        self._slot = slot
        self._has_moved = False
        self._num_died = self._num_missed = 0
        self.is_suspect = False

    def pause_after(self, error: Exception, num_pieces: int = 0) -> float:
        """Return the seconds to wait before the request is sent again.

        Raises the replica's own error if there is one, and ReplicaLost when the request was on too many replicas that
        died, when none could be reached for long, or when `num_pieces` of a stream have gone out already that another
        replica would begin anew.
        """
        if isinstance(error, CannotLoad):
            # HAZARD: note the last failure, too, or else the next request would come here again.
            is_elsewhere = self._slot is not None and self._slot.note_unable()
            if not is_elsewhere or self._has_moved or num_pieces:
                raise error
            self._has_moved, self.is_suspect = True, False
            return 0.0
        if not _is_lost(error):
            raise error
        if num_pieces:
            raise ReplicaLost(
                f"the replica that worked on this request died after {num_pieces} pieces; try again"
            ) from error
        if isinstance(error, ReplicaUnavailableError) or _NODE_DIED in str(error):
            self._num_missed += 1
            if self._num_missed > MAX_MISSED:
                raise ReplicaLost(f"no replica could be reached in {self._num_missed} tries; try again") from error
        else:
            self._num_died += 1
            if self._num_died > MAX_RETRIES:
                raise ReplicaLost(f"{self._num_died} replicas were lost while they worked on this request") from error
            self.is_suspect = True
        return min(PAUSE_S * 2 ** min(self._num_missed, 4), LONGEST_PAUSE_S)


class Resumption:
    """The point from which another replica goes on with a stream. This base has none, and starts from the beginning."""

    def __init__(self) -> None:
        self.num_final = 0  # pieces sent to the client that another replica would make anew
        self.is_moved = False  # the replica ended the stream for another to go on
        self.is_complete = False  # all pieces have come: the replica's fate no longer matters to the request

    def begin_try(self) -> tuple[Any, ...]:
        """Return the arguments for the next replica that follow the request's own."""
        return ()

    def take(self, piece: Any) -> bool:
        """Take a piece in; return whether the caller gets it."""
        self.num_final += 1
        return True


class ResumedImages(Resumption):
    """The progress of the images of one request.

    Steps may be done again: another replica goes on after the last received checkpoint, which it gets as one more
    argument, and steps that were reported already are not reported again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sent_step = 0
        self._checkpoint: bytes | None = None

    def begin_try(self) -> tuple[Any, ...]:
        self.is_moved = False
        return () if self._checkpoint is None else (self._checkpoint,)

    def take(self, piece: Any) -> bool:
        if not isinstance(piece, ImageProgress):
            self.is_complete = True  # the result is the last piece
            return super().take(piece)
        self._checkpoint = piece.checkpoint or self._checkpoint
        self.is_moved = piece.is_moved
        if piece.is_moved or piece.step <= self._sent_step:
            return False
        self._sent_step = piece.step
        return True


class RetriedCalls:
    """Calls of one deployment that are answered by a second replica if need be. Lives on one event loop."""

    def __init__(self, calls: ReplicaCalls, queue: Dispatcher, timeout_s: float) -> None:
        """Make the calls. Calls of segments, which begin without waiting for a place, have `timeout_s` in all."""
        self._calls = calls
        self._queue = queue
        self._timeout_s = timeout_s
        self._suspects = asyncio.Lock()

    async def call(self, method: str, *arguments: Any, demand: Demand, route: str = "") -> Any:
        """Call a method of a replica with a place for the request, or of the replica that has the texts of `route`.

        `demand.deadline_s` is from now.

        Raises the replica's errors, QueueFull, DeadlineExceeded, NoReplica, ReplicaLost.
        """
        deadline = Deadline(demand.deadline_s)
        with admitted(self._queue, demand) as slot:

            def send() -> Awaitable[Any]:
                return self._calls.call(method, *arguments, deadline=deadline, place=slot.replica(), route=route)

            # The texts of a route have a replica of their own, whichever the place was.
            result = await self.answered(send, deadline, None if route else slot)
            _note_answer(slot, result)
        return result

    async def receive_stream(
        self, method: str, *arguments: Any, on_piece: OnPiece, demand: Demand, resumption: Resumption | None = None
    ) -> Any:
        """Give the pieces of a stream to `on_piece`, and return the last. Raises as `call` does.

        By `resumption` another replica goes on; without it a stream cannot, once a piece has gone out. Work that a
        replica migrates goes on elsewhere as often as that happens.
        """
        deadline = Deadline(demand.deadline_s)
        resumption, last = resumption or Resumption(), None

        async def take(piece: Any) -> None:
            nonlocal last
            last = piece
            if resumption.take(piece):
                await on_piece(piece)

        with admitted(self._queue, demand) as slot:
            retries = _Retries(slot)
            while True:
                try:
                    async with self._turn(retries, deadline):
                        await self._calls.receive_stream(
                            method,
                            *arguments,
                            *resumption.begin_try(),
                            on_piece=take,
                            deadline=deadline,
                            place=slot.replica(),
                        )
                    if not resumption.is_moved:
                        break
                except Exception as error:
                    if resumption.is_complete and _is_lost(error):
                        break
                    await _pause(retries.pause_after(error, resumption.num_final), deadline)
            if last is not None:
                _note_answer(slot, last)
        return last

    def begin_call(self, method: str, *arguments: Any, route: str = "") -> Any:
        """Begin a call and return Serve's response. Retries begin when it is awaited with `answer_begun`."""
        return self._calls.begin_call(method, *arguments, route=route)

    async def answer_begun(self, response: Any, deadline: Deadline) -> Any:
        """Await a response of `begin_call`. Raises Ray's errors when the replica dies."""
        return await self._calls.answer(response, deadline)

    def deadline(self) -> Deadline:
        """Return the deadline of a new request."""
        return Deadline(self._timeout_s)

    async def answered(
        self, send: Callable[[], Awaitable[Any]], deadline: Deadline, slot: AdmissionSlot | None = None
    ) -> Any:
        """Return the result of `send`, from a second replica if need be. No try begins after the deadline."""
        retries = _Retries(slot)
        while True:
            try:
                async with self._turn(retries, deadline):
                    return await send()
            except Exception as error:
                await _pause(retries.pause_after(error), deadline)

    def _turn(self, retries: _Retries, deadline: Deadline) -> AbstractAsyncContextManager[None]:
        """Return the turn of a try: suspects go one at a time, all others at once."""
        return self._one_suspect(deadline) if retries.is_suspect else contextlib.nullcontext()

    @contextlib.asynccontextmanager
    async def _one_suspect(self, deadline: Deadline) -> AsyncIterator[None]:
        try:
            async with deadline.bounding(), asyncio.timeout(MAX_TURN_WAIT_S):
                await self._suspects.acquire()
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._suspects.release()


async def _pause(seconds: float, deadline: Deadline) -> None:
    """Wait. Raises DeadlineExceeded."""
    async with deadline.bounding():
        await asyncio.sleep(seconds)


def _note_answer(slot: AdmissionSlot, answer: Any) -> None:
    """Tell the queue that the request was answered, and the seconds of its replica's switch."""
    slot.is_answered = True
    switch = getattr(answer, "switch", None)
    slot.switch_s = switch.switch_ms / 1e3 if switch else 0.0


class EncoderReply:
    """The reply of a segment, called again elsewhere when its replica dies.

    Each try gets the present responses of `upstream`. Its own `response` is Serve's, which may be passed on without
    coming here.
    """

    def __init__(
        self, encoder: RetriedCalls, call: SegmentCall, upstream: Sequence[SegmentReply] = (), route: str = ""
    ) -> None:
        self._encoder = encoder
        self._call = call
        self._upstream = upstream
        self._route = route
        self._deadline = encoder.deadline()
        self._has_failed = False
        self.response = self._begin()

    def __await__(self) -> Generator[Any, None, SegmentResult]:
        return self._answered().__await__()

    def cancel(self) -> None:
        """Cancel the call."""
        self.response.cancel()

    def _begin(self) -> Any:
        results = [reply.response for reply in self._upstream]
        return self._encoder.begin_call("run_segment", self._call, *results, route=self._route)

    def _send_again(self) -> None:
        """Send the call and those of earlier segments again: any replica on the way may have died."""
        for reply in self._upstream:
            if isinstance(reply, EncoderReply):
                reply._send_again()
        self.response = self._begin()
        self._has_failed = False

    async def _answered(self) -> SegmentResult:
        result: SegmentResult = await self._encoder.answered(lambda: self._try(self._deadline), self._deadline)
        return result

    async def _try(self, deadline: Deadline) -> Any:
        if self._has_failed:
            self._send_again()
        try:
            return await self._encoder.answer_begun(self.response, deadline)
        except Exception:
            self._has_failed = True
            raise
