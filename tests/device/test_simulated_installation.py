"""Bad input to a simulated device: one readable line each, in a process that has none yet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.simulated import SimulatedConfig, parse_simulated

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys
import torch
from configs.simulated import SimulatedConfig
from weights.records.errors import WeightsError
from weights.memory.devices import check_device, open_device
from infra.sim import simulate

def refusal(call):
    try:
        call()
    except WeightsError as error:
        return str(error)

said = {}
os.environ["ATELIER_SIMULATED"] = "memory=1"
said["environment"] = refusal(simulate)
os.environ["ATELIER_SIMULATED"] = "num_devices=2, memory_bytes=1 MiB"
said["memory"] = refusal(lambda: simulate(SimulatedConfig(num_devices=16, memory_bytes="99 TiB")))
said["op"] = refusal(lambda: simulate(SimulatedConfig(unsupported_ops=["aten::sofftmax"])))
torch.cuda.is_initialized, kept = (lambda: True), torch.cuda.is_initialized
said["cuda"] = refusal(lambda: open_device("sim"))
torch.cuda.is_initialized = kept
check_device("sim:1")
for device in ("sim:2", "tpu"):
    said["check " + device] = refusal(lambda: check_device(device))
said["check memory"] = refusal(lambda: check_device("sim", SimulatedConfig(num_devices=16, memory_bytes="99 TiB")))
said["check op"] = refusal(lambda: check_device("sim", SimulatedConfig(host_ops=["aten::sofftmax"])))
torch.cuda.device_count, kept = (lambda: 1), torch.cuda.device_count
check_device("cuda")
said["check cuda"] = refusal(lambda: check_device("cuda:1"))
torch.cuda.device_count = kept
assert not hasattr(torch, "sim")
said["opened"] = str(open_device("sim:1"))
said["index"] = refusal(lambda: open_device("sim:2"))
said["unknown"] = refusal(lambda: open_device("tpu"))
said["twice"] = refusal(lambda: simulate(SimulatedConfig(num_devices=3)))
said["total"] = torch.sim.mem_get_info(1)[1]
print(json.dumps(said))
"""


def test_each_mistake_is_one_line() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert "torch is patched in this process: 2 simulated devices of 1048576 bytes, computing on the host" in run.stderr
    assert (said.pop("opened"), said.pop("total")) == ("sim:1", 2**20)
    expected = {
        "environment": "ATELIER_SIMULATED: memory=1: Extra inputs are not permitted (known: num_devices, ",
        "memory": "cannot simulate 16 devices of 108851651149824 bytes each: this machine has ",
        "op": "torch has no op 'aten::sofftmax': expected a name of its dispatcher, such as aten::_softmax",
        "cuda": "cannot simulate a device in a process that uses CUDA: run it in one of its own",
        "index": "no device 'sim:2': 2 simulated devices here",
        "unknown": "no device 'tpu' (known: cpu, cpu-private, cuda, cuda:<n>, sim, sim:<n>)",
        "twice": "this process simulates other devices already: ",
    }
    expected |= {"check sim:2": expected["index"], "check tpu": expected["unknown"], "check op": expected["op"]}
    expected |= {"check memory": expected["memory"], "check cuda": "no device 'cuda:1': 1 CUDA devices here"}
    assert said.keys() == expected.keys()
    for case, line in said.items():
        assert line.startswith(expected[case])
        assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory_bytes=0", "memory_bytes=0: Input should be greater than 0"),
        ("memory_bytes=lots", "memory_bytes=lots: Value error, not a size in bytes: 'lots'"),
        ("link_gbps=0", "link_gbps=0: Input should be greater than 0"),
        ("link_gbps=nan", "link_gbps=nan: Input should be "),
        ("link_gbps=inf", "link_gbps=inf: Input should be a finite number"),
        ("num_devices=0", "num_devices=0: Input should be greater than or equal to 1"),
        ("fast", "'fast': expected key=value (keys: num_devices, memory_bytes, "),
    ],
)
def test_a_bad_variable_is_told_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        parse_simulated(text)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_variable_is_read() -> None:
    found = parse_simulated("num_devices=2, memory_bytes=512MiB,link_gbps=64,host_ops=aten::_softmax+aten::addmm")
    ops = frozenset({"aten::_softmax", "aten::addmm"})
    assert found == SimulatedConfig(num_devices=2, memory_bytes=2**29, link_gbps=64, host_ops=ops)
    assert parse_simulated(" ") == SimulatedConfig()
