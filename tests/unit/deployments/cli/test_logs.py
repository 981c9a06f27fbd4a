"""Logs of detached starts: numbered, kept, followed into the next start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from kit.waiting import wait_until
from typer.testing import CliRunner

from deployments.cli import cluster

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "atelier"


def test_logs_of_earlier_starts_are_kept_and_the_oldest_goes(folder: Path) -> None:
    for start in range(cluster.KEPT + 3):
        cluster.begin_log("demo").write_text(f"start {start}\n")
    newest = cluster.KEPT + 2
    assert (folder / "demo.log").read_text() == f"start {newest}\n"
    assert sorted(file.name for file in folder.iterdir()) == ["demo.log", *(f"demo.log.{n}" for n in range(1, 6))]
    assert [(folder / f"demo.log.{n}").read_text() for n in range(1, 6)] == [
        f"start {newest - n}\n" for n in range(1, 6)
    ]


def test_the_command_prints_the_log_that_was_written_last(folder: Path) -> None:
    cluster.begin_log("other").write_text("another cluster\n")
    cluster.begin_log("demo").write_text("first\n")
    cluster.begin_log("demo").write_text("second [red]\n")
    printed = RUNNER.invoke(cluster.app, ["logs"])
    assert printed.exit_code == 0
    assert "second [red]\n" in printed.output
    assert "first" not in printed.output
    assert "first\n" in RUNNER.invoke(cluster.app, ["logs", "demo", "--earlier", "1"]).output
    assert "another cluster\n" in RUNNER.invoke(cluster.app, ["logs", "other"]).output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "`atelier up --detach` writes one"),
        (["nobody"], "no log of cluster 'nobody'"),
        (["../../etc/passwd"], "no log of cluster '../../etc/passwd'"),
    ],
)
def test_a_log_that_is_not_there_is_said(arguments: list[str], said: str) -> None:
    found = RUNNER.invoke(cluster.app, ["logs", *arguments])
    assert found.exit_code
    assert said in str(found.exception)


def test_a_start_too_long_ago_is_said(folder: Path) -> None:
    cluster.begin_log("demo").write_text("only\n")
    assert "no log of 3 starts ago" in str(RUNNER.invoke(cluster.app, ["logs", "demo", "--earlier", "3"]).exception)


def test_following_goes_on_into_the_next_start(folder: Path) -> None:
    log = cluster.begin_log("demo")
    log.write_text("a\n")
    seen: list[str] = []

    def follow() -> None:
        for text in cluster.read_on(log, pause_s=0.005):
            seen.append(text)
            if "end" in text:
                return

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    wait_until(lambda: "".join(seen) == "a\n")
    with log.open("a") as file:
        file.write("b\n")
    wait_until(lambda: "".join(seen) == "a\nb\n")
    cluster.begin_log("demo").write_text("end\n")
    reader.join(10)
    assert "".join(seen) == "a\nb\nend\n"


def test_a_folder_that_others_can_write_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(cluster.SessionError, match="other users can read it"):
        cluster.begin_log("demo")
