"""Workers that come and go, on Ray. Without Ray: unit/cluster/placement/test_scaling.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.scaling_scenario import NUM_CALLERS
from integration.harness import SCENARIO_S, run_scenario

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(SCENARIO_S)]


def test_a_burst_brings_a_worker_silence_takes_both_and_a_request_brings_one_back(tmp_path: Path) -> None:
    observed = run_scenario(Path(__file__).with_name("scaling_scenario.py"), tmp_path)
    assert observed["answers"].keys() == {"200"}
    assert observed["answers"]["200"] > NUM_CALLERS
    assert observed["process"]
    assert observed["copies"] == 2, "both workers began as copies of a template"
