"""Files of tests that leave their process changed: they fail, and say by which change."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kit.nested import Run, plugins, run_pytest
from kit.process_state import changes, process_state

LEAVING = """
import os, time

def test_of_the_environment(monkeypatch):
    monkeypatch.setenv("TAKEN_BACK", "1")
    os.environ["LEFT"] = "1"

def test_of_a_function():
    time.sleep = print
"""


@contextmanager
def changed(folder: Path) -> Iterator[None]:
    umask, handler, logger = os.umask(0o077), signal.getsignal(signal.SIGUSR2), logging.getLogger("known")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEW", "b")
        patch.delenv("PATH")
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setitem(sys.modules, "contextlib", ModuleType("contextlib"))
        patch.setattr(os, "fsync", print)
        patch.setattr(torch.nn.Linear, "forward", print)
        patch.setattr(torch, "sim", ModuleType("sim"), raising=False)
        patch.setattr(shutil, "brought", print, raising=False)  # what was not there before is not told
        patch.setitem(sys.modules, "logging.brought", ModuleType("logging.brought"))
        logging.getLogger("brought")
        logger.setLevel(logging.ERROR)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        torch.set_grad_enabled(False)
        try:
            yield
        finally:
            torch.set_grad_enabled(True)
            signal.signal(signal.SIGUSR2, handler)
            logger.setLevel(logging.NOTSET)
            os.umask(umask)


def test_each_change_is_told_and_none_that_was_taken_back(tmp_path: Path) -> None:
    logging.getLogger("known")
    before = process_state()
    with changed(tmp_path):
        found = changes(before, process_state())
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "a_library", ModuleType("a_library"))
            of_library = changes(before, process_state())
    assert [line.partition(": was ")[0] for line in found] == [
        "os.environ, NEW",
        "os.environ, PATH",
        "python, os.getcwd",
        "python, os.umask",
        "python, sys.path",
        "signal.getsignal, SIGUSR2",
        "the name of a logger, known",
        "the name of a module, contextlib",
        "the name of os, fsync",
        "the name of torch.nn.Linear, forward",
        "torch, is_grad_enabled",
        "torch, sim",
    ]
    assert "os.environ, NEW: was 'missing', is 'b'" in found
    assert set(found) - set(of_library) == {
        "os.environ, NEW: was 'missing', is 'b'",
        *(line for line in found if line.startswith("the name of a logger, known")),
    }
    assert changes(before, process_state()) == []


@pytest.mark.slow
def test_a_file_that_leaves_something_changed_fails_also_when_its_last_test_runs_again(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(LEAVING)
    (tmp_path / "test_second.py").write_text("def test_it():\n    pass\n")
    words = [*plugins("process_state"), "-p", "pytest_rerunfailures", "--reruns", "1", "-rR"]
    [done] = run_pytest(tmp_path, Run(words))
    assert done.code == pytest.ExitCode.TESTS_FAILED
    assert "test_first.py leaves changed for whatever runs behind it:\n" in done.out
    assert [line.strip()[:32] for line in done.out.splitlines() if ": was " in line] == [
        "os.environ, LEFT: was 'missing',",
        "the name of time, sleep: was <bu",
    ]
    assert "4 passed, 1 error, 1 rerun" in done.out
