"""Six minutes of `make soak`, in namespaces of their own: nothing is lost or wrong, and counts and sizes stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.seeding import seeded_random
from soak.namespaces import missing

SCRIPT = Path(__file__).parents[1] / "soak/run_soak.py"
ROOT = SCRIPT.parents[2]

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]


def test_six_minutes_of_disturbances_lose_nothing_and_leave_nothing() -> None:
    """Times are printed and not judged: other work on the machine makes them longer."""
    if reason := missing():
        pytest.skip(reason)
    options = ["--minutes", "6", "--seed", str(seeded_random().getrandbits(31)), "--untimed"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
