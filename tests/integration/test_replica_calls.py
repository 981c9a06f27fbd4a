"""Calls over handles of real Serve: who leaves ends the work, no replica is an answer, equal texts are encoded once."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from integration.harness import Cluster
from kit.streams import stream_pieces
from kit.waiting import until
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import ReplicaUnavailableError

from cluster.ray_seam.handles import BY_GRPC, watch_replicas
from cluster.ray_seam.placed_router import CLASS as PLACED_ROUTER
from cluster.ray_seam.serve_control import ServeReplicas
from cluster.start.process_starts import template_environment
from deployments.records.errors import DeadlineExceeded, InvalidRequest, NoReplica
from deployments.records.tasks import Deadline, shared_task
from deployments.replicas.replica_calls import ReplicaCalls, ReplicaStates
from deployments.services.replica_classes import TEMPLATE
from deployments.text.cache import EncodingCache, EncodingKey
from deployments.text.client import TextEncoderClient
from deployments.text.requests import ConditioningRequest

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import tests

APP, NAME = "replica-calls", "Working"
ENCODERS = "encoders"
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
    monkeypatch.setenv(BY_GRPC, "1" if getattr(request, "param", "grpc") == "grpc" else "0")
    await slow.begin_anew.remote()
    await application.begin_anew.remote()
    return application


async def until_seen(handle: Any, what: str, number: int) -> None:
    async def is_seen() -> bool:
        return bool((await handle.seen.remote())[what] == number)

    await until(is_seen)


async def cancelled(calls: ReplicaCalls, handle: Any) -> None:
    asking = asyncio.create_task(calls.call("work", 1, deadline=Deadline(LONG_S)))
    await until_seen(handle, "begun", 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def out_of_time(calls: ReplicaCalls, handle: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        await calls.call("work", 1, deadline=Deadline(1.0))
    await until_seen(handle, "begun", 1)


async def closed_early(calls: ReplicaCalls, handle: Any) -> None:
    async with stream_pieces(calls, "pieces", 9, deadline=Deadline(LONG_S)) as pieces:
        assert await anext(pieces) == 0
        await until_seen(handle, "begun", 1)


@pytest.mark.parametrize("handle", ["grpc", "actor"], indirect=True)
@pytest.mark.parametrize("leave", [cancelled, out_of_time, closed_early])
async def test_who_leaves_ends_the_work_in_the_replica(handle: Any, leave: Callable[..., Any]) -> None:
    await leave(ReplicaCalls(handle), handle)
    await until_seen(handle, "cancelled", 1)


async def test_an_error_of_the_replica_leaves_as_itself(handle: Any) -> None:
    with pytest.raises(InvalidRequest, match="-3 is below 0") as raised:
        await ReplicaCalls(handle).call("work", -3, deadline=Deadline(LONG_S))
    assert raised.value.param == "value"


async def test_what_others_joined_goes_on_when_its_first_caller_leaves(handle: Any, slow: Any) -> None:
    calls = ReplicaCalls(handle)
    first = asyncio.create_task(calls.call("shared", deadline=Deadline(LONG_S)))
    await until_seen(handle, "begun", 1)
    second = asyncio.create_task(calls.call("shared", deadline=Deadline(LONG_S)))
    await until_seen(handle, "begun", 2)
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


# Equal texts


@ray.remote(num_cpus=0)
class Computations:
    """The record of what encoders compute, and where: it lasts until it is let go."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, str]] = []
        self._gate = asyncio.Event()
        self._gate.set()

    async def compute(self, text: str, replica: str) -> None:
        self._begun.append((text, replica))
        await self._gate.wait()

    async def replicas_of(self, text: str) -> list[str]:
        return [replica for begun, replica in self._begun if begun == text]

    async def hold(self) -> None:
        self._gate.clear()

    async def let_go(self) -> None:
        self._gate.set()


