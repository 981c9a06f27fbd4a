"""The router of placed requests: deaths that gRPC tells as broken connections, and the way of texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from kit.waiting import until
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.exceptions import ReplicaUnavailableError

from cluster.ray_seam import handles, placed_router
from cluster.ray_seam.placed_router import PlacedRouter
from cluster.records.text_routes import FEW_TEXTS, encoder_for, route_of

WORKER = DeploymentID("worker", "placed-router-test")


@dataclass
class Replica:
    """A replica as the router sees it. `error`: what becomes of a look at its queue."""

    replica_id: ReplicaID
    error: Exception | None = None
    num_looks: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    multiplexed_model_ids: frozenset[str] = frozenset()
    node_id = availability_zone = None
    max_ongoing_requests = 5

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_looks += 1
        await self.gate.wait()
        if self.error:
            raise self.error
        return 0


class Result:
    """Serve's result of a call that goes to a port where nobody listens any more."""

    def __init__(self, call: grpc.aio.Call) -> None:
        self.call = call

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.call.add_done_callback(callback)


def pending(replica: str, *, by_reference: bool = False) -> PendingRequest:
    metadata = RequestMetadata(request_id="1", internal_request_id="1", session_id=replica, _by_reference=by_reference)
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


@pytest.fixture
def replicas() -> list[Replica]:
    return [Replica(ReplicaID(name, WORKER)) for name in ("a", "b")]


@pytest.fixture
def known() -> Iterator[list[frozenset[str]]]:
    """Every list of names that the watchers were told."""
    told: list[frozenset[str]] = []
    handles._watchers[WORKER.app_name, WORKER.name] = [told.append]
    yield told
    del handles._watchers[WORKER.app_name, WORKER.name]


@pytest.fixture
async def router(replicas: list[Replica], known: list[frozenset[str]]) -> PlacedRouter:
    made = PlacedRouter(deployment_id=WORKER, handle_source=DeploymentHandleSource.REPLICA)
    made.update_replicas(replicas)
    for replica in replicas:  # Serve's router looks at each that is new
        replica.gate.set()
        await until(lambda replica=replica: replica.num_looks)
        replica.gate.clear()
        replica.num_looks = 0
    return made


@pytest.fixture
async def call() -> AsyncIterator[grpc.aio.Call]:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        yield channel.unary_unary("/replica/work")(b"")


async def test_a_connection_that_breaks_under_a_call_is_a_death_when_ray_says_so(
    router: PlacedRouter, replicas: list[Replica], known: list[frozenset[str]], call: grpc.aio.Call
) -> None:
    dead = replicas[0]
    dead.error = ActorDiedError()
    dead.gate.set()
    router.on_request_routed(pending("a"), dead.replica_id, Result(call))
    await until(lambda: known[-1] == {"b"})
    with pytest.raises(ReplicaUnavailableError):
        await router._choose_replica_for_request(pending("a"))
    assert await router._choose_replica_for_request(pending("b")) is replicas[1]


async def test_calls_of_actors_are_left_to_serve(
    router: PlacedRouter, replicas: list[Replica], call: grpc.aio.Call
) -> None:
    router.on_request_routed(pending("a", by_reference=True), replicas[0].replica_id, Result(call))
    assert await call.code() == grpc.StatusCode.UNAVAILABLE
    await asyncio.sleep(0)
    assert not replicas[0].num_looks


@pytest.mark.parametrize("error", [None, ActorUnavailableError("a partition", None)])
async def test_who_is_out_of_reach_is_looked_at_once_and_stays(
    router: PlacedRouter, replicas: list[Replica], known: list[frozenset[str]], error: Exception | None
) -> None:
    doubtful = replicas[0]
    doubtful.error = error
    for _ in range(5):
        router.on_replica_actor_unavailable(doubtful.replica_id)
    await until(lambda: doubtful.num_looks)
    with pytest.raises(ReplicaUnavailableError):
        await router._choose_replica_for_request(pending("a"), is_retry=True)
    doubtful.gate.set()
    await until(lambda: not router._looking)
    assert doubtful.num_looks == 1
    assert known[-1] == {"a", "b"}
    if error is None:  # it has answered
        assert await router._choose_replica_for_request(pending("a"), is_retry=True) is doubtful
    router.on_replica_actor_unavailable(doubtful.replica_id)
    await until(lambda: doubtful.num_looks == 2)


