"""The last Ray releases have the private names that Atelier changes: read off their wheels, none is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.judges import judge_folder

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
RELEASES = sorted(file.stem for file in (ROOT / "infra/judges").glob("ray-*.txt"))
PROBE = """
import json, ray
from cluster.ray_seam import shims
print(json.dumps([ray.__version__, {shim.purpose: shims.problems(shim) for shim in shims.ALL}]))
"""


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_and_reads_every_name(release: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{judge_folder(release)}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    version, found = json.loads(done.stdout.splitlines()[-1])
    assert f"ray-{version}" == release
    assert {purpose: missing for purpose, missing in found.items() if missing} == {}
