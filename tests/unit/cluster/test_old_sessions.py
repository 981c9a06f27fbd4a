"""Ray's folders: those of sessions that have ended go, all others stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import old_sessions
from cluster.old_sessions import remove_old_sessions

NOW_S = 1_800_000_000.0


def session(folder: Path, number: int, age_s: float) -> Path:
    path = folder / f"session_2026-01-{number:02}_10-00-00_000001_77"
    (path / "logs").mkdir(parents=True)
    log = path / "logs" / "raylet.out"
    log.write_text("x")
    for each in (log, log.parent, path):
        os.utime(each, (NOW_S - age_s, NOW_S - age_s))
    return path


def test_sessions_that_have_ended_go_but_for_the_last(tmp_path: Path) -> None:
    old = [session(tmp_path, number, 10_000 - number) for number in (1, 2, 3)]
    writing = session(tmp_path, 4, 20_000)
    (writing / "logs" / "debug_state.txt").touch()
    os.utime(writing / "logs" / "debug_state.txt", (NOW_S - 5, NOW_S - 5))
    other = tmp_path / "session_of_somebody"
    other.mkdir()
    (tmp_path / "session_latest").symlink_to(old[0])
    remove_old_sessions(tmp_path, NOW_S)
    assert {path.name for path in tmp_path.iterdir()} == {old[2].name, writing.name, other.name, "session_latest"}


def test_a_silent_session_that_a_process_belongs_to_stays(tmp_path: Path) -> None:
    running, ended, _ = (session(tmp_path, number, 10_000 - number) for number in (5, 6, 7))
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", f"--session-name={running.name}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        remove_old_sessions(tmp_path, NOW_S)
        assert process.stdin is not None
        process.stdin.close()
    assert (running.exists(), ended.exists()) == (True, False)


def test_folders_of_other_users_and_no_folder_at_all_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [session(tmp_path, number, 10_000) for number in (8, 9)]
    monkeypatch.setattr(old_sessions.os, "geteuid", lambda: os.getuid() + 1)
    remove_old_sessions(tmp_path, NOW_S)
    remove_old_sessions(tmp_path / "none", NOW_S)
    assert all(path.exists() for path in both)
