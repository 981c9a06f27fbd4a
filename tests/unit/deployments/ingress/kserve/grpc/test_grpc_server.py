"""The gRPC edge over 127.0.0.1, asked as any client asks: by method path and message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kit.seeding import seeded_rng
from kit.waiting import until
from ray.exceptions import RayActorError, RayTaskError

from configs.cluster import LimitsConfig
from deployments.ingress.kserve.grpc import codec as grpc_codec
from deployments.ingress.kserve.grpc.protos import POOL, health
from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.grpc.server import GrpcServer, _HealthServicer, start_grpc_server
from deployments.ingress.kserve.grpc.servicer import status_of
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository, Statistics
from deployments.ingress.service.answers import PrefetchAnswer, Tier
from deployments.ingress.service.catalog import ModelCard
from deployments.records import errors

MAX_MESSAGE_BYTES = 10_000
TIMEOUT_S = 5.0


class FakeOperations:
    """A record of what an operator asked for, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    async def prefetch_model(self, model: str, tier: Tier) -> PrefetchAnswer:
        self.calls.append((f"prefetch to {tier}", model))
        return PrefetchAnswer(model=model, tier=tier, nodes={"n": ""}, workers=[""], text_encoders=[""])

    async def evict_model(self, model: str) -> None:
        self.calls.append(("evict", model))


class Client:
    """Calls by name; requests by their fields."""

    def __init__(self, channel: grpc.aio.Channel, service: str = "inference.GRPCInferenceService") -> None:
        self._channel = channel
        self._service = service

    def call(self, method: str, _timeout_s: float = TIMEOUT_S, **fields: Any) -> Any:
        described = POOL.FindServiceByName(self._service).FindMethodByName(method)
        request, answer = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
        make = self._channel.unary_stream if described.server_streaming else self._channel.unary_unary
        ask = make(f"/{self._service}/{method}", request.SerializeToString, answer.FromString)
        return ask(request(**fields), timeout=_timeout_s)

    def raw(self, method: str, data: bytes = b"") -> Any:
        return self._channel.unary_unary(f"/{self._service}/{method}")(data, timeout=TIMEOUT_S)


@pytest.fixture
def edge(service: Any, limits: LimitsConfig) -> SimpleNamespace:
    statistics = Statistics()
    service.operations = FakeOperations()
    return SimpleNamespace(
        inference=Inference(service, limits, statistics), repository=Repository(service), statistics=statistics
    )


@pytest.fixture
async def server(edge: SimpleNamespace) -> AsyncIterator[GrpcServer]:
    server = await start_grpc_server(**vars(edge), host="127.0.0.1", port=0, max_message_bytes=MAX_MESSAGE_BYTES)
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


@pytest.fixture
def client(channel: grpc.aio.Channel) -> Client:
    return Client(channel)


def embedding(text: bytes = b"Hi", model: str = "minilm", **fields: Any) -> dict[str, Any]:
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [text]}}]
    return {"model_name": model, "inputs": inputs, **fields}


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


async def test_health_and_metadata(client: Client, service: Any) -> None:
    assert (await client.call("ServerLive")).live
    assert (await client.call("ServerReady")).ready
    assert (await client.call("ModelReady", name="minilm", version="1")).ready
    assert not (await client.call("ModelReady", name="broken")).ready
    server = await client.call("ServerMetadata")
    assert {"statistics", "model_repository", "schedule_policy"} <= set(server.extensions)
    model = await client.call("ModelMetadata", name="minilm")
    assert (model.name, list(model.versions)) == ("minilm", ["1"])
    assert ("text", "BYTES", [-1]) in [(i.name, i.datatype, list(i.shape)) for i in model.inputs]
    assert [(o.name, o.datatype, list(o.shape)) for o in model.outputs] == [("embedding", "FP32", [-1, -1])]
    config = (await client.call("ModelConfig", name="adder")).config
    assert (config.name, config.model_transaction_policy.decoupled) == ("adder", True)
    service.cards["late"] = ModelCard("late", None, "registering")
    assert (await client.call("ServerReady")).ready  # the others can be asked meanwhile
    assert not (await client.call("ModelReady", name="late")).ready
    service.cards = {"late": service.cards["late"]}
    assert not (await client.call("ServerReady")).ready


