"""The peers of benchmarks, our ends of their processes: stock libraries; llama.cpp, that judges tokens in tests too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch

TOKENS: Final = range(3, 96)  # of which prompts are drawn: every vocabulary has them, the demo's too
_LAST_BYTES: Final = 800  # of a process's errors that are told
_SCRIPT: Final = Path(__file__).with_name("llama_cpp_process.py")


def script_command(python: str | Path, script: Path, *arguments: object) -> list[str]:
    """Return the command of a script that an interpreter runs with its own libraries alone.

    HAZARD: without -P, a file beside the script that has a library's name would be imported in its place.
    """
    return [str(python), "-P", str(script), *map(str, arguments)]


class OrderedProcess:
    """A process that takes orders and answers them, as lines of JSON; it speaks first, `about` itself."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self.about = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, do: str, **order: Any) -> Any:
        """Send an order and return its answer. Raises RuntimeError with its last errors when the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
        self._errors.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _LAST_BYTES))
            last = self._errors.read().decode(errors="replace").strip()
            raise RuntimeError(f"{self._name} ended with code {code}" + (f": {last}" if last else ""))
        return json.loads(line)


class Peer(OrderedProcess):
    """The stock libraries' process. `python -m infra.bench.command.stock 1` shows why it ends, where it does."""

    def __init__(self, num_threads: int) -> None:
        super().__init__("the stock process", [sys.executable, "-m", "infra.bench.command.stock", str(num_threads)])

    def run_order(self, do: str, **order: Any) -> float:
        """Return the milliseconds that the order took inside the peer, without the pipe."""
        return float(self.ask(do, **order)["ms"])


def llama_cpp_python() -> Path | None:
    """Return the interpreter that has llama-cpp-python: ATELIER_LLAMA_CPP_PYTHON, else that of `make judge-llama`."""
    found = Path(os.environ.get("ATELIER_LLAMA_CPP_PYTHON", ".judges/llama_cpp/bin/python"))
    return found if found.is_file() else None


class LlamaCpp(OrderedProcess):
    """A process with one model open. Use it as a context."""

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        threads: int = 1,
        threads_batch: int | None = None,
        n_ctx: int = 512,
        n_batch: int = 2048,
        n_ubatch: int = 512,
    ) -> None:
        numbers = threads, threads_batch or threads, n_ctx, n_batch, n_ubatch
        command = script_command(python, _SCRIPT, model, *numbers)
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        super().__init__("llama.cpp's process", command, kept)


class Transformers:
    """The model of a folder in stock transformers, in this process, with its weights in bfloat16."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def time_run(self, *, n_prompt: int, n_gen: int, depth: int, num_parallel: int) -> int:
        """Return the nanoseconds of a prompt and of the tokens after it, behind `depth` tokens. Tokens are the best."""
        cache = None
        if depth:
            cache = self._forward(_drawn(num_parallel, depth), None).past_key_values
        ids = _drawn(num_parallel, n_prompt or 1)
        begin = time.perf_counter_ns()
        for _ in range(n_gen + bool(n_prompt)):
            out = self._forward(ids, cache)
            cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter_ns() - begin

    def _forward(self, ids: torch.Tensor, cache: Any) -> Any:
        return self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _drawn(num_rows: int, length: int) -> torch.Tensor:
    return torch.randint(TOKENS.start, TOKENS.stop, (num_rows, length))
