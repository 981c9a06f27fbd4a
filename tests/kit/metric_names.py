"""The names of Atelier's metrics, as the code gives them to `/metrics`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from cluster.admission.records import AdmissionSnapshot
from cluster.process import telemetry
from deployments.ingress.admin.metrics import admission_metrics, residency_metrics
from deployments.ingress.admin.routes import NodeMetrics


def metric_names() -> set[str]:
    """Return the names on the queue's page, and those of replicas and actors as Ray writes them."""
    empty = AdmissionSnapshot(models=(), replicas={}, tenants={})
    nothing: dict[str, list[dict[str, Any]]] = {"nodes": [], "workers": [], "text_encoders": []}
    own = (admission_metrics(empty), residency_metrics(nothing), asyncio.run(NodeMetrics(dict).page()))
    queue = set(re.findall(r"^# TYPE (\S+)", "".join(own), re.MULTILINE))
    source = Path(telemetry.__file__).read_text()
    counted = {f"ray_{name}" for name in re.findall(r'"(atelier_\w+)"', source)}
    measured = {f"ray_{name}" for name in re.findall(r'_MeasuredHistogram\(\s*"(atelier_\w+)"', source)}
    assert queue
    assert measured
    suffixes = (telemetry._MEASURED, "_count", "_sum", "_bucket")
    return queue | counted | {f"{name}{suffix}" for name in measured for suffix in suffixes}
