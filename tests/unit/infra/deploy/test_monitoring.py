"""Alert rules and the board are current, and ask for metrics that there are."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster.admission.records import AdmissionSnapshot
from cluster.process import telemetry
from deployments.ingress.admin.metrics import admission_metrics, residency_metrics
from deployments.ingress.admin.routes import NodeMetrics
from infra.monitoring import ALERTS, FOLDER, PANELS, alert_rules, board

EXPRESSIONS = [found.expression for found in (*ALERTS, *PANELS)]


def known_names() -> set[str]:
    """Return the names of the queue's page, and those that replicas and actors give to Ray, as Ray writes them."""
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


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_metrics_that_there_are(expression: str) -> None:
    asked = set(re.findall(r"\b(?:ray_)?atelier_\w+", expression)) or {"up"}
    assert asked <= known_names() | {"up"}


def test_the_files_are_current() -> None:
    assert (FOLDER / "alerts.yaml").read_text() == alert_rules(), "run `python -m infra.monitoring`"
    assert (FOLDER / "dashboard.json").read_text() == board(), "run `python -m infra.monitoring`"


def test_every_alert_is_explained_to_operators() -> None:
    text = (Path(__file__).parents[4] / "docs/operations/start.md").read_text()
    assert [alert.name for alert in ALERTS if f"`{alert.name}`" not in text] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool (Debian's package prometheus)")
def test_prometheus_reads_the_rules() -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", str(FOLDER / "alerts.yaml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout
