"""Runs a judge: a script of tests/judges in an environment with somebody else's client, whose pins are not ours.

An environment is a folder of `.judges`: a virtual environment of Python's, or the node_modules of a client for Node.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.harness import ROOT
from kit.judges import judge_folder

JUDGES = ROOT / "tests/judges"
DEMO = ROOT / "infra/demo"
TIMEOUT_S = 150


@dataclass(frozen=True)
class Observed:
    """The observations of a judge, by name."""

    seen: dict[str, dict[str, Any]]
    folder: Path

    def __getitem__(self, name: str) -> Any:
        found = self.seen[name]
        assert "raised" not in found, f"{name} raised {found['raised']}"
        return found["value"]

    def seconds(self, name: str) -> float:
        return float(self.seen[name]["seconds"])

    def array(self, observation: str, name: str) -> np.ndarray:
        """Return the array that was kept under `name`, with the shape that the observation tells."""
        shape = self[observation]
        array: np.ndarray = np.load(self.folder / f"{name}.npy")
        assert list(array.shape) == (shape["shape"] if isinstance(shape, dict) else shape)
        return array


def judge(script: str, environment: str, url: str, grpc: str, folder: Path, asked: dict[str, Any]) -> Observed:
    """One run of the script. `asked` is what it reads its questions from."""
    python = judge_folder(environment) / "bin/python"
    return _run([str(python), str(JUDGES / f"{script}.py")], {}, url, grpc, folder, asked)


def node_judge(script: str, environment: str, url: str, grpc: str, folder: Path, asked: dict[str, Any]) -> Observed:
    """One run of a script for Node. Skips the test that wants it where there is no Node."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        pytest.skip("there is no node, or no npm, which installs the client")
    modules = {"NODE_PATH": str(judge_folder(environment) / "node_modules")}
    return _run([node, str(JUDGES / f"{script}.cjs")], modules, url, grpc, folder, asked)


def _run(
    command: list[str], environment: dict[str, str], url: str, grpc: str, folder: Path, asked: dict[str, Any]
) -> Observed:
    folder.mkdir(exist_ok=True)
    (folder / "asked.json").write_text(json.dumps(asked))
    script = Path(command[-1])
    done = subprocess.run(
        [*command, url, grpc, str(folder)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{script.stem} ended with {done.returncode}: {done.stderr[-3000:]}"
    return Observed(json.loads((folder / f"{script.stem}.json").read_text()), folder)


@functools.cache
def digit_judge() -> Any:
    """The classifier of the demo that reads generated digits: trained on real ones, for all tests."""
    demo = demo_module("digits")
    return demo.Judge(demo.load_split()[0])


def held_out_texts(num_per_kind: int) -> tuple[list[str], list[str]]:
    """(texts, their kinds) of the shipped sample that no training saw."""
    lines = (DEMO / "texts_heldout.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    kinds = sorted({kind for kind, _ in rows})
    chosen = [row for kind in kinds for row in [row for row in rows if row[0] == kind][:num_per_kind]]
    return [text for _, text in chosen], [kind for kind, _ in chosen]


def demo_module(name: str) -> Any:
    """A module of infra/demo."""
    sys.path.insert(0, str(DEMO))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(DEMO))
