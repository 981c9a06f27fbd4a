"""The compiled kernels are found again: compiling them takes half a minute."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_every_process_looks_for_the_same_file() -> None:
    code = "from deployments.engines.native.building import library_name; print(library_name())"
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2", "3")
    }
    assert len(names) == 1
