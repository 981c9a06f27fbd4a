"""Templates of processes in a real cluster. Without Ray: unit/cluster/ray_seam/templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.harness import SCENARIO_S, run_scenario

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(SCENARIO_S)]


def test_killed_templates_cost_no_answer_and_workers_start_without_them(tmp_path: Path) -> None:
    observed = run_scenario(Path(__file__).with_name("templates_scenario.py"), tmp_path)
    assert observed["started_by"] == ["template"] * 3
    assert observed["answers"].keys() == {"19."}
    assert observed["adopted_by"] == "template"
    assert observed["again"] == "template"
    assert observed["without"] == "raylet"
    for shown in (observed["shown"], observed["shown_again"]):
        assert shown["ready"] == ["ray", "replica", "serve"]
        assert shown["copies"]["replica"] == 2  # the worker and the text encoder
        assert shown["copies"]["serve"] >= 2  # the ingress, and Serve's controller
        assert shown["problems"] == []
    assert observed["shown_without"]["ready"] == []
    assert observed["shown_without"]["copies"]["replica"] == 1  # the text encoder lives on
    assert any("no copy of template 'replica'" in problem for problem in observed["shown_without"]["problems"])
    # Without standby, a worker has Serve's imports done, and torch's not.
    assert observed["no_standby"]["started_by"] == ["template"] * 3
    assert observed["no_standby"]["again"] == "template"
    assert observed["no_standby"]["shown"]["ready"] == ["ray", "serve"]
    assert observed["no_standby"]["shown"]["problems"] == []
    assert observed["off"] == {"started_by": ["raylet"] * 3, "shown": None}
    assert observed["left"] == []
