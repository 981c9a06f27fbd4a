"""Traces, for whom the config asks for them: one for each request, from the caller's `traceparent` on.

Serve itself makes a span for each call of a replica, ingress, text encoder and worker, and carries the context along
(`TracingConfig` of Ray Serve). What only we know is added here: the wait in the queue, and the steps of an engine, with
links to the requests that shared them. Spans have no prompts: exceptions leave their names only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from configs.cluster import TracingConfig
from configs.errors import ConfigError

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"  # OpenTelemetry's own, which the exporter reads
_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
MAX_LINKS: Final = 64  # requests that shared a batch; the SDK keeps 128
_PROCESSORS: Final = "cluster.process.tracing.span_processors"


class TraceSpan(Protocol):
    """The part of OpenTelemetry's spans that is used here."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Say more of it."""

    def add_link(self, context: Any) -> None:
        """Say that it has to do with another one."""

    def get_span_context(self) -> Any:
        """Return the context that other spans link to."""


class _NoSpan:
    def set_attribute(self, key: str, value: Any) -> None:
        pass

    def add_link(self, context: Any) -> None:
        pass

    def get_span_context(self) -> None:
        pass


NO_SPAN: Final[TraceSpan] = _NoSpan()
_tracer: Any = None  # of this process, while the config asks for traces


def begin_tracing(settings: TracingConfig | None, tracer: Any = None) -> None:
    """Let this process, a replica, make spans; without settings none, which costs nothing. A test gives a `tracer`."""
    global _tracer
    if settings is None:
        _tracer = None
        return
    if tracer is None:
        from opentelemetry import trace

        tracer = trace.get_tracer("atelier")
    _tracer = tracer


@contextlib.contextmanager
def span(name: str, attributes: Mapping[str, Any] | None = None) -> Iterator[TraceSpan]:
    """Let what runs in the block be a part of the current trace. One that fails says so by its exception's name."""
    if _tracer is None:
        yield NO_SPAN
        return
    options = {"record_exception": False, "set_status_on_exception": False}
    with _tracer.start_as_current_span(name, attributes=attributes, **options) as found:
        try:
            yield found
        except BaseException as error:
            found.set_attribute("error.type", type(error).__qualname__)
            raise


@contextlib.contextmanager
def called(name: str, carrier: Mapping[str, str]) -> Iterator[TraceSpan]:
    """Let the block be a part of its caller's trace, whose `traceparent` `carrier` has: for what Serve does not see."""
    if _tracer is None:
        yield NO_SPAN
        return
    from opentelemetry.context import attach, detach
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = attach(TraceContextTextMapPropagator().extract(carrier))
    try:
        with span(name) as found:
            yield found
    finally:
        detach(token)


def link(one: TraceSpan, others: Iterable[TraceSpan]) -> None:
    """Link a span with those of its batch-mates, and them with it."""
    if one is NO_SPAN:
        return
    for other in [other for other in others if other is not NO_SPAN][:MAX_LINKS]:
        one.add_link(other.get_span_context())
        other.add_link(one.get_span_context())


def serve_tracing(settings: TracingConfig | None) -> dict[str, Any]:
    """Return the options of Serve for traces: nothing where there are none.

    Raises ConfigError where what exports them is not installed.
    """
    if settings is None:
        return {}
    _exporter()
    return {
        "tracing_config": {
            "enabled": True,
            "exporter_import_path": _PROCESSORS,
            "sampling_ratio": settings.sampling_ratio,
        }
    }


def tracing_environment(settings: TracingConfig | None) -> dict[str, str]:
    """Return the environment of Serve's processes, which the exporter reads."""
    return {ENDPOINT: settings.endpoint} if settings is not None else {}


def span_processors() -> list[Any]:
    """Return the span processors of each of Serve's processes: a queue before the collector."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(_exporter().OTLPSpanExporter())]


@functools.cache
def _exporter() -> Any:
    try:
        return importlib.import_module(_EXPORTER)
    except ImportError:
        raise ConfigError("tracing: traces need OpenTelemetry's exporter: pip install 'atelier-serve[otel]'") from None
