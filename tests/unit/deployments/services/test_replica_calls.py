"""Calls of replicas end with their caller, in time, and when there is nobody who could answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from kit.streams import stream_pieces
from kit.waiting import until
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from unit.deployments.serve_fakes import FakeHandle

from deployments.records.errors import DeadlineExceeded, InvalidRequest, NoReplica, ReplicaLost
from deployments.records.tasks import Deadline
from deployments.replicas.replica_calls import ReplicaCalls

TICK_S = 0.005
LONG_S = 30.0


class Replica:
    """`gate` holds all of its work; what was begun, ended and cancelled is counted."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.num_begun = self.num_done = self.num_cancelled = 0
        self.error: Exception | None = None

    async def on_work(self, value: int) -> int:
        await self._work()
        return 2 * value

    async def on_count(self, most: int) -> AsyncIterator[int]:
        for number in range(most):
            yield number
            await self._work()

    async def _work(self) -> None:
        self.num_begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error:
            raise self.error
        self.num_done += 1


@pytest.fixture
def replica() -> Replica:
    return Replica()


async def test_an_answer_comes_and_nothing_is_cancelled(replica: Replica) -> None:
    handle = FakeHandle(replica)
    replica.gate.set()
    assert await ReplicaCalls(handle).call("work", 4, deadline=Deadline(LONG_S)) == 8
    async with stream_pieces(ReplicaCalls(handle), "count", 3, deadline=Deadline(None)) as pieces:
        assert [piece async for piece in pieces] == [0, 1, 2]
    assert [response.num_cancels for response in handle.responses] == [0, 0]


async def test_a_caller_that_is_cancelled_ends_the_work(replica: Replica) -> None:
    calls = ReplicaCalls(FakeHandle(replica))
    asking = asyncio.create_task(calls.call("work", 1, deadline=Deadline(LONG_S)))
    await until(lambda: replica.num_begun)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: replica.num_cancelled == 1)


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_time_that_is_over_ends_the_work(replica: Replica, is_own: bool) -> None:
    calls = ReplicaCalls(FakeHandle(replica))
    if is_own:
        with pytest.raises(DeadlineExceeded, match=r"exceeded its timeout of 0.005 s"):
            await calls.call("work", 1, deadline=Deadline(TICK_S))
    else:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await calls.call("work", 1, deadline=Deadline(LONG_S))
    await until(lambda: replica.num_cancelled == 1)


async def test_a_stream_that_is_closed_early_ends_the_work(replica: Replica) -> None:
    calls = ReplicaCalls(FakeHandle(replica))
    async with stream_pieces(calls, "count", 9, deadline=Deadline(LONG_S)) as pieces:
        assert await anext(pieces) == 0
        await until(lambda: replica.num_begun)
    await until(lambda: replica.num_cancelled == 1)


async def test_a_stream_has_its_time_for_all_pieces_together(replica: Replica) -> None:
    pieces = stream_pieces(ReplicaCalls(FakeHandle(replica)), "count", 9, deadline=Deadline(TICK_S))
    assert await anext(pieces) == 0
    with pytest.raises(DeadlineExceeded):
        await anext(pieces)
    await until(lambda: replica.num_cancelled == 1)


@pytest.mark.parametrize("error", [InvalidRequest("too long", "prompt"), TimeoutError("the replica's own")])
async def test_what_a_replica_raises_leaves_as_itself(replica: Replica, error: Exception) -> None:
    replica.error = error
    replica.gate.set()
    calls = ReplicaCalls(FakeHandle(replica))
    with pytest.raises(type(error)) as raised:
        await calls.call("work", 1, deadline=Deadline(LONG_S))
    assert raised.value is error
    with pytest.raises(type(error)) as raised:
        [piece async for piece in stream_pieces(calls, "count", 2, deadline=Deadline(LONG_S))]
    assert raised.value is error


async def test_a_death_is_told_as_ray_tells_it(replica: Replica) -> None:
    replica.error = ActorDiedError()
    replica.gate.set()
    with pytest.raises(ActorDiedError):
        await ReplicaCalls(FakeHandle(replica)).call("work", 1, deadline=Deadline(LONG_S))


