"""Runs of pytest within tests, in copies of one process that has loaded pytest and numpy once.

No plugin is loaded but those that a run names, and none keeps a cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

_TESTS: Final = Path(__file__).parents[1]
_TIMEOUT_S: Final = 240
_PROGRAM: Final = """
import importlib, json, os, sys
import numpy, pytest

outputs, libraries, runs = json.loads(sys.argv[1])
for name in libraries:
    importlib.import_module(name)
codes = []
for number, (words, environment) in enumerate(runs):
    if not (child := os.fork()):
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{outputs}/{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        os.environ.update(environment)
        code = pytest.main(["-p", "no:cacheprovider", *words])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


class Run(NamedTuple):
    """The words of a run, and variables of its environment."""

    words: Sequence[str]
    environment: Mapping[str, str] = {}


class Done(NamedTuple):
    """The end of a run: its exit code, and what it has written."""

    code: int
    out: str
    err: str


def run_pytest(folder: Path, *runs: Run, libraries: Sequence[str] = ()) -> list[Done]:
    """Run pytest in a folder, once for each of `runs`, one after the other. `libraries` are loaded before."""
    with tempfile.TemporaryDirectory() as outputs:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, json.dumps([outputs, libraries, runs])],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(_TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        codes: list[int] = json.loads(done.stdout)
        files = [Path(outputs) / str(number) for number in range(len(codes))]
        texts = [[file.with_suffix(end).read_text() for end in (".out", ".err")] for file in files]
    return [Done(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


def plugins(*names: str) -> list[str]:
    """Return the words that load plugins of this kit."""
    return [word for name in names for word in ("-p", f"kit.{name}")]