async def test_inference_and_its_statistics(client: Client) -> None:
    call = client.call("ModelInfer", **embedding(id="7"))
    answer = await call
    assert (answer.model_name, answer.model_version, answer.id) == ("minilm", "1", "7")
    assert list(answer.outputs[0].shape) == [1, 4]
    assert np.frombuffer(answer.raw_output_contents[0], np.float32)[3] == 2
    trailing = dict(await call.trailing_metadata())
    assert "total;dur=" in trailing["server-timing"]
    await refusal(client.call("ModelInfer", model_name="minilm"))
    (found,) = (await client.call("ModelStatistics", name="minilm")).model_stats
    assert (found.name, found.version, found.inference_count, found.execution_count) == ("minilm", "1", 1, 1)
    assert found.inference_stats.success.count == 1
    assert found.inference_stats.success.ns > 0
    assert found.inference_stats.fail.count == 1
    assert [batch.batch_size for batch in found.batch_stats] == [1]
    everything = (await client.call("ModelStatistics")).model_stats
    assert {model.name for model in everything} == {"flux", "adder", "minilm", "broken", "scale"}


async def test_large_tensors_are_read_and_written_aside(edge: SimpleNamespace, calls_on_loop: Any) -> None:
    read, written = calls_on_loop(grpc_codec, "read_request"), calls_on_loop(grpc_codec, "write_response")
    x = seeded_rng().standard_normal((20_000, 3)).astype(np.float32)
    inputs = [{"name": "x", "datatype": "FP32", "shape": x.shape}]
    edge.inference._limits = LimitsConfig(max_pipeline_items=len(x))
    server = await start_grpc_server(**vars(edge), host="127.0.0.1", port=0, max_message_bytes=2**20)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = Client(channel).call("ModelInfer", model_name="scale", inputs=inputs, raw_input_contents=[x.tobytes()])
        answer = await call
    await server.stop(0)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == (x * 2).reshape(-1).tolist()
    assert (read, written) == ([False], [False])


async def test_a_stream_of_pieces(channel: grpc.aio.Channel, service: Any) -> None:
    ask = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        messages.ModelInferRequest.SerializeToString,
        messages.ModelStreamInferResponse.FromString,
    )
    call = ask(timeout=TIMEOUT_S)
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"Hi"]}}]
    await call.write(messages.ModelInferRequest(model_name="adder", id="x", inputs=inputs))
    pieces = [(await call.read()).infer_response for _ in service.pieces]
    assert [piece.raw_output_contents[0][4:].decode() for piece in pieces] == service.pieces
    await call.write(messages.ModelInferRequest(model_name="nothing", id="y"))
    assert "nothing" in (await call.read()).error_message
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    strict = ask(timeout=TIMEOUT_S, metadata=(("triton_grpc_error", "true"),))
    await strict.write(messages.ModelInferRequest(model_name="nothing", id="y"))
    assert (await refusal(strict.read()))[0] is grpc.StatusCode.NOT_FOUND


async def test_the_repository(client: Client, service: Any) -> None:
    entries = (await client.call("RepositoryIndex")).models
    states = {entry.name: (entry.version, entry.state, entry.reason) for entry in entries}
    assert states == {
        "flux": ("1", "READY", ""),
        "adder": ("1", "READY", ""),
        "minilm": ("1", "READY", ""),
        "broken": ("1", "UNAVAILABLE", "tensor 'w' is torn"),
        "scale": ("1", "READY", ""),
    }
    ready = (await client.call("RepositoryIndex", ready=True)).models
    assert "broken" not in {entry.name for entry in ready}
    await client.call("RepositoryModelLoad", model_name="flux")
    dependents = {"unload_dependents": messages.ModelRepositoryParameter(bool_param=False)}
    await client.call("RepositoryModelUnload", model_name="flux", parameters=dependents)
    assert service.operations.calls == [("prefetch to device", "flux"), ("evict", "flux")]
    code, text = await refusal(client.call("RepositoryModelLoad", model_name="nothing"))
    assert (code, "known: flux" in text) == (grpc.StatusCode.NOT_FOUND, True)


