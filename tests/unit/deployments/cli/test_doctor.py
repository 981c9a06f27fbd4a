"""`atelier doctor` on this machine, and where something is missing."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cluster.ray_seam import shims
from deployments.cli import doctor
from deployments.cli.main import _app
from deployments.engines import library_seam
from weights import torch_seam
from weights.private_names import Shim


def test_it_names_versions_and_finds_nothing_missing() -> None:
    result = CliRunner().invoke(_app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["libraries"]["ray"].startswith("2.")
    assert [one for shim in report["private_names"] for one in shim["problems"]] == []
    assert len(report["private_names"]) == len(shims.ALL) + len(torch_seam.SHIMS) + len(library_seam.SHIMS)


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_missing_name_is_shown_and_fails_when_serving_needs_it(
    monkeypatch: pytest.MonkeyPatch, is_needed: bool
) -> None:
    lost = Shim("listening", "nothing listens", used=("ray.serve:no_such_name",), is_needed=is_needed)
    monkeypatch.setattr(shims, "ALL", (lost,))
    result = CliRunner().invoke(_app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == int(is_needed)
    assert "ray.serve:no_such_name is missing" in result.stdout
    assert "nothing listens" in result.stdout


def test_a_machine_without_haproxy_is_told_what_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/no/such/program")
    assert "/no/such/program does not run" in doctor.examine()["haproxy"]
