"""`atelier doctor` on this machine, and where something is missing."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import ray  # noqa: F401  # it and diffusers' models change the process that imports them: not behind a test's back
from diffusers.models.transformers import transformer_flux  # noqa: F401
from typer.testing import CliRunner

from cluster.ray_seam import shims
from deployments.cli import doctor
from deployments.cli.main import _app
from deployments.engines.libraries import library_seam
from weights.platform import torch_seam
from weights.platform.private_names import Shim

Run = Callable[..., tuple[int, str, str]]


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


def test_a_ray_that_was_never_tried_is_said_and_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Ray 9.9 is none that Atelier was tried with"
    monkeypatch.setattr(shims, "why_untried", lambda: said)
    result = CliRunner().invoke(_app, ["doctor"])
    assert (result.exit_code, said in result.stdout) == (1, True)


def test_a_machine_without_haproxy_is_told_what_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/no/such/program")
    assert "/no/such/program does not run" in doctor.examine()["haproxy"]


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", {0: {1, 4, 5}}.__getitem__, raising=False)
    assert doctor.examine()["cores"] == 3


def test_nodes_of_a_ray_that_lack_something_are_named_and_are_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["node 10.0.0.3 has Atelier 1 (a), and this cluster Atelier 2 (b): install the same there"]
    monkeypatch.setattr("cluster.start.session.join_ray", lambda address: None)
    monkeypatch.setattr("cluster.start.node_checks.node_problems", lambda wanted: found)
    result = CliRunner().invoke(_app, ["doctor", "--address", "10.0.0.1:6379"], env={"COLUMNS": "200"})
    assert (result.exit_code, found[0] in result.stdout) == (1, True)
    found.clear()
    assert CliRunner().invoke(_app, ["doctor", "--address", "10.0.0.1:6379"]).exit_code == 0


def test_a_ray_that_does_not_answer_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str) -> None:
        raise ConnectionError(f"nobody at {address}\nand more")

    monkeypatch.setattr("cluster.start.session.join_ray", refuse)
    code, out, err = run("doctor", "--address", "10.0.0.1:6379")
    assert (code, out, err) == (1, "", "error: no Ray answers at 10.0.0.1:6379 (nobody at 10.0.0.1:6379)\n")
