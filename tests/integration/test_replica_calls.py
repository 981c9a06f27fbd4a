"""Calls over handles of real Serve: who leaves ends the work, and no replica is an answer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import ray
from integration.harness import Cluster
from ray import serve
from ray.serve.config import RequestRouterConfig

from deployments.errors import DeadlineExceeded, InvalidRequest, NoReplica
from deployments.services import replica_calls
from deployments.services.deadlines import Deadline
from deployments.services.placed_router import CLASS as PLACED_ROUTER
from deployments.services.replica_calls import ReplicaCalls, ReplicaStates
from deployments.services.replica_watch import watch_replicas
from deployments.tasks import shared_task

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import tests

APP, NAME = "replica-calls", "Working"
LONG_S = 60.0
NUM_AT_ONCE = 16


@ray.remote(num_cpus=0)
class Slow:
    """An actor that replicas call for several requests at once."""

    def __init__(self) -> None:
        self._gate = asyncio.Event()

    async def value(self) -> int:
        await self._gate.wait()
        return 7

    async def let_go(self) -> None:
        self._gate.set()

    async def begin_anew(self) -> None:
        self._gate = asyncio.Event()


class Working:
    """Holds its work until it is let go, and counts what begins and what is cancelled. Starts when `folder` lets it."""

    async def __init__(self, folder: Path, slow: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        if (folder / "broken").exists():
            raise ValueError("the weights are nowhere to be found")
        while (folder / "closed").exists():
            await asyncio.sleep(0.05)
        self._slow = slow
        await self.begin_anew()

    async def begin_anew(self) -> None:
        self._gate = asyncio.Event()
        self._shared: asyncio.Task[int] | None = None
        self.counts = {"begun": 0, "cancelled": 0}

    async def work(self, value: int) -> int:
        if value < 0:
            raise InvalidRequest(f"{value} is below 0", "value")
        await self._hold()
        return 2 * value

    async def pieces(self, most: int) -> AsyncIterator[int]:
        for number in range(most):
            yield number
            await self._hold()

    async def shared(self) -> int:
        """Work that several requests wait for belongs to none of them."""
        self.counts["begun"] += 1
        if self._shared is None:
            self._shared = shared_task(self._ask_slow())
        return await asyncio.shield(self._shared)

    async def seen(self) -> dict[str, int]:
        return dict(self.counts)

    async def die(self) -> None:
        os._exit(1)

    async def _ask_slow(self) -> int:
        return await self._slow.value.remote()

    async def _hold(self) -> None:
        self.counts["begun"] += 1
        try:
            await self._gate.wait()
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise


@pytest.fixture(scope="module")
def slow(cluster: Cluster) -> Any:
    return Slow.remote()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("replica")
    return made


@pytest.fixture(scope="module")
def application(cluster: Cluster, slow: Any, folder: Path) -> Iterator[Any]:
    """One application for all tests, because Serve takes seconds to start and to end one."""
    deployment = serve.deployment(Working).options(
        name=NAME,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=0.5,
        graceful_shutdown_wait_loop_s=0.1,
        max_ongoing_requests=NUM_AT_ONCE,
        request_router_config=RequestRouterConfig(request_router_class=PLACED_ROUTER),
    )
    yield serve.run(deployment.bind(folder, slow), name=APP, route_prefix=None)
    serve.delete(APP)


@pytest.fixture
async def handle(application: Any, slow: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The handle. Calls go by gRPC, as between replicas behind HAProxy; "actor": as behind Serve's own proxy."""
    monkeypatch.setattr(replica_calls, "RAY_SERVE_USE_GRPC_BY_DEFAULT", getattr(request, "param", "grpc") == "grpc")
    await slow.begin_anew.remote()
    await application.begin_anew.remote()
    return application


async def until(handle: Any, what: str, number: int) -> None:
    async with asyncio.timeout(30):
        while (await handle.seen.remote())[what] != number:
            await asyncio.sleep(0.01)


