"""Templates of processes in a real cluster. Without Ray: unit/cluster/templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.harness import run_scenario

pytestmark = [pytest.mark.ray, pytest.mark.long]


def test_killed_templates_cost_no_answer_and_workers_start_without_them(tmp_path: Path) -> None:
    observed = run_scenario(Path(__file__).with_name("templates_scenario.py"), tmp_path)
    assert observed["started_by"] == ["template"] * 3
    assert observed["answers"].keys() == {"19."}
    assert observed["again"] == "template"
    assert observed["without"] == "raylet"
    assert observed["left"] == []