async def test_a_replica_in_doubt_gets_no_requests_until_it_was_looked_at(
    router: PlacedRouter, replicas: list[Replica]
) -> None:
    """Behind a cut link the look takes as long as the cut: requests go elsewhere at once, and come back with it."""
    doubtful = replicas[0]
    router.on_replica_actor_unavailable(doubtful.replica_id)
    await until(lambda: doubtful.num_looks)
    with pytest.raises(ReplicaUnavailableError):
        await router._choose_replica_for_request(pending("a"))
    assert await router._choose_replica_for_request(pending("b")) is replicas[1]
    doubtful.gate.set()
    await until(lambda: not router._looking)
    assert await router._choose_replica_for_request(pending("a")) is doubtful


async def test_connections_to_replicas_elsewhere_end_with_their_node(
    router: PlacedRouter, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked for soon after a call begins, and once more: the connection may take its time."""
    ending: list[set[tuple[str, int]]] = []
    monkeypatch.setattr(placed_router, "CONNECTED_S", 0.001)
    monkeypatch.setattr(placed_router, "end_with_peers", ending.append)
    await router._choose_replica_for_request(pending("a"))
    assert router._connecting is None, "all are on the same node"
    address = {"node_id": "elsewhere", "node_ip": "10.0.0.2", "port": 7000}
    router._create_replica_wrapper_func = lambda _: replicas[1]
    for name in ("b", "gone"):
        router.create_replica_wrapper(SimpleNamespace(replica_id=ReplicaID(name, WORKER), **address))
        address |= {"port": 7001}
    router.update_replicas(replicas)
    for _ in range(3):
        await router._choose_replica_for_request(pending("b"))
    await until(lambda: router._connecting is None and len(ending) >= 2)
    assert ending == [{("10.0.0.2", 7000)}] * 2


async def test_a_call_that_was_cancelled_casts_no_doubt(
    router: PlacedRouter, replicas: list[Replica], call: grpc.aio.Call
) -> None:
    router.on_request_routed(pending("a"), replicas[0].replica_id, Result(call))
    call.cancel()
    await call.code()
    await asyncio.sleep(0)
    assert not replicas[0].num_looks
    assert not router._ending


def route_to(name: str, number: int = 0) -> str:
    """A route whose texts are first of all the replica's."""
    found = (route_of([f"text {each}"]) for each in range(10**6))
    mine = (route for route in found if encoder_for(route, {"a", "b"}, {}) == name)
    return next(route for index, route in enumerate(mine) if index == number)


async def test_equal_texts_go_to_one_replica_and_its_load_ends_with_their_calls(
    router: PlacedRouter, replicas: list[Replica]
) -> None:
    route = route_to("b")
    chosen = [await router._choose_replica_for_request(pending(route), is_retry=False) for _ in range(100)]
    assert {replica.replica_id.unique_id for replica in chosen} == {"b"}
    assert router._text_calls.loads == {"b": 1}
    for _ in range(99):
        router.on_request_completed(replicas[1].replica_id, "1")
    assert router._text_calls.loads == {"b": 1}
    router.on_request_completed(replicas[0].replica_id, "1")  # another call of the same request
    router.on_request_completed(replicas[1].replica_id, "1")
    router.on_request_completed(replicas[1].replica_id, "1")
    assert not router._text_calls.loads
    assert not router._routes


async def test_texts_beyond_a_replicas_load_go_to_the_next(router: PlacedRouter, replicas: list[Replica]) -> None:
    chosen = [await router._choose_replica_for_request(pending(route_to("a", n))) for n in range(FEW_TEXTS + 1)]
    assert [replica.replica_id.unique_id for replica in chosen] == ["a"] * FEW_TEXTS + ["b"]


async def test_a_dead_replicas_texts_are_the_next_ones(router: PlacedRouter, replicas: list[Replica]) -> None:
    route = route_to("a")
    assert await router._choose_replica_for_request(pending(route)) is replicas[0]
    router.on_replica_actor_died(replicas[0].replica_id)
    assert await router._choose_replica_for_request(pending(route), is_retry=True) is replicas[1]


async def test_a_replica_in_doubt_gets_no_texts_until_it_was_looked_at(
    router: PlacedRouter, replicas: list[Replica]
) -> None:
    """A look that leaves the doubt is not the end: the next text may go there, and is tried elsewhere if it fails."""
    route, doubtful = route_to("a"), replicas[0]
    doubtful.error = ActorUnavailableError("a partition", None)
    router.on_replica_actor_unavailable(doubtful.replica_id)
    await until(lambda: doubtful.num_looks)
    first = await router._choose_replica_for_request(pending(route))
    assert first is replicas[1]
    router.on_request_completed(first.replica_id, "1")
    doubtful.gate.set()
    await until(lambda: not router._looking)
    assert await router._choose_replica_for_request(pending(route)) is doubtful
    assert await router._choose_replica_for_request(pending(route), is_retry=True) is replicas[1]
