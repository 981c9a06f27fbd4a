"""What the class of a bench replica brings along to whoever opens its handle."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_class_of_a_replica_comes_without_torch() -> None:
    code = "import json, sys, deployments.bench.switch_replica; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "ray" in loaded
    assert not loaded & {"torch", "diffusers", "transformers"}
