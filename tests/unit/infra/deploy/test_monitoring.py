"""Alert rules and the board are current, and ask for metrics that there are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kit.metric_names import metric_names

from infra.monitoring import ALERTS, FOLDER, PANELS, alert_rules, board

EXPRESSIONS = [found.expression for found in (*ALERTS, *PANELS)]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_metrics_that_there_are(expression: str) -> None:
    asked = set(re.findall(r"\b(?:ray_)?atelier_\w+", expression)) or {"up"}
    assert asked <= metric_names() | {"up"}


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
