"""Processes that run one packed model have its weights in memory once: nothing is unpacked, and nothing repacked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from infra.bench.command.figures import pss_bytes
from infra.offline.checkpoints import quantize_checkpoint

FORMS: Final[dict[Any, str]] = {"gguf-q8_0": "model.gguf", "gguf-q4_0": "model.gguf", "kuiper-int8": "model.bin"}
# Opens a model, and has it answer a long prompt with a completion.
OPEN = """
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextRequest
from weights.loading.views import mapped_tensors

def opened(path):
    folder, tensors, _ = mapped_tensors(path)
    engine = LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=2**20))
    engine.add_request(TextRequest("r", tuple(range(4, 52)), SamplingParams(max_tokens=8, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    return engine
"""
# Opens one model after the other, and stays until it is told to go.
REPLICA = f"""
import json, sys
from pathlib import Path
import torch
from infra.bench.command.figures import private_bytes
{OPEN}
def own():
    return private_bytes(Path("/proc/self/smaps_rollup").read_text())

torch.set_num_threads(1)
engines, grown = [], []
for path in map(Path, sys.argv[1:]):
    begin = own()
    engines.append(opened(path))
    grown.append(own() - begin)
print(json.dumps(grown), flush=True)
sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_two_processes_share_one_copy(form: Any, tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny("llama", hidden_size=1024, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=8)
    small = tiny("llama", hidden_size=64, intermediate_size=64)  # takes the memory that code takes once
    paths, files = [], []
    for number, source in enumerate((small, model)):
        source.stock.save_pretrained(source.folder)
        folder = tmp_path / f"{number}-{form}"
        paths.append(folder / FORMS[form] if form.startswith("gguf") else folder)
        files.append(folder / FORMS[form])
        quantize_checkpoint(source.folder, paths[-1], form)
    scope: dict[str, Any] = {}
    exec(OPEN, scope)
    here = scope["opened"](paths[1])  # this process is one of the two
    command = [sys.executable, "-c", REPLICA, *map(str, paths)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        _, growth = json.loads(other.stdout.readline())
        maps = [Path(f"/proc/{process}/smaps").read_text() for process in ("self", other.pid)]
        other.communicate()
    assert other.returncode == 0
    size = files[1].stat().st_size
    shared = [pss_bytes(text, str(files[1])) for text in maps]
    assert 0.9 * size < sum(shared) < 1.01 * size, here  # each page counts once, whoever has it
    assert max(shared) < 0.6 * size
    # The KV cache has 1 MiB and a step computes something; a copy, even a packed one, would be three times that.
    assert growth < 2**22 < size / 2.5
