"""Judges are installed by the test that wants one, once, whoever else wants it meanwhile."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kit.judges import judge_folder

MAKEFILE = """\
.judges/%/.installed: infra/%.txt
\t@test "$$(cat $<)" = "" || { cat $< >&2; exit 3; }
\tmkdir $(@D)
\t@touch $@
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "infra").mkdir()
    return tmp_path


def test_whoever_wants_a_judge_at_the_same_time_finds_it_installed_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "n")  # of a `make -n` that runs the tests: it would install nothing
    (root / "infra/client.txt").touch()
    with ThreadPoolExecutor() as threads:  # a second installation would end at `mkdir`
        found = list(threads.map(lambda _: judge_folder("client", root), range(4)))
    assert found == [root / ".judges/client"] * 4
    assert (found[0] / ".installed").exists()
    (root / "infra/client.txt").write_text("a newer release")
    os.utime(root / "infra/client.txt", (time.time() + 60,) * 2)
    with pytest.raises(AssertionError, match="a newer release"):
        judge_folder("client", root)


@pytest.mark.parametrize(("name", "reason"), [("client", "no such release"), ("unknown", "No rule to make target")])
def test_a_judge_that_cannot_be_installed_says_why(root: Path, name: str, reason: str) -> None:
    (root / "infra/client.txt").write_text("no such release")
    with pytest.raises(AssertionError, match=reason):
        judge_folder(name, root)
