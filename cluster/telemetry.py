"""Metrics: where Ray exports them, and the ones that Atelier adds."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import ray
from ray.util.metrics import Counter, Histogram

from weights.reading.report import Stage, StageFigures

_STAGE_BOUNDARIES_MS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 3e4, 1e5]


def metrics_urls() -> list[str]:
    """The Prometheus endpoint of every node that is alive."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"] and node["MetricsExportPort"]
    ]


class RequestMetrics:
    """Counts requests and their stages: `atelier_requests_total`, `atelier_stage_ms`, and the encoder cache's use."""

    def __init__(self) -> None:
        self._requests = Counter("atelier_requests_total", "Requests answered.", tag_keys=("kind", "model"))
        self._stages = Histogram(
            "atelier_stage_ms",
            "Milliseconds that requests spent in a stage.",
            boundaries=_STAGE_BOUNDARIES_MS,
            tag_keys=("kind", "model", "stage"),
        )
        self._encodings = Counter(
            "atelier_encodings_total", "Text encodings by where they came from.", tag_keys=("model", "source")
        )
        self._attached = Counter("atelier_attached_bytes_total", "Bytes attached by switches.", tag_keys=("model",))

    def answered(self, kind: str, model: str, timings_ms: Mapping[str, float]) -> None:
        self._requests.inc(1, {"kind": kind, "model": model})
        for stage, ms in timings_ms.items():
            self._stages.observe(ms, {"kind": kind, "model": model, "stage": stage})

    def encoded(self, model: str, hits: int, misses: int) -> None:
        for source, count in (("cache", hits), ("encoder", misses)):
            if count:
                self._encodings.inc(count, {"model": model, "source": source})

    def attached(self, model: str, nbytes: int) -> None:
        if nbytes:
            self._attached.inc(nbytes, {"model": model})


class LoadMetrics:
    """A node's loading: `atelier_load_stage_seconds_total`, summed over threads, and `atelier_load_stage_bytes_total`.

    Thread-safe. Made inside an actor: Ray exports a metric from the process that it is made in.
    """

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        tags = ("stage", "node")
        self._seconds = Counter("atelier_load_stage_seconds_total", "Thread seconds spent loading.", tag_keys=tags)
        self._bytes = Counter("atelier_load_stage_bytes_total", "Bytes that passed a stage of loading.", tag_keys=tags)
        self._lock = threading.Lock()
        self._told: dict[Stage, StageFigures] = {}

    def loaded(self, stages: Mapping[Stage, StageFigures]) -> None:
        """`stages` are totals so far; what is new since the last call is counted."""
        with self._lock:
            for stage, found in stages.items():
                told = self._told.get(stage, StageFigures())
                tags = {"stage": stage, "node": self._node_id}
                # Totals taken by two threads may come here in the other order, and a counter cannot go back.
                if (seconds := found.busy_s - told.busy_s) > 0:
                    self._seconds.inc(seconds, tags)
                if (nbytes := found.nbytes - told.nbytes) > 0:
                    self._bytes.inc(nbytes, tags)
                self._told[stage] = max(found, told, key=lambda figures: figures.busy_s)