async def test_errors_have_codes_and_text(client: Client, service: Any) -> None:
    unknown = await refusal(client.call("ModelMetadata", name="nothing"))
    assert (unknown[0], "'nothing'" in unknown[1]) == (grpc.StatusCode.NOT_FOUND, True)
    wrong = await refusal(client.call("ModelInfer", model_name="minilm"))
    assert wrong[0] is grpc.StatusCode.INVALID_ARGUMENT
    service.error = lambda request: RayTaskError("f", "Traceback", errors.QueueFull("as many wait as may"))
    assert await refusal(client.call("ModelInfer", **embedding())) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "as many wait as may",
    )
    service.error = lambda request: KeyError("a secret")
    code, text = await refusal(client.call("ModelInfer", **embedding()))
    assert (code, "secret" in text) == (grpc.StatusCode.INTERNAL, False)


async def test_bytes_that_are_no_message_are_refused(client: Client) -> None:
    code, text = await refusal(client.raw("ModelInfer", b"\x0a\xff\xff"))
    assert (code, "not a message" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_what_triton_has_and_this_server_not(client: Client) -> None:
    for method, topic in (("SystemSharedMemoryRegister", "shared memory"), ("TraceSetting", "tracing")):
        assert await refusal(client.raw(method)) == (
            grpc.StatusCode.UNIMPLEMENTED,
            f"{topic} is not supported by this server",
        )
    assert (await refusal(client.raw("NoSuchThing")))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_a_request_larger_than_the_limit_is_not_read(client: Client, service: Any) -> None:
    code, _ = await refusal(client.call("ModelInfer", **embedding(bytes(MAX_MESSAGE_BYTES))))
    assert (code, service.requests) == (grpc.StatusCode.RESOURCE_EXHAUSTED, [])


async def test_a_deadline_of_the_client_ends_the_work(client: Client, service: Any) -> None:
    service.gate.clear()
    code, _ = await refusal(client.call("ModelInfer", _timeout_s=0.1, **embedding()))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: service.num_cancelled == 1)


async def test_a_client_that_goes_ends_the_work(client: Client, service: Any) -> None:
    service.gate.clear()
    call = client.call("ModelInfer", **embedding())
    asked = asyncio.ensure_future(call)
    await until(lambda: len(service.requests) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: service.num_cancelled == 1)


async def test_what_runs_when_the_server_stops_may_finish(server: GrpcServer, client: Client, service: Any) -> None:
    service.gate.clear()
    running = asyncio.ensure_future(client.call("ModelInfer", **embedding()))
    await until(lambda: len(service.requests) == 1)
    stopped = asyncio.ensure_future(server.stop(TIMEOUT_S))
    await asyncio.sleep(0)
    service.gate.set()
    assert (await running).model_name == "minilm"
    await stopped


async def test_what_runs_longer_than_the_grace_is_cancelled(server: GrpcServer, client: Client, service: Any) -> None:
    service.gate.clear()
    running = asyncio.ensure_future(client.call("ModelInfer", **embedding()))
    await until(lambda: len(service.requests) == 1)
    await server.stop(0.05)
    await refusal(running)
    await until(lambda: service.num_cancelled == 1)


async def test_health_protocol(channel: grpc.aio.Channel, service: Any) -> None:
    checks = Client(channel, "grpc.health.v1.Health")
    for name in ("", "inference.GRPCInferenceService", "grpc.health.v1.Health"):
        assert (await checks.call("Check", service=name)).status == health.HealthCheckResponse.SERVING
    known = "inference.GRPCInferenceService, grpc.health.v1.Health"
    unknown = await refusal(checks.call("Check", service="other"))
    assert unknown == (grpc.StatusCode.NOT_FOUND, f"no service 'other' (known: {known})")
    watch = checks.call("Watch", service="")
    assert (await watch.read()).status == health.HealthCheckResponse.SERVING
    service.cards = {"late": ModelCard("late", None, "registering")}
    assert (await checks.call("Check", service="")).status == health.HealthCheckResponse.NOT_SERVING


