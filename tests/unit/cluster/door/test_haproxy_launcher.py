"""The launcher becomes HAProxy with its arguments, which is stopped softly when the process behind it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from cluster.door import haproxy_launcher

# In place of HAProxy: its arguments, and the signal that the kernel sends it when its parent ends.
PROGRAM = """
import ctypes, json, sys
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))
print(json.dumps([sys.argv[1:], number.value]))
"""


def launch(parent: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-IS", haproxy_launcher.__file__, str(parent), sys.executable, "-c", PROGRAM]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("given", [("-f", "a b"), ("-dR", "-f", "x"), ()])
def test_haproxy_gets_its_arguments_and_shares_no_port(given: tuple[str, ...]) -> None:
    arguments, number = json.loads(launch(os.getpid(), *given).stdout)
    assert arguments == [*given, *(() if "-dR" in given else ("-dR",))]
    assert number == signal.SIGUSR1


def test_nothing_starts_for_a_parent_that_has_ended() -> None:
    found = launch(os.getppid())
    assert (found.returncode, found.stdout) == (1, "")
