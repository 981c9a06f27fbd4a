"""Spans of a cluster's processes as lines of JSON in a folder: what a collector would get."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "ATELIER_TEST_SPANS"


def span_processors() -> list[Any]:
    """Return the processors that Serve gives the spans of this process to, as `cluster.process.tracing` does."""
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    file = Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl"
    exporter = ConsoleSpanExporter(out=file.open("a"), formatter=lambda span: span.to_json(indent=None) + "\n")
    return [SimpleSpanProcessor(exporter)]