async def test_a_watcher_hears_of_changes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = [True, True, errors.ModelUnavailable("restarting"), False, True]
    told, told_other, num_looks, num_ended = [], [], 0, 0

    async def server_ready() -> bool:
        nonlocal num_looks, num_ended
        if not states:
            try:
                await asyncio.Event().wait()
            finally:
                num_ended += 1
        num_looks += 1
        for _ in range(5):  # the watchers hear of the look before
            await asyncio.sleep(0)
        state = states.pop(0)
        if isinstance(state, Exception):
            raise state
        return bool(state)

    monkeypatch.setattr("deployments.ingress.kserve.grpc.server._WATCH_INTERVAL_S", 0.0)
    servicer = _HealthServicer(SimpleNamespace(server_ready=server_ready), ())

    def watch(heard: list[int], service: str = "") -> asyncio.Task[None]:
        async def write(answer: health.HealthCheckResponse) -> None:
            heard.append(answer.status)

        context: Any = SimpleNamespace(write=write)
        return asyncio.create_task(servicer.watch(health.HealthCheckRequest(service=service), context))

    watchers = [watch([]) for _ in range(100)] + [watch(told), watch(told_other, "other")]
    await until(lambda: told == [1, 2, 1])
    assert (told_other, num_looks) == ([3], 5)  # as many as if there were one watcher
    for watcher in watchers:
        watcher.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    await until(lambda: num_ended == 1)  # nobody looks for nobody
    states.append(False)  # the next one has a poller again
    later: list[int] = []
    watcher = watch(later)
    await until(lambda: later == [2])
    watcher.cancel()


async def test_reflection_describes_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
    ]
    listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(asked), timeout=TIMEOUT_S)]
    names = {service.name for service in listed.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
    file = FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
    assert "ModelInferRequest" in {message.name for message in file.message_type}


async def test_replicas_of_a_node_share_the_port(edge: SimpleNamespace, server: GrpcServer) -> None:
    second = await start_grpc_server(**vars(edge), host="127.0.0.1", port=server.port, max_message_bytes=1000)
    assert second.port == server.port
    await second.stop(0)


async def test_an_address_that_is_not_ours(edge: SimpleNamespace) -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0"):
        await start_grpc_server(**vars(edge), host="192.0.2.1", port=0, max_message_bytes=1000)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest("m"), "INVALID_ARGUMENT"),
        (errors.UnknownModel("m"), "NOT_FOUND"),
        (errors.RequestTooLarge("m"), "INVALID_ARGUMENT"),
        (errors.Overloaded("m"), "UNAVAILABLE"),
        (errors.QueueFull("m"), "RESOURCE_EXHAUSTED"),
        (errors.DeadlineExceeded("m"), "DEADLINE_EXCEEDED"),
        (errors.ModelUnavailable("m"), "UNAVAILABLE"),
        (errors.ReplicaLost("m"), "UNAVAILABLE"),
        (errors.Conflict("m"), "FAILED_PRECONDITION"),
        (errors.Unprocessable("m"), "FAILED_PRECONDITION"),
        (errors.GenerationFailed("m"), "INTERNAL"),
        (RayActorError(), "UNAVAILABLE"),
        (ValueError("m"), "INTERNAL"),
    ],
)
def test_the_code_of_every_error(error: Exception, code: str) -> None:
    found, text = status_of(error)
    assert found.name == code
    assert (text == "m") == isinstance(error, errors.ServiceError)


def test_every_error_of_the_service_has_a_code() -> None:
    assert all(status_of(class_("m"))[1] == "m" for class_ in errors.ServiceError.__subclasses__())
    assert len(status_of(errors.InvalidRequest("m" * 10_000))[1]) == 2_000
