"""Metrics: where Ray exports them, and the ones that Atelier adds."""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.util.metrics import Counter, Histogram

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
