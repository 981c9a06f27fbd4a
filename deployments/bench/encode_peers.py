"""The peers of `atelier bench encode`: infinity-emb in an environment of its own, and a load per request."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

import httpx

INFINITY: Final = "0.0.78"
START_TIMEOUT_S: Final = 120.0
INSTALL_TIMEOUT_S: Final = 900.0


def infinity_environment(cache: Path) -> Path:
    """Return the folder of a virtual environment with infinity-emb and our torch; made on first use, in minutes.

    Raises RuntimeError with pip's last words.
    """
    torch = version("torch")
    folder = cache / f"infinity-{INFINITY}-torch-{torch}-{sys.version_info.major}.{sys.version_info.minor}"
    if not (folder / "complete").exists():
        requirements = [f"infinity-emb[server,torch]=={INFINITY}", f"torch=={torch}"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(folder / "bin/pip"), "install", "--quiet", *requirements],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        (folder / "complete").touch()
    return folder


@contextlib.contextmanager
def infinity_server(environment: Path, models: Mapping[str, Path], num_threads: int) -> Iterator[str]:
    """Run one process that serves `models`, for the length of the block; its URL. Raises RuntimeError with its log.

    Default settings but for what is not installed with it (BetterTransformer).
    """
    port = free_port()
    options = [
        option for name, folder in models.items() for option in ("--model-id", str(folder), "--served-model-name", name)
    ]
    switches = ["--engine", "torch", "--device", "cpu", "--dtype", "float32", "--no-bettertransformer"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--url-prefix", "/v1"]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(environment / "bin/infinity_emb"), "v2", *options, *switches, *where],
            env=os.environ | threads | offline,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            if not _answers(f"http://127.0.0.1:{port}", list(models), process):
                log.seek(0)
                raise RuntimeError(f"infinity-emb did not start: {log.read().decode(errors='replace')[-1000:]}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def reload_ms(folder: Path, texts: Sequence[str], num_threads: int) -> list[float]:
    """Return milliseconds per text when each request loads the encoder for itself, in a process of its own."""
    command = [sys.executable, "-m", "deployments.bench.encode_reload", str(folder), str(num_threads)]
    done = subprocess.run(command, input=json.dumps(list(texts)), capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str, models: Sequence[str], process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            bodies = [{"model": model, "input": ["ready?"]} for model in models]
            if all(httpx.post(f"{url}/v1/embeddings", json=body, timeout=10).is_success for body in bodies):
                return True
        time.sleep(0.3)
    return False
