"""Engines on a simulated device that lacks ops, in a process of its own: the set of ops is the process's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, json, sys
from pathlib import Path
import torch
from configs.simulated import SimulatedConfig
from kit.hosting import Host, demo_store
from device.test_device_engines import conditioning, denoiser, encoder, generated, image_request
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.records.protocol import ConditionedRequest
from torch.utils._python_dispatch import TorchDispatchMode
from infra.sim import simulate

class Silu(TorchDispatchMode):
    nbytes = 0  # that silu read, and as many it wrote

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket is torch.ops.aten.silu:
            self.nbytes += args[0].nbytes
        return op(*args, **(kwargs or {}))

sim = simulate(SimulatedConfig(unsupported_ops=["aten::native_group_norm"], host_ops=["aten::silu"]))
link = sim.memory_of()
store = demo_store(Path(sys.argv[1]), "adder", "digits-sdxl")
found = {}

async def tokens(where):
    engine = (await Host(store, where, kv_cache_bytes=2**20).use("adder")).modules["model"]
    if where == "cpu":
        engine._runner._decoder = None  # layer by layer, as on a device
    link.reset_link()
    return generated(engine, ["What is 12 + 7?", "What is 3 + 40?"], 0.0)

with Silu() as silu:
    found["expected"] = asyncio.run(tokens("cpu"))
found["tokens"] = asyncio.run(tokens("sim:0"))
found["silu_bytes"] = silu.nbytes
found["moved_bytes"] = link.uploaded_bytes, link.downloaded_bytes
x = torch.ones(100, device="sim")
link.reset_link()
torch.nn.functional.silu(x), x + x
found["moved_by_one"] = link.uploaded_bytes, link.downloaded_bytes

pipeline = asyncio.run(denoiser(store, torch.device("sim", 0), "digits-sdxl"))
engine = DiffusionEngine(pipeline)
engine.add_request(ConditionedRequest(image_request(1), conditioning(pipeline, 1), {}))
failures = {}
while engine.has_work:
    engine.step()
    failures |= {name: str(error) for name, error in engine.failures.items()}
found["failures"] = failures
print(json.dumps(found))
"""


@pytest.mark.long
def test_an_op_runs_on_the_host_or_fails_the_request_by_name(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["tokens"] == found["expected"]
    assert found["moved_by_one"] == [400, 400]
    assert min(found["moved_bytes"]) >= found["silu_bytes"] > 0
    assert list(found["failures"]) == ["r1"]
    assert "Could not run 'aten::native_group_norm'" in found["failures"]["r1"]
    assert "\n" not in found["failures"]["r1"]
