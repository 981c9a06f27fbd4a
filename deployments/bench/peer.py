"""The driver's end of the stock process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


class Peer:
    """The stock process."""

    def __init__(self, num_threads: int) -> None:
        command = [sys.executable, "-m", "deployments.bench.stock", str(num_threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()

    def run_order(self, do: str, **order: Any) -> float:
        """Return the milliseconds that the order took inside the peer, without the pipe."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()
        return float(self._read()["ms"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the stock process ended; run `python -m deployments.bench.stock 1` to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer
