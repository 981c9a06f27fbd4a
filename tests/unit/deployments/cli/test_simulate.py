"""`atelier simulate`, from the outside."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest

from cluster.simulator.running import POLICIES
from deployments.cli.main import main


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["atelier", "simulate", *words])
    with contextlib.suppress(SystemExit):  # typer ends with it; what was printed tells whether it went well
        main()


def test_a_recorded_trace_gives_the_same_figures(monkeypatch, tmp_path: Path, capsys) -> None:
    trace, chart = tmp_path / "a/trace.jsonl", tmp_path / "run.svg"
    words = ["--poisson", "1", "--duration-s", "30", "--models", "4", "--workers", "2", "--json"]
    run(monkeypatch, *words, "--record", str(trace), "--chart", str(chart))
    made = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in made["runs"]] == list(POLICIES)
    assert chart.read_text().startswith("<svg")
    run(monkeypatch, str(trace), "--json")
    assert json.loads(capsys.readouterr().out) == made


def test_sizing_says_how_many_workers_suffice(monkeypatch, capsys) -> None:
    words = ["--poisson", "1", "--duration-s", "40", "--models", "2", "--target-s", "20", "--policy", "latency-first"]
    run(monkeypatch, *words, "--workers", "8", "--sizing", "0.95", "--json")
    found = json.loads(capsys.readouterr().out)["workers"]["latency-first"]
    assert 1 <= found < 8
    run(monkeypatch, *words, "--workers", str(found), "--json")
    assert json.loads(capsys.readouterr().out)["runs"][0]["slo_attainment"] >= 0.95
    run(monkeypatch, *words, "--workers", "1", "--sizing", "1", "--target-s", "0.5")
    assert "more than 1" in capsys.readouterr().out


def test_broken_lines_are_said_and_left_out(monkeypatch, tmp_path: Path, capsys) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b'{"kind": "request", "at_s": 1, "model": "a"}\nnonsense\n\xff\xfe\n')
    run(monkeypatch, str(trace), "--policy", "latency-first", "--json")
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
def test_mistakes_are_one_line(monkeypatch, capsys, words: list[str], said: str) -> None:
    monkeypatch.setattr(sys, "argv", ["atelier", "simulate", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_runs_are_written_into_one_page_that_asks_nobody(monkeypatch, tmp_path: Path, capsys) -> None:
    page = tmp_path / "run.html"
    run(monkeypatch, "--poisson", "1", "--duration-s", "20", "--models", "3", "--html", str(page), "--json")
    text = page.read_text()
    policies = [each["policy"] for each in json.loads(capsys.readouterr().out)["runs"]]
    assert policies == ["latency-first", "serve.multiplexed"]
    found = json.loads(re.search(r'id="runs">(.*?)</script>', text)[1])
    assert [each["title"] for each in found] == policies
    assert "default-src 'none'" in text
    assert not re.search(r'(?:src|href)=|url\(|from "\./', text)


def test_a_run_that_is_too_large_for_a_page_is_told_before_it_runs(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr("deployments.cli.simulate.simulate", lambda *_: pytest.fail("it ran"))
    run(monkeypatch, "--burst", "1", "--models", "3", "--workers", "300", "--html", str(tmp_path / "a"))
    assert "300 workers; a page shows at most 256" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
