"""`atelier simulate`, from the outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.command_line import run_atelier

from infra.simulator.running import POLICIES

ROOT = Path(__file__).parents[4]


def test_a_recorded_trace_gives_the_same_figures(tmp_path: Path, capsys) -> None:
    trace, chart = tmp_path / "a/trace.jsonl", tmp_path / "run.svg"
    words = ["--poisson", "1", "--duration-s", "30", "--models", "4", "--workers", "2", "--json"]
    run_atelier("simulate", *words, "--record", str(trace), "--chart", str(chart))
    made = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in made["runs"]] == list(POLICIES)
    assert chart.read_text().startswith("<svg")
    run_atelier("simulate", str(trace), "--json")
    assert json.loads(capsys.readouterr().out) == made


def test_sizing_says_how_many_workers_suffice(capsys) -> None:
    words = ["--poisson", "1", "--duration-s", "40", "--models", "2", "--target-s", "20", "--policy", "latency-first"]
    run_atelier("simulate", *words, "--workers", "8", "--sizing", "0.95", "--json")
    found = json.loads(capsys.readouterr().out)["workers"]["latency-first"]
    assert 1 <= found < 8
    run_atelier("simulate", *words, "--workers", str(found), "--json")
    assert json.loads(capsys.readouterr().out)["runs"][0]["slo_attainment"] >= 0.95
    run_atelier("simulate", *words, "--workers", "1", "--sizing", "1", "--target-s", "0.5")
    assert "more than 1" in capsys.readouterr().out


def test_broken_lines_are_said_and_left_out(tmp_path: Path, capsys) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b'{"kind": "request", "at_s": 1, "model": "a"}\nnonsense\n\xff\xfe\n')
    run_atelier("simulate", str(trace), "--policy", "latency-first", "--json")
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [problem.split(":")[0] for problem in found["problems"]] == ["line 2", "line 3"]
    assert "line 2" in err
    assert found["runs"][0]["served"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to simulate"),
        (["no-such-file"], "No such file"),
        (["--poisson", "1", "--policy", "magic"], "unknown policy 'magic'; known: latency-first"),
    ],
)
def test_mistakes_are_one_line(capsys, words: list[str], said: str) -> None:
    assert run_atelier("simulate", *words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_runs_are_written_into_one_page_that_asks_nobody(tmp_path: Path, capsys) -> None:
    page = tmp_path / "run.html"
    run_atelier("simulate", "--poisson", "1", "--duration-s", "20", "--models", "3", "--html", str(page), "--json")
    text = page.read_text()
    policies = [each["policy"] for each in json.loads(capsys.readouterr().out)["runs"]]
    assert policies == ["latency-first", "serve.multiplexed"]
    found = json.loads(re.search(r'id="runs">(.*?)</script>', text)[1])
    assert [each["title"] for each in found] == policies
    assert "default-src 'none'" in text
    assert not re.search(r'(?:src|href)=|url\(|from "\./', text)


def test_a_run_that_is_too_large_for_a_page_is_told_before_it_runs(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr("infra.simulator.command.simulate", lambda *_: pytest.fail("it ran"))
    run_atelier("simulate", "--burst", "1", "--models", "3", "--workers", "300", "--html", str(tmp_path / "a"))
    assert "300 workers; a page shows at most 256" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_without_the_simulator_the_command_line_starts_and_says_what_to_install(tmp_path: Path) -> None:
    """As in an installation that has the entry point and not the folder."""
    info = tmp_path / "atelier_serve-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atelier-serve\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[atelier.commands]\nsimulate = infra.left_out.command:app\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [sys.executable, "-m", "deployments.cli.entry"]
    found = subprocess.run(
        [*words, "simulate", "--poisson", "1"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == 2
    assert "`atelier simulate` is a tool that this installation leaves out" in found.stderr
    assert "Traceback" not in found.stderr
    told = subprocess.run([*words, "--help"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0
    assert "simulate" not in told.stdout
