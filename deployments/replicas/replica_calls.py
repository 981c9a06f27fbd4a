"""The one way to the replicas of a deployment: every call of a handle, awaited or streamed, goes through here.

Serve's responses are not cancelled with who awaits them, a router without replicas keeps calls for ever, and what a
replica raises comes in Ray's wrapper. Here a call ends when its caller is cancelled, when its deadline is over, and
when there is no replica that could answer, and whatever ends it also ends the work in the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import grpc
from ray import serve
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.schema import DeploymentStatusOverview, ReplicaState

from cluster.process.tracing import span
from cluster.ray_seam.handles import by_value
from deployments.records.errors import NoReplica, ReplicaLost
from deployments.records.tasks import Deadline, shared_task

MAX_HANDLES: Final = 1024
PATIENCE_S: Final = 2.0  # without any answer of the deployment before it is asked whether there is a replica
# What the kernel says, in gRPC's words, of a connection that was never there, or of another node that is silent.
_NOT_REACHED: Final = re.compile("failed to connect|timed ?out|timeout|unreachable|no route|is down", re.IGNORECASE)

logger = logging.getLogger("atelier.replica")

WhyNone = Callable[[], Awaitable[str | None]]
OnPiece = Callable[[Any], Awaitable[None]]  # takes the next piece of a stream


async def nobody_knows() -> str | None:
    """Know no reason: calls of a deployment that nobody watches wait for their deadline."""
    return None


class ReplicaCalls:
    """The calls of one deployment; lives on one event loop.

    `why_none` says why no replica can answer, None while one can. It is asked out of band, by one task for all calls,
    and only when nothing was answered for `patience_s`: a replica that is busy answers somebody.
    """

    def __init__(
        self,
        handle: Any,
        why_none: WhyNone = nobody_knows,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handed_on = handle
        self._handle = by_value(handle)
        self._why_none = why_none
        self._patience_s = patience_s
        self._clock = clock
        self._answered_s = clock()
        self._placed: dict[tuple[str, bool], Any] = {}  # handles by the replica that they name, and streaming or not
        self._open: dict[asyncio.Timeout, str | None] = {}  # with the reason why it was given up
        self._watching: asyncio.Task[None] | None = None

    def begin_call(self, method: str, *arguments: Any, route: str = "") -> Any:
        """Return Serve's response, which other calls may take as an argument: its value does not come through here.

        The caller gives it to `answer` or cancels it.
        """
        handle = self._handed_on.options(stream=False, session_id=route) if route else self._handed_on
        return getattr(handle, method).remote(*arguments)

    async def call(
        self, method: str, *arguments: Any, deadline: Deadline, place: Awaitable[str] | None = None, route: str = ""
    ) -> Any:
        """Return the answer of the replica that `place` names; without a place, of one that Serve chooses.

        With the `route` of its texts it goes to the replica that has them, whichever the place was.
        Raises what `place` and the replica raise, as themselves; DeadlineExceeded; NoReplica, as soon as none can
        answer or have a place; Ray's errors when the replica dies; ReplicaUnavailableError when it was not reached, or
        its node has fallen silent.
        """
        name = await self._replica_at(place, deadline)
        handle = self._handle.options(stream=False, session_id=route) if route else self._handle_of(name)
        return await self.answer(getattr(handle, method).remote(*arguments), deadline)

    async def answer(self, response: Any, deadline: Deadline) -> Any:
        """Return the answer to a call that was begun. Raises as `call` does."""
        with _ended_with_its_caller(response):
            return await self._within(deadline, response)

    async def receive_stream(
        self,
        method: str,
        *arguments: Any,
        on_piece: OnPiece,
        deadline: Deadline,
        place: Awaitable[str] | None = None,
    ) -> None:
        """Give the pieces of a generator method to `on_piece`, which is waited for. Raises as `call` does.

        A caller who is cancelled ends the replica's generator; so does `on_piece` when it raises, or takes too long.
        """
        handle = self._handle_of(await self._replica_at(place, deadline), stream=True)
        response = getattr(handle, method).remote(*arguments)
        with _ended_with_its_caller(response):
            while True:
                try:
                    piece = await self._within(deadline, anext(response))
                except StopAsyncIteration:
                    return
                async with deadline.bounding():
                    await on_piece(piece)

    async def _replica_at(self, place: Awaitable[str] | None, deadline: Deadline) -> str:
        """Return the name of the replica that has the place, "" for any."""
        if place is None:
            return ""
        with span("queue"):
            return str(await self._within(deadline, place, is_answer=False))

    def _handle_of(self, name: str, *, stream: bool = False) -> Any:
        if not name:
            return self._handle.options(stream=True) if stream else self._handle
        key = name, stream
        if key not in self._placed:
            if len(self._placed) >= MAX_HANDLES:
                self._placed.clear()  # most of them name replicas that are gone
            self._placed[key] = self._handle.options(stream=stream, session_id=name)
        return self._placed[key]

    async def _within(self, deadline: Deadline, answer: Awaitable[Any], *, is_answer: bool = True) -> Any:
        timeout = asyncio.timeout_at(deadline.at)
        try:
            async with timeout:
                self._open[timeout] = None
                if self._watching is None or self._watching.done():
                    self._watching = shared_task(self._watch())
                found = await answer
        except TimeoutError:
            if not timeout.expired():  # the replica's own
                raise
            reason = self._open[timeout]
            raise (NoReplica(reason) if reason else deadline.exceeded()) from None
        finally:
            self._open.pop(timeout, None)
        if is_answer:
            self._answered_s = self._clock()
        return found

    async def _watch(self) -> None:
        """Give up all calls that wait, once no replica can answer; those that began just now as well."""
        while self._open:
            await asyncio.sleep(self._patience_s)
            if self._clock() - self._answered_s < self._patience_s:
                continue
            if (reason := await self._why_none()) is None:
                continue
            for timeout in self._open:
                if not timeout.expired():
                    self._open[timeout] = reason
                    timeout.reschedule(0.0)


@contextlib.contextmanager
def _ended_with_its_caller(response: Any) -> Iterator[None]:
    """Cancel the call when its caller does not get to its end, and raise a replica's errors without Ray's wrapper."""
    try:
        yield
    except asyncio.CancelledError:
        response.cancel()
        task = asyncio.current_task()
        if task is not None and not task.cancelling():  # not this caller, but the replica's work was cancelled
            raise ReplicaLost("the replica gave up this request; try again") from None
        raise
    except DeploymentUnavailableError as error:
        raise NoReplica(str(error)) from None
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except ActorUnavailableError as error:
        response.cancel()
        if _was_not_reached(error):
            raise ReplicaUnavailableError(f"actor {error.actor_id}") from None
        raise
    except BaseException:  # a deadline, a replica that is out of reach, whoever takes the pieces
        response.cancel()
        raise


def _was_not_reached(error: ActorUnavailableError) -> bool:
    """Return whether the network is why there is no answer, and not the replica's process, which may have ended.

    Serve raises the same for both, while it handles what gRPC raised (Ray 2.60).
    """
    reason = error.__context__
    return isinstance(reason, grpc.aio.AioRpcError) and bool(_NOT_REACHED.search(reason.details() or ""))


class ReplicaStates:
    """The state of a deployment's replicas as Serve's controller knows it: asked beside the requests, not behind them.

    Without `app`, the deployment is one of the application that this replica belongs to.
    """

    def __init__(self, deployment: str, app: str | None = None) -> None:
        self._deployment = deployment
        self._app = app or serve.get_replica_context().app_name

    async def why_none_runs(self) -> str | None:
        """Return None when at least one replica runs, or when the controller does not answer."""
        overview = await self._overview()
        return overview and _why_none_runs(self._deployment, overview)

    async def why_none_can(self) -> str | None:
        """Return None also while a replica is starting, for the first time or in the place of one that died."""
        overview = await self._overview()
        return overview and _why_none_can(self._deployment, overview)

    async def _overview(self) -> DeploymentStatusOverview | None:
        try:
            status = await asyncio.to_thread(serve.status)
        except Exception as error:  # of Ray or Serve; the calls that wait have their deadlines
            logger.warning("Serve's controller does not answer: %s", str(error).partition("\n")[0])
            return None
        app = status.applications.get(self._app)
        return app.deployments.get(self._deployment) if app else None


def _why_none_runs(deployment: str, overview: DeploymentStatusOverview) -> str | None:
    """Return Serve's message about a deployment without a running replica, else None."""
    if overview.replica_states.get(ReplicaState.RUNNING, 0):
        return None
    return f"no replica of {deployment!r} is running ({overview.status.value}): {_last_line(overview.message)}"


def _why_none_can(deployment: str, overview: DeploymentStatusOverview) -> str | None:
    """Return the result of `_why_none_runs`, but None while replicas start.

    Serve tries again for ever where a replica ran before, and then tells the failure in its message only (Ray 2.60).
    """
    has_failed = overview.status.value == "DEPLOY_FAILED" or "failed to start" in overview.message
    return _why_none_runs(deployment, overview) if has_failed else None


def _last_line(message: str) -> str:
    """Return the error itself when the message is a traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it says nothing about why"
