"""Traces: a span for the queue and for the steps of an engine, batch-mates linked, no prompts, and nothing when off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.process import tracing
from cluster.process.tracing import NO_SPAN, begin_tracing, called, link, serve_tracing, span, tracing_environment
from configs.cluster import ClusterConfig, TracingConfig
from configs.errors import ConfigError
from deployments.engines.records.protocol import TextDelta, TextRequest
from deployments.records.tasks import Deadline
from deployments.replicas.replica_calls import ReplicaCalls
from deployments.replicas.step_loop import DeviceThread, EngineLoop

SETTINGS = TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces")


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    begin_tracing(SETTINGS, provider.get_tracer("test"))
    yield exporter
    begin_tracing(None)


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [found for found in spans.get_finished_spans() if found.name == name]


def test_without_settings_there_are_none() -> None:
    begin_tracing(None)
    with span("a") as first, span("b") as second:
        assert first is second is NO_SPAN
        link(first, [second])
    assert serve_tracing(None) == tracing_environment(None) == {}


def test_a_failure_is_told_by_its_name_and_not_by_what_it_says(spans: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="a prompt"), span("outer"), span("inner", {"size": 3}):
        raise ValueError("a prompt")
    inner, outer = spans.get_finished_spans()
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert inner.attributes == {"size": 3, "error.type": "ValueError"}
    assert (inner.events, inner.status.description) == ((), None)


def test_a_call_is_a_part_of_its_callers_trace_and_of_none_without_one(spans: InMemorySpanExporter) -> None:
    trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    for carrier in ({"traceparent": f"00-{trace}-{caller}-01"}, {"traceparent": "no trace"}, {}):
        with called("method", carrier), span("within"):
            pass
    inner, outer = named(spans, "within"), named(spans, "method")
    assert [one.context.trace_id for one in inner] == [one.context.trace_id for one in outer]
    assert [one.parent is None for one in outer] == [False, True, True]
    assert outer[0].parent is not None
    assert (outer[0].context.trace_id, outer[0].parent.span_id) == (int(trace, 16), int(caller, 16))


class Engine:
    """Writes three tokens for each request, a step each for all."""

    failures: dict[str, Exception] = {}  # noqa: RUF012  # nothing fails here

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add_request(self, request: TextRequest) -> None:
        self._left[request.request_id] = 3

    def yield_device(self, device: Any) -> None:
        pass

    def step(self) -> list[Any]:
        outputs = []
        for id_ in list(self._left):
            self._left[id_] -= 1
            outputs.append(SimpleNamespace(request_id=id_, is_last=not self._left[id_]))
            if not self._left[id_]:
                del self._left[id_]
        return outputs


async def test_requests_that_shared_steps_are_linked_and_each_is_in_its_own_trace(spans: InMemorySpanExporter) -> None:
    device = DeviceThread()
    loop: EngineLoop[Any, TextDelta] = EngineLoop(device, Engine(), kind="text")  # type: ignore[arg-type]

    async def ask(number: int) -> None:
        with span(f"request {number}"):
            await loop.run_request(SimpleNamespace(request_id=f"id-{number}"), lambda _: None)

    await asyncio.gather(*(ask(number) for number in range(3)))
    await ask(3)  # alone
    found = {one.attributes["atelier.request_id"]: one for one in named(spans, "steps text") if one.attributes}
    own = {f"id-{number}": named(spans, f"request {number}")[0].context for number in range(4)}
    for id_, steps in found.items():
        assert steps.parent is not None
        assert (steps.context.trace_id, steps.parent.span_id) == (own[id_].trace_id, own[id_].span_id)
        assert steps.attributes is not None
        assert steps.attributes["atelier.outputs"] == 3
        mates = {} if id_ == "id-3" else {other: one for other, one in found.items() if other not in (id_, "id-3")}
        assert {one.context.span_id for one in steps.links} == {one.context.span_id for one in mates.values()}
    assert len({context.trace_id for context in own.values()}) == 4
    assert device.steps["text"][1] == 12


async def test_the_wait_for_a_place_is_a_span(spans: InMemorySpanExporter) -> None:
    class Handle:
        def options(self, **_: Any) -> Handle:
            return self

        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=lambda: asyncio.ensure_future(asyncio.sleep(0, name)))

    place: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    calls = ReplicaCalls(Handle(), lambda: asyncio.sleep(0, None))
    with span("request"):
        asking = asyncio.ensure_future(calls.call("answer", deadline=Deadline(60), place=place))
        await asyncio.sleep(0)
        assert not spans.get_finished_spans()
        place.set_result("")
        assert await asking == "answer"
    (queue,), (request,) = named(spans, "queue"), named(spans, "request")
    assert queue.parent is not None
    assert queue.parent.span_id == request.context.span_id


def test_serve_is_told_what_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve import schema

    monkeypatch.setattr(tracing, "_exporter", lambda: None)
    told = serve_tracing(SETTINGS.model_copy(update={"sampling_ratio": 0.5}))["tracing_config"]
    checked = schema.TracingConfig(**told)
    assert (checked.enabled, checked.sampling_ratio) == (True, 0.5)
    assert checked.exporter_import_path == "cluster.process.tracing.span_processors"
    assert tracing_environment(SETTINGS) == {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": SETTINGS.endpoint}


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_EXPORTER", "opentelemetry.exporter.nobody")
    tracing._exporter.cache_clear()
    with pytest.raises(ConfigError, match=r"tracing: .*pip install 'atelier-serve\[otel\]'"):
        serve_tracing(SETTINGS)
    tracing._exporter.cache_clear()


@pytest.mark.parametrize("endpoint", ["", "collector:4318", "http://user:secret@host/", "ftp://host"])
def test_an_endpoint_is_a_url_without_secrets(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"tracing\.endpoint"):
        ClusterConfig.model_validate({"models": [{"id": "a", "path": "/a"}], "tracing": {"endpoint": endpoint}})
