"""The opening mode of `atelier bench llm`: seconds to the first token, and the memory that a model then takes.

Each repetition is a process of its own, which has imported everything, as a replica has, before it begins to count; the
file is in the page cache from the second on. Memory is what the process grew by until it has answered a prompt: the
mapped file, the KV cache, which is as large as that needs, and what computing took.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from deployments.bench.peers import TOKENS
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.kv_cache import cache_tensors
from deployments.engines.llm.models.packed import compute_dtype
from deployments.engines.llm.models.registry import decoder_spec, load_config
from deployments.engines.protocol import SamplingParams, TextRequest
from weights.loading.views import Tensors, mapped_tensors

_ROOM_BYTES = 1 << 30  # more than the cache of one sequence


def measure_opening(model: Path, n_prompt: int, n_gen: int, threads: int, repetitions: int) -> dict[str, Any]:
    """Open the model in processes of their own, once to warm the page cache; return medians."""
    command = [sys.executable, "-m", __name__, str(model), str(n_prompt), str(n_gen), str(threads)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = []
    for _ in range(repetitions + 1):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found.append(json.loads(done.stdout))
    figures = {name: statistics.median(one[name] for one in found[1:]) for name in found[0]}
    needed = figures["file_mb"] + figures["kv_mb"]
    return (
        {"open_to_first_token_cold_s": found[0]["open_to_first_token_s"]}
        | figures
        | {"grown_by_of_file_and_kv": figures["grown_by_mb"] / needed}
    )


def _open_model(model: Path, n_prompt: int, n_gen: int) -> dict[str, float]:
    """Open a model in this process and answer one prompt."""
    AutoConfig.for_model("llama")  # transformers imports the half of itself at the first config
    before = _resident_bytes()
    begin = time.perf_counter()
    folder, tensors, _ = mapped_tensors(model)
    config = LLMEngineConfig(max_num_seqs=1, kv_cache_bytes=_ROOM_BYTES, max_model_len=n_prompt + n_gen + 1)
    engine = LLMEngine(folder, tensors, config)
    opened = time.perf_counter()
    first_s = _answer(engine, 1, 1)
    first_token_s = time.perf_counter() - begin
    _answer(engine, n_prompt, n_gen)
    grown = _resident_bytes() - before
    return {
        "open_s": opened - begin,
        "first_step_s": first_s,
        "open_to_first_token_s": first_token_s,
        "file_mb": sum(tensor.nbytes for tensor in tensors.values()) / 1e6,
        "kv_mb": _kv_bytes(folder, tensors, engine.stats().num_blocks) / 1e6,
        "grown_by_mb": grown / 1e6,
    }


def _answer(engine: LLMEngine, n_prompt: int, n_gen: int) -> float:
    """Return the seconds of an answer to random tokens."""
    begin = time.perf_counter()
    prompt = tuple(random.Random(n_prompt).choices(TOKENS, k=n_prompt))
    params = SamplingParams(max_tokens=n_gen, temperature=0, ignore_eos=True)
    engine.add_request(TextRequest("r", prompt, params))
    while engine.has_work:
        engine.step()
        if engine.failures:
            raise RuntimeError(f"the model failed: {dict(engine.failures)}")
    return time.perf_counter() - begin


def _kv_bytes(folder: Path, tensors: Tensors, num_blocks: int) -> int:
    config = load_config(folder)
    is_packed = getattr(config, "packed_source", None) is not None
    dtype = compute_dtype("fast") if is_packed else next(iter(tensors.values())).dtype
    shapes = cache_tensors(decoder_spec(config), num_blocks, dtype)
    return sum(math.prod(shape) * kind.itemsize for shape, kind in shapes)


def _resident_bytes() -> int:
    """Return the resident memory of this process, mapped files included."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    prompt_tokens, generated, num_threads = map(int, numbers)
    torch.set_num_threads(num_threads)
    sys.stdout.write(json.dumps(_open_model(Path(path), prompt_tokens, generated)))
