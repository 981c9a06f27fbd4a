"""Our end of llama.cpp's process: the peer of `atelier bench llm`, and the judge of tokens in tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_SCRIPT: Final = Path(__file__).with_name("llama_cpp_process.py")


def llama_cpp_python() -> Path | None:
    """Return the interpreter that has llama-cpp-python: ATELIER_LLAMA_CPP_PYTHON, else that of `make judge-llama`."""
    found = Path(os.environ.get("ATELIER_LLAMA_CPP_PYTHON", ".judges/llama_cpp/bin/python"))
    return found if found.is_file() else None


class LlamaCpp:
    """A process with one model open. Use it as a context."""

    def __init__(
        self, python: Path, model: Path, *, threads: int = 1, n_ctx: int = 512, n_batch: int = 2048, n_ubatch: int = 512
    ) -> None:
        command = [str(python), str(_SCRIPT), str(model), *map(str, (threads, n_ctx, n_batch, n_ubatch))]
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=kept
        )
        self.about = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, do: str, **order: Any) -> Any:
        """Send an order and return its answer. Raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp's process ended with code {self._process.wait()}")
        return json.loads(line)