async def cancelled(calls: ReplicaCalls, handle: Any) -> None:
    asking = asyncio.create_task(calls.call("work", 1, deadline=Deadline(LONG_S)))
    await until(handle, "begun", 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def out_of_time(calls: ReplicaCalls, handle: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        await calls.call("work", 1, deadline=Deadline(1.0))
    await until(handle, "begun", 1)


async def closed_early(calls: ReplicaCalls, handle: Any) -> None:
    async with aclosing(calls.stream_pieces("pieces", 9, deadline=Deadline(LONG_S))) as pieces:
        assert await anext(pieces) == 0
        await until(handle, "begun", 1)


@pytest.mark.parametrize("handle", ["grpc", "actor"], indirect=True)
@pytest.mark.parametrize("leave", [cancelled, out_of_time, closed_early])
async def test_who_leaves_ends_the_work_in_the_replica(handle: Any, leave: Callable[..., Any]) -> None:
    await leave(ReplicaCalls(handle), handle)
    await until(handle, "cancelled", 1)


async def test_an_error_of_the_replica_leaves_as_itself(handle: Any) -> None:
    with pytest.raises(InvalidRequest, match="-3 is below 0") as raised:
        await ReplicaCalls(handle).call("work", -3, deadline=Deadline(LONG_S))
    assert raised.value.param == "value"


async def test_what_others_joined_goes_on_when_its_first_caller_leaves(handle: Any, slow: Any) -> None:
    calls = ReplicaCalls(handle)
    first = asyncio.create_task(calls.call("shared", deadline=Deadline(LONG_S)))
    await until(handle, "begun", 1)
    second = asyncio.create_task(calls.call("shared", deadline=Deadline(LONG_S)))
    await until(handle, "begun", 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait({second}, timeout=1.0)  # Ray cancels what was called for the first, if anything
    await slow.let_go.remote()
    assert await second == 7


async def test_a_replica_that_holds_as_much_as_serve_lets_in_is_asked_again(handle: Any, slow: Any) -> None:
    """A call that names its replica goes nowhere else, and is not lost when it is refused there."""
    names: set[str] = set()
    watch_replicas(handle, names.update)
    async with asyncio.timeout(10):
        while not names:
            await asyncio.sleep(0.01)
    (name,) = names
    calls = ReplicaCalls(handle)
    deadline = Deadline(LONG_S)

    async def place() -> str:
        return name

    asking = [
        asyncio.create_task(calls.call("shared", deadline=deadline, place=place())) for _ in range(3 * NUM_AT_ONCE)
    ]
    done, _ = await asyncio.wait(asking, timeout=1.0)
    assert not done
    await slow.let_go.remote()
    async with asyncio.timeout(20):
        assert await asyncio.gather(*asking) == [7] * len(asking)


async def test_a_replica_that_is_full_of_work_counts_as_running(handle: Any) -> None:
    """A question whether it runs does not queue behind its work."""
    states = ReplicaStates(NAME, APP)
    calls = ReplicaCalls(handle)
    asking = [asyncio.create_task(calls.call("work", 1, deadline=Deadline(LONG_S))) for _ in range(64)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        assert await states.why_none_runs() is None
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_no_replica_is_an_answer_and_one_that_starts_is_waited_for(handle: Any, folder: Path) -> None:
    """The last one: it leaves the application without a replica."""
    calls = ReplicaCalls(handle, ReplicaStates(NAME, APP).why_none_can, patience_s=0.5)
    assert set(await calls.call("seen", deadline=Deadline(LONG_S))) == {"begun", "cancelled"}
    (folder / "closed").touch()
    with pytest.raises(ray.exceptions.RayActorError):
        await calls.call("die", deadline=Deadline(LONG_S))
    waiting = asyncio.create_task(calls.call("seen", deadline=Deadline(LONG_S)))
    assert not (await asyncio.wait({waiting}, timeout=1.5))[0]
    (folder / "closed").unlink()
    assert await waiting == {"begun": 0, "cancelled": 0}

    (folder / "broken").touch()
    with pytest.raises(ray.exceptions.RayActorError):
        await calls.call("die", deadline=Deadline(LONG_S))
    with pytest.raises(NoReplica, match="the weights are nowhere to be found"):
        await calls.call("seen", deadline=Deadline(LONG_S))
