"""Access over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kit.clock import Clock

from cluster.ray_seam.request_context import current_request_id
from configs.access import AccessConfig
from configs.cluster import LimitsConfig
from deployments.ingress.access.callers import Callers, current_tenant
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of, revoke_key
from deployments.ingress.kserve.grpc import server as server_module
from deployments.ingress.kserve.grpc.protos import POOL
from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.grpc.server import GrpcServer, start_grpc_server
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository, Statistics
from deployments.ingress.messages.terms import PRIORITY, TIMEOUT, current_terms

SERVICE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"
TIMEOUT_S = 5.0
USER, ADMIN = (("authorization", "Bearer atl_user"),), (("x-api-key", "atl_admin"),)
Metadata = tuple[tuple[str, str], ...]


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    path = tmp_path / "keys"
    add_key(path, KeyEntry(name="user", sha256=hash_of("atl_user"), tenant="team", max_concurrent=2))
    add_key(path, KeyEntry(name="root", sha256=hash_of("atl_admin"), admin=True))
    add_key(path, KeyEntry(name="slow", sha256=hash_of("atl_slow"), requests_per_s=0.5))
    return path


@pytest.fixture
async def server(service: Any, limits: LimitsConfig, keys: Path, clock: Clock) -> AsyncIterator[GrpcServer]:
    async def nothing(*_: Any) -> None:
        return None

    service.operations = SimpleNamespace(evict_model=nothing)
    service.tenants, service.terms = [], []
    embed_as_before = service.embed

    async def embed(request: Any) -> Any:
        service.tenants.append(current_tenant.get())
        service.terms.append(current_terms.get())
        return await embed_as_before(request)

    service.embed = embed
    statistics = Statistics()
    server = await start_grpc_server(
        Inference(service, limits, statistics),
        Repository(service),
        statistics,
        host="127.0.0.1",
        port=0,
        max_message_bytes=10_000,
        callers=Callers(AccessConfig(keys_file=keys), clock=clock),
        max_open_calls=3,
    )
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


def call(channel: grpc.aio.Channel, method: str, metadata: Metadata = (), service: str = SERVICE, **fields: Any) -> Any:
    described = POOL.FindServiceByName(service).FindMethodByName(method)
    request, answer = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
    ask = channel.unary_unary(f"/{service}/{method}", request.SerializeToString, answer.FromString)
    return ask(request(**fields), timeout=TIMEOUT_S, metadata=metadata)


def embedding(id_: str = "") -> dict[str, Any]:
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"Hi"]}}]
    return {"model_name": "minilm", "id": id_, "inputs": inputs}


def stream(channel: grpc.aio.Channel, metadata: Metadata) -> Any:
    described = POOL.FindServiceByName(SERVICE).FindMethodByName("ModelStreamInfer")
    answer = GetMessageClass(described.output_type)
    make = channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer", messages.ModelInferRequest.SerializeToString, answer.FromString
    )
    return make(metadata=metadata, timeout=TIMEOUT_S)


async def code(asked: Any) -> str:
    try:
        await asked
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


WRONG: list[Metadata] = [
    (),
    (("authorization", "Bearer wrong"),),
    (("authorization", "Basic atl_user"),),
    (("authorization", "Bearer atl_userx"),),
    (("x-api-key", hash_of("atl_user")),),
    (("x-api-key", "x" * 5_000),),
]


@pytest.mark.parametrize("metadata", WRONG)
async def test_without_a_key_that_holds_only_health_is_told(
    channel: grpc.aio.Channel, service: Any, metadata: Metadata
) -> None:
    for method in ("ServerLive", "ServerReady"):
        assert await code(call(channel, method, metadata)) == "OK"
    assert await code(call(channel, "Check", metadata, HEALTH)) == "OK"
    for method in ("ServerMetadata", "ModelReady", "ModelInfer", "RepositoryIndex", "RepositoryModelUnload"):
        assert await code(call(channel, method, metadata)) == "UNAUTHENTICATED"
    assert await code(channel.unary_unary(f"/{SERVICE}/LogSettings")(b"", metadata=metadata)) == "UNAUTHENTICATED"
    assert await code(channel.unary_unary(f"/{SERVICE}/Nothing")(b"", metadata=metadata)) == "UNIMPLEMENTED"
    asked = stream(channel, metadata)
    assert await code(asked.read()) == "UNAUTHENTICATED"
    assert "key" in await asked.details()
    told = set()
    while "UNAUTHENTICATED" not in told:  # who still sends when the stream ends may be told of the reset alone
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
        )
        told.add(await code(reflected.read()))
        assert told <= {"UNAUTHENTICATED", "INTERNAL"}
    assert not service.requests


async def test_terms_are_those_of_the_metadata_within_the_deadline(channel: grpc.aio.Channel, service: Any) -> None:
    metadata = (*USER, (PRIORITY, "3"), (TIMEOUT, "1e6"))
    assert await code(call(channel, "ModelInfer", metadata, **embedding())) == "OK"
    asked = stream(channel, metadata)
    await asked.write(messages.ModelInferRequest(**embedding()))
    assert not (await asked.read()).error_message
    await asked.done_writing()
    assert [(terms.priority, terms.tenant) for terms in service.terms] == [(3, "team")] * 2
    assert all(0 < terms.timeout_s < TIMEOUT_S + 1 for terms in service.terms)  # gRPC rounds it up


async def test_rights_and_tenants(channel: grpc.aio.Channel, service: Any) -> None:
    for metadata in (USER, ADMIN, (*USER, ("x-tenant", "forged"))):
        assert await code(call(channel, "ModelInfer", metadata, **embedding())) == "OK"
        assert await code(call(channel, "RepositoryIndex", metadata)) == "OK"
    for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
        assert await code(call(channel, method, USER, model_name="minilm")) == "PERMISSION_DENIED"
    assert await code(call(channel, "RepositoryModelUnload", ADMIN, model_name="minilm")) == "OK"
    assert service.tenants == ["team", "root", "team"]
    reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=USER
    )
    assert SERVICE in {found.name for found in (await reflected.read()).list_services_response.service}


async def test_a_rate_is_told_with_the_time_to_wait(channel: grpc.aio.Channel, clock: Clock) -> None:
    slow = (("x-api-key", "atl_slow"),)
    assert await code(call(channel, "ModelInfer", slow, **embedding())) == "OK"
    clock.now_s += 0.5
    refused = call(channel, "ModelInfer", slow, **embedding())
    assert await code(refused) == "RESOURCE_EXHAUSTED"
    assert dict(await refused.trailing_metadata())["retry-after"] == "2"  # 1.5 in whole seconds
    assert await code(call(channel, "ModelInfer", USER, **embedding())) == "OK"
    clock.now_s += 1.5
    assert await code(call(channel, "ModelInfer", slow, **embedding())) == "OK"


async def test_calls_in_progress_are_counted_until_they_end(channel: grpc.aio.Channel, service: Any) -> None:
    service.gate.clear()
    running = [asyncio.ensure_future(code(call(channel, "ModelInfer", USER, **embedding()))) for _ in range(2)]
    while len(service.requests) < 2:
        await asyncio.sleep(0.001)
    assert await code(call(channel, "ModelInfer", USER, **embedding())) == "RESOURCE_EXHAUSTED"
    assert await code(call(channel, "ServerLive", USER)) == "OK"
    cancelled = call(channel, "ModelInfer", ADMIN, **embedding())
    while len(service.requests) < 3:
        await asyncio.sleep(0.001)
    cancelled.cancel()
    service.gate.set()
    assert await asyncio.gather(*running) == ["OK", "OK"]
    service.error = lambda _: ValueError("broken")
    for _ in range(3):
        assert await code(call(channel, "ModelInfer", USER, **embedding())) == "INTERNAL"
    service.error = lambda _: None
    assert await code(call(channel, "ModelInfer", USER, **embedding())) == "OK"


async def test_each_request_of_a_stream_counts_and_a_revoked_key_begins_no_more(
    channel: grpc.aio.Channel, service: Any, keys: Path
) -> None:
    service.gate.clear()
    asked = stream(channel, USER)
    for number in range(3):
        await asked.write(messages.ModelInferRequest(**embedding(str(number))))
    while len(service.requests) < 2:
        await asyncio.sleep(0.001)
    revoke_key(keys, "user")  # what runs on the stream finishes
    await asked.write(messages.ModelInferRequest(**embedding("late")))
    service.gate.set()
    found = {}
    for _ in range(4):
        answer = await asked.read()
        found[answer.infer_response.id] = answer.error_message
    assert [number for number, text in found.items() if not text] == ["0", "1"]
    assert "as it may (2)" in found["2"] or "revoked" in found["2"]  # one of them, by when it was read
    assert "revoked" in found["late"]
    assert len(service.requests) == 2
    assert set(service.tenants) == {"team"}
    await asked.done_writing()
    assert await asked.read() is grpc.aio.EOF
    assert await code(stream(channel, USER).read()) == "UNAUTHENTICATED"


async def test_few_calls_without_a_key_are_open_at_once_and_calls_with_one_are_not_among_them(
    channel: grpc.aio.Channel,
) -> None:
    answer = GetMessageClass(POOL.FindServiceByName(HEALTH).FindMethodByName("Watch").output_type)
    make = channel.unary_stream(f"/{HEALTH}/Watch", response_deserializer=answer.FromString)
    watching = [make(b"") for _ in range(3)]
    for one in watching:
        assert (await one.read()).status == 1
    assert await code(call(channel, "Check", service=HEALTH)) == "RESOURCE_EXHAUSTED"
    assert await code(call(channel, "ServerLive")) == "RESOURCE_EXHAUSTED"
    assert await code(call(channel, "ModelInfer", USER, **embedding())) == "OK"
    watching.pop().cancel()
    async with asyncio.timeout(TIMEOUT_S):
        while await code(call(channel, "Check", service=HEALTH)) != "OK":
            await asyncio.sleep(0.01)
    for one in watching:
        one.cancel()


@pytest.mark.parametrize(
    ("method", "refused"), [("ModelInfer", "UNAUTHENTICATED"), ("ServerLive", "DEADLINE_EXCEEDED")]
)
async def test_a_call_whose_message_does_not_come_ends(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch, method: str, refused: str
) -> None:
    """As a stream, whose messages a client sends when it likes: on the wire it is the same call."""
    monkeypatch.setattr(server_module, "_MESSAGE_S", 0.05)
    begun = channel.stream_unary(f"/{SERVICE}/{method}")()
    async with asyncio.timeout(TIMEOUT_S):
        assert (await begun.code()).name == refused


@pytest.mark.parametrize(("asked", "is_kept"), [("job-1", True), ("a b", False), (None, False)])
async def test_every_call_has_an_id_which_its_answer_tells(
    channel: grpc.aio.Channel, service: Any, asked: str | None, is_kept: bool
) -> None:
    """Answers, refusals for want of a key, and streams."""
    seen: list[str] = []
    embed_as_before = service.embed

    async def embed(request: Any) -> Any:
        seen.append(current_request_id())
        return await embed_as_before(request)

    service.embed = embed
    own: Metadata = () if asked is None else (("x-request-id", asked),)
    calls = [
        call(channel, "ModelInfer", USER + own, **embedding()),
        call(channel, "ModelInfer", own, **embedding()),
        call(channel, "Check", own, HEALTH),
        call(channel, "ServerLive", own),
    ]
    codes = [await code(each) for each in calls]
    streaming = stream(channel, USER + own)
    await streaming.write(messages.ModelInferRequest(**embedding()))
    await streaming.read()
    await streaming.done_writing()
    told = [dict(await each.initial_metadata())["x-request-id"] for each in (*calls, streaming)]
    assert codes[1] == "UNAUTHENTICATED"
    assert seen == [told[0], told[4]]
    assert [id_ == asked for id_ in told] == [is_kept] * 5
    assert len(set(told)) == (1 if is_kept else 5)