class Encoding:
    """A text encoder's half that matters here: its cache."""

    async def __init__(self, computations: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._computations = computations
        self._cache = EncodingCache(2**24)
        self._name = serve.get_replica_context().replica_id.unique_id

    async def condition(self, request: ConditioningRequest) -> str:
        """Return where the text's encoding came from."""

        async def compute_many(keys: Sequence[EncodingKey]) -> list[dict[str, torch.Tensor]]:
            await self._computations.compute.remote(request.prompt, self._name)
            return [{"hidden": torch.ones(8)} for _ in keys]

        key = EncodingKey("m", "float32", "none", tuple(request.prompt.encode()))
        return (await self._cache.get_all([key], compute_many))[key].source

    async def die(self) -> None:
        os._exit(1)


class Encoders:
    """A worker's client of an application of encoders."""

    def __init__(self, handle: Any, computations: Any) -> None:
        self.computations = computations
        self.names: frozenset[str] = frozenset()
        watch_replicas(handle, self._note_names)
        self.calls = ReplicaCalls(handle)
        self._client = TextEncoderClient(self.calls, LONG_S)

    async def have(self, number: int) -> None:
        await ServeReplicas(ENCODERS, "Encoding").set_target(number)
        await until(lambda: len(self.names) == number)

    async def ask(self, text: str) -> str:
        return str(await self._client.condition(ConditioningRequest("m", text, None, False)))

    async def kill(self, name: str) -> None:
        async def place() -> str:
            return name

        # Over gRPC the end of the connection may be seen first, and the replica be gone when it is asked again.
        with pytest.raises((ray.exceptions.RayActorError, ReplicaUnavailableError)):
            await self.calls.call("die", deadline=Deadline(LONG_S), place=place())

    def _note_names(self, names: frozenset[str]) -> None:
        self.names = names


@pytest.fixture(scope="module")
def encoder_app(cluster: Cluster) -> Iterator[tuple[Any, Any]]:
    """One application for all tests, as above: its handle, and what it computes."""
    computations = Computations.remote()
    deployment = serve.deployment(Encoding).options(
        num_replicas=2,
        # As replicas that run models: copies of a process that has imported torch.
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": template_environment(TEMPLATE)}},
        health_check_period_s=0.5,
        graceful_shutdown_wait_loop_s=0.1,
        max_ongoing_requests=2048,
        request_router_config=RequestRouterConfig(request_router_class=PLACED_ROUTER),
    )
    app = deployment.bind(computations)
    (handle,) = serve.run_many([serve.RunTarget(app, name=ENCODERS, route_prefix=None, external_scaler_enabled=True)])
    yield handle, computations
    serve.delete(ENCODERS)


@pytest.fixture
async def encoders(encoder_app: tuple[Any, Any]) -> Encoders:
    made = Encoders(*encoder_app)
    await made.have(2)
    return made


@pytest.mark.drawn
@pytest.mark.parametrize("change", ["none", "one more", "one less", "its own dies"])
async def test_a_thousand_equal_texts_are_encoded_once(encoders: Encoders, change: str) -> None:
    """Also while a replica is added or killed; of one that dies with them, they are the next one's."""
    text, computations = uuid.uuid4().hex, encoders.computations
    await computations.hold.remote()
    asking = [asyncio.create_task(encoders.ask(text)) for _ in range(900)]
    async with asyncio.timeout(30):
        while not await computations.replicas_of.remote(text):
            await asyncio.sleep(0.02)
    (first,) = await computations.replicas_of.remote(text)
    if change == "one more":
        await encoders.have(3)
    elif change != "none":
        (other,) = encoders.names - {first}
        await encoders.kill(first if change == "its own dies" else other)
    asking += [asyncio.create_task(encoders.ask(text)) for _ in range(100)]
    await computations.let_go.remote()
    async with asyncio.timeout(60):
        sources = Counter(await asyncio.gather(*asking))
    replicas = await computations.replicas_of.remote(text)
    assert len(replicas) == len(set(replicas)) == (2 if change == "its own dies" else 1)
    assert sources["computed"] == 1
    assert sources.total() == 1000


async def test_most_texts_are_found_again_after_a_change_of_replicas(encoders: Encoders) -> None:
    """(n - 1) / n of them at the least, where n is 2; two thirds are expected."""
    texts = [uuid.uuid4().hex for _ in range(120)]
    assert {await encoders.ask(text) for text in texts} == {"computed"}
    assert {await encoders.ask(text) for text in texts} == {"local"}
    await encoders.have(3)
    sources = Counter([await encoders.ask(text) for text in texts])
    assert 60 <= sources["local"] < 120, sources