@pytest.mark.parametrize(
    ("details", "was_reached"),
    [
        ("Stream removed (Socket closed)", True),
        ("recvmsg:Connection reset by peer", True),
        ("recvmsg:Connection timed out", False),
        ("failed to connect to all addresses; last error: UNKNOWN: Connection refused", False),
        ("sendmsg: No route to host (113)", False),
    ],
)
async def test_a_silent_node_is_told_from_a_process_that_ended(
    replica: Replica, details: str, was_reached: bool
) -> None:
    """The words are gRPC's own, as `tests/nodes` gets them of a cut link and of a process that is killed."""
    nothing = grpc.aio.Metadata()
    replica.error = ActorUnavailableError("Actor is unavailable.", None)  # which Serve raises while it handles that one
    replica.error.__context__ = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=details)
    replica.gate.set()
    calls, expected = (
        ReplicaCalls(FakeHandle(replica)),
        ActorUnavailableError if was_reached else ReplicaUnavailableError,
    )
    with pytest.raises(expected):
        await calls.call("work", 1, deadline=Deadline(LONG_S))
    with pytest.raises(expected):
        [piece async for piece in stream_pieces(calls, "count", 2, deadline=Deadline(LONG_S))]


async def test_work_that_the_replica_gave_up_is_no_cancellation_of_the_caller(replica: Replica) -> None:
    handle = FakeHandle(replica)
    asking = asyncio.create_task(ReplicaCalls(handle).call("work", 1, deadline=Deadline(LONG_S)))
    await until(lambda: replica.num_begun)
    handle.responses[0].task.cancel()  # its end, not `cancel()` of the response
    with pytest.raises(ReplicaLost, match="gave up"):
        await asking


async def test_no_replica_is_an_answer_for_all_who_wait_and_asked_for_once(replica: Replica) -> None:
    num_asked = 0

    async def why_none() -> str:
        nonlocal num_asked
        num_asked += 1
        return "no replica of 'worker' is running: no such file"

    calls = ReplicaCalls(FakeHandle(replica), why_none, patience_s=TICK_S)
    waiting = [calls.call("work", number, deadline=Deadline(LONG_S)) for number in range(20)]
    stream = stream_pieces(calls, "count", 2, deadline=Deadline(LONG_S))
    assert await anext(stream) == 0
    outcomes = await asyncio.gather(*waiting, anext(stream), return_exceptions=True)
    assert {(type(outcome), str(outcome)) for outcome in outcomes} == {
        (NoReplica, "no replica of 'worker' is running: no such file")
    }
    assert num_asked == 1
    await until(lambda: replica.num_cancelled == 21)


async def test_a_replica_that_is_starting_is_waited_for(replica: Replica) -> None:
    num_asked = 0

    async def why_none() -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 3:
            replica.gate.set()

    calls = ReplicaCalls(FakeHandle(replica), why_none, patience_s=TICK_S)
    assert await calls.call("work", 3, deadline=Deadline(LONG_S)) == 6
    assert num_asked == 3


async def test_a_replica_that_answers_somebody_is_not_asked_about(replica: Replica) -> None:
    """Busy is not gone: 256 requests before this one, say."""
    now_s = 0.0
    num_asked = 0

    async def why_none() -> str:
        nonlocal num_asked
        num_asked += 1
        return "it is gone"

    calls = ReplicaCalls(FakeHandle(replica), why_none, patience_s=TICK_S, clock=lambda: now_s)
    long = asyncio.create_task(calls.call("work", 1, deadline=Deadline(LONG_S)))
    for _ in range(5):
        now_s += 0.9 * TICK_S
        async with stream_pieces(calls, "count", 1, deadline=Deadline(LONG_S)) as pieces:
            assert await anext(pieces) == 0
        await asyncio.sleep(TICK_S)
    assert num_asked == 0
    now_s += TICK_S
    with pytest.raises(NoReplica, match="it is gone"):
        await long


async def test_a_deployment_that_failed_for_good_says_so() -> None:
    class Handle:
        work = type("Method", (), {"remote": staticmethod(lambda: _unavailable())})

    with pytest.raises(NoReplica, match="worker"):
        await ReplicaCalls(Handle()).call("work", deadline=Deadline(LONG_S))


def _unavailable() -> Any:
    future = asyncio.get_running_loop().create_future()
    future.set_exception(DeploymentUnavailableError(DeploymentID("worker", "atelier")))
    return future
