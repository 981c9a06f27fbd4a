"""`atelier bench llm`: llama-bench's protocol and field names on our engine, beside llama.cpp or transformers.

As llama-bench: random tokens, an empty cache for each repetition, a warm-up first, tokens per second as mean and sample
deviation over repetitions. Ours goes through the whole engine, so its figures include the scheduler and the sampler;
on request also without them, batch by batch, which is what llama-bench measures of llama.cpp. They and the peer take
turns, so that what else the machine does falls on all.

The opening mode measures the seconds to the first token, and the memory that a model then takes. Each repetition is a
process of its own, which has imported everything, as a replica has, before it begins to count; the file is in the page
cache from the second on. Memory is what the process grew by until it has answered a prompt: the mapped file, the KV
cache, which is as large as that needs, and what computing took.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import AutoConfig

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.models.packed import compute_dtype
from deployments.engines.llm.models.registry import create_model, decoder_spec, load_config
from deployments.engines.llm.sequences.kv_cache import KvDtype, cache_tensors, plan_cache
from deployments.engines.records.protocol import SamplingParams, TextRequest
from infra.bench.command.batch_decoder import BatchDecoder, BatchToken
from infra.bench.command.llm_serving import Serving, serve_arrivals, serving_figures, stream_beside_prompts
from infra.bench.command.peers import TOKENS, LlamaCpp, Transformers, llama_cpp_python
from weights.loading.views import Tensors, mapped_tensors

Output = Literal["md", "csv", "json", "jsonl"]
_KV_BYTES: Final = 1 << 30
_DECODES: Final = "atelier decode"
_NOT_IN_CSV: Final = ("n_parallel", "n_threads_batch", "samples_ns", "samples_ts")
_MAX_SERVED: Final = 64  # sequences at once, as in a replica
# What llama-bench's switches are where there is no card. Its compare-llama-bench.py wants them all: those of today, and
# `use_mmap`, which was `load_mode` before it had more values.
_SWITCHES: Final = {
    "n_gpu_layers": 0,
    "n_cpu_moe": 0,
    "split_mode": "none",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": False,
    "devices": "none",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "mmap",
    "use_mmap": True,
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
    "fit_target": 0,
    "fit_min_ctx": 0,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A test of llama-bench: a prompt, generated tokens, or (-pg) one after the other, behind `depth` tokens (-d).

    `num_parallel` streams do so at once (-npl of llama-batched-bench).
    """

    n_prompt: int
    n_gen: int
    depth: int = 0
    num_parallel: int = 1

    @property
    def name(self) -> str:
        """Name as llama-bench writes it, such as "pp512" or "tg128 @ d4096"."""
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        depth = f" @ d{self.depth}" if self.depth else ""
        return "+".join(parts) + depth + (f" x {self.num_parallel}" if self.num_parallel > 1 else "")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that a peer is given."""
        return {"n_prompt": self.n_prompt, "n_gen": self.n_gen, "depth": self.depth, "num_parallel": self.num_parallel}


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """llama-bench's settings: -p, -n, -pg, -d, -t, -b, -ub, -r; and llama.cpp's -tb, the threads of prompts."""

    cases: tuple[Case, ...]
    threads: int
    threads_batch: int
    n_batch: int = 2048
    n_ubatch: int = 512
    repetitions: int = 5
    max_prefill_beside_decode: int = 512
    max_decode_delay: float = 2.0
    kv_dtype: KvDtype = "auto"
    decodes: bool = False

    @property
    def context(self) -> int:
        """Tokens of the longest case, and two more."""
        return max(case.depth + case.n_prompt + case.n_gen for case in self.cases) + 2


@dataclass(slots=True)
class _Row:
    backend: str
    case: Case
    samples_ns: list[int] = field(default_factory=list)
    test_time: str = ""


def measure_llm(
    model: Path, settings: BenchSettings, *, peer: bool = True, progress: Callable[[int, int], None] = lambda *_: None
) -> list[dict[str, Any]]:
    """Run every case on ours and on the peer; one row for each. `progress` gets the runs that are done, and all.

    A GGUF file's peer is llama.cpp, where it is installed; that of a folder of safetensors is transformers.
    """
    torch.set_num_threads(settings.threads)
    ours = _Ours(model, settings)
    runs: dict[str, Callable[[Case], int]] = {"atelier": ours.run_case}
    if settings.decodes:
        runs[_DECODES] = _ModelAlone(model, settings).run_case
    rows: list[_Row] = []
    with ExitStack() as stack:
        python = llama_cpp_python() if peer and model.suffix == ".gguf" else None
        if python is not None:
            sizes = {"n_ctx": settings.context, "n_batch": settings.n_batch, "n_ubatch": settings.n_ubatch}
            sizes |= {"threads_batch": settings.threads_batch}
            other = stack.enter_context(LlamaCpp(python, model, threads=settings.threads, **sizes))
            runs["llama.cpp"] = lambda case: int(other.ask("run", **case.sizes)["ns"])
        elif peer and any(model.glob("*.safetensors")):
            stock = Transformers(model)
            runs["transformers"] = lambda case: stock.time_run(**case.sizes)
        num_rounds = settings.repetitions + 1
        for number, case in enumerate(settings.cases):
            turn = [_Row(backend, case) for backend in runs]
            for repetition in range(num_rounds):
                progress(number * num_rounds + repetition, len(settings.cases) * num_rounds)
                for row in turn:
                    ns = runs[row.backend](case)
                    if repetition:  # the first is the warm-up
                        row.samples_ns.append(ns)
            rows += turn
            for row in turn:
                row.test_time = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [_figures(row, ours, settings) for row in rows]


def measure_serving(model: Path, settings: BenchSettings, serving: Serving) -> list[dict[str, Any]]:
    """Serve a load of requests, and a stream beside prompts of their length, on ours; one row of figures for each."""
    torch.set_num_threads(settings.threads)
    engine = _Ours(model, settings, max_num_seqs=_MAX_SERVED).engine
    serve_arrivals(engine, replace(serving, num_requests=1).arrivals())  # the warm-up
    figures = serving_figures(serving, serve_arrivals(engine, serving.arrivals()))
    return [figures, stream_beside_prompts(engine, serving.n_prompt, serving.n_gen)]


class _Ours:
    """Our engine on one checkpoint."""

    def __init__(self, model: Path, settings: BenchSettings, max_num_seqs: int = 1) -> None:
        folder, tensors, self.num_elements = mapped_tensors(model)
        self.model = model
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
        config = LLMEngineConfig(
            max_num_seqs=max(max_num_seqs, *(case.num_parallel for case in settings.cases)),
            max_num_batched_tokens=settings.n_batch,
            max_prefill_beside_decode=settings.max_prefill_beside_decode,
            max_decode_delay=settings.max_decode_delay,
            kv_cache_bytes=_KV_BYTES,
            kv_dtype=settings.kv_dtype,
            prefill_threads=settings.threads_batch,
        )
        self.engine = LLMEngine(folder, tensors, config)
        self._count = 0

    def run_case(self, case: Case) -> int:
        """Return the nanoseconds of one repetition. What lies before it is computed once, and found as a prefix."""
        self._count += 1
        draw = random.Random(self._count)
        before = tuple(draw.choices(TOKENS, k=case.depth))
        if before:
            self._run_requests([(before, 1)])
        prompts = [before + tuple(draw.choices(TOKENS, k=case.n_prompt or 1)) for _ in range(case.num_parallel)]
        num_tokens = case.n_gen + bool(case.n_prompt)  # the prompt's forward gives the first one
        return self._run_requests([(prompt, num_tokens) for prompt in prompts])

    def _run_requests(self, requests: Sequence[tuple[tuple[int, ...], int]]) -> int:
        """Return the nanoseconds that prompts and their numbers of tokens take together."""
        begin = time.perf_counter_ns()
        for i, (prompt, num_tokens) in enumerate(requests):
            params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
            self.engine.add_request(TextRequest(f"bench-{self._count}-{i}", prompt, params))
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter_ns() - begin


class _ModelAlone:
    """Our model on one checkpoint, without scheduler and sampler."""

    def __init__(self, model: Path, settings: BenchSettings) -> None:
        folder, tensors, _ = mapped_tensors(model)
        loaded = create_model(load_config(folder), tensors, torch.device("cpu"))
        most = max(case.num_parallel for case in settings.cases)
        plan = plan_cache(
            loaded.spec,
            loaded.dtype,
            kv_cache_bytes=_KV_BYTES,
            max_num_seqs=most,
            max_model_len=None,
            kv_dtype=settings.kv_dtype,
        )
        self._settings = settings
        self._decoder = BatchDecoder(
            loaded, num_blocks=plan.num_blocks, max_micro_batch=settings.n_ubatch, kv_dtype=settings.kv_dtype
        )

    def run_case(self, case: Case) -> int:
        """Return the nanoseconds of one repetition. What lies before it is in the cache."""
        sequences = range(case.num_parallel)
        draw = random.Random(case.n_prompt)
        for sequence in sequences:
            self._decoder.remove_sequence(sequence)
        self._decode(draw, [0], case.depth)
        for sequence in sequences[1:]:
            self._decoder.copy_sequence(0, sequence)
        begin = time.perf_counter_ns()
        torch.set_num_threads(self._settings.threads_batch)
        self._decode(draw, sequences, case.n_prompt)
        torch.set_num_threads(self._settings.threads)
        for _ in range(case.n_gen):
            self._decode(draw, sequences, 1)
        return time.perf_counter_ns() - begin

    def _decode(self, draw: random.Random, sequences: Sequence[int], count: int) -> None:
        """Append `count` tokens to each of the sequences, with the logits behind the last."""
        batch = [
            BatchToken(draw.choice(TOKENS), self._decoder.num_tokens(sequence) + i, sequence, i == count - 1)
            for sequence in sequences
            for i in range(count)
        ]
        size = self._settings.n_batch
        for begin in range(0, len(batch), size):
            self._decoder.decode(batch[begin : begin + size])


def _figures(row: _Row, ours: _Ours, settings: BenchSettings) -> dict[str, Any]:
    tokens = (row.case.n_prompt + row.case.n_gen) * row.case.num_parallel
    ours_kv = "bf16" if settings.kv_dtype == "auto" else settings.kv_dtype
    kv_type = {"atelier": ours_kv, _DECODES: ours_kv, "llama.cpp": "f16", "transformers": "bf16"}[row.backend]
    speeds = [1e9 * tokens / ns for ns in row.samples_ns]
    values = {
        "build_commit": row.backend,
        "build_number": 0,
        "cpu_info": _processor(),
        "gpu_info": "",
        "backends": "CPU",
        "model_filename": str(ours.model),
        "model_type": "/".join(ours.kinds),
        "model_size": ours.nbytes,
        "model_n_params": ours.num_elements,
        "n_batch": settings.n_batch,
        "n_ubatch": settings.n_ubatch,
        "n_threads": settings.threads,
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": 0,
        "type_k": kv_type,
        "type_v": kv_type,
        **_SWITCHES,
        "n_prompt": row.case.n_prompt,
        "n_gen": row.case.n_gen,
        "n_depth": row.case.depth,
        "test_time": row.test_time,
        "avg_ns": round(statistics.fmean(row.samples_ns)),
        "stddev_ns": round(_deviation(row.samples_ns)),
        "avg_ts": statistics.fmean(speeds),
        "stddev_ts": _deviation(speeds),
    }
    more = {"n_parallel": row.case.num_parallel, "n_threads_batch": settings.threads_batch}
    return values | more | {"samples_ns": row.samples_ns, "samples_ts": speeds}


def _deviation(samples: Sequence[float]) -> float:
    return statistics.stdev(samples) if len(samples) > 1 else 0.0


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def formatted(rows: Sequence[dict[str, Any]], output: Output) -> str:
    """Return the rows as llama-bench prints them."""
    if output == "json":
        return json.dumps(list(rows), indent=2)
    if output == "jsonl":
        return "\n".join(json.dumps(row) for row in rows)
    if output == "csv":
        text = io.StringIO()
        names = [name for name in rows[0] if name not in _NOT_IN_CSV]
        text.write(",".join(names) + "\n")  # llama-bench quotes values alone, and writes 0 and 1 for no and yes
        writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
        for row in rows:
            values = [row[name] for name in names]
            writer.writerow([int(value) if isinstance(value, bool) else value for value in values])
        return text.getvalue().rstrip()
    lines = [
        "| model | size | params | backend | threads | test | t/s |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        nbytes, num_weights = row["model_size"], row["model_n_params"]
        size = f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
        params = f"{num_weights / 1e9:.2f} B" if num_weights >= 1e9 else f"{num_weights / 1e6:.2f} M"
        speed = f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"
        name = Case(row["n_prompt"], row["n_gen"], row["n_depth"], row["n_parallel"]).name
        cells = (Path(row["model_filename"]).stem, size, params, row["build_commit"], row["n_threads"], name, speed)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


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
