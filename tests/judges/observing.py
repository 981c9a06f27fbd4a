"""The shared parts of the judges' scripts, which run in environments of their own, look at a server, and judge nothing.

    python script.py HTTP_URL GRPC_ADDRESS FOLDER

FOLDER holds `asked.json`, what to ask. The script writes `<script>.json` there: by name of the observation what was
seen, or what was raised, and the seconds that it took. Arrays go to `.npy` files.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SLOW_S = 30.0  # of one call: whoever takes longer hangs


@dataclass(frozen=True)
class Place:
    """The places of the server, of the question and of the answers."""

    url: str
    grpc: str
    folder: Path

    @property
    def host(self) -> str:
        """The url as tritonclient wants it."""
        return self.url.removeprefix("http://")

    @property
    def asked(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "asked.json").read_text())
        return found

    def keep(self, name: str, array: np.ndarray) -> list[int]:
        """The array goes to a file; its shape is what is observed."""
        np.save(self.folder / f"{name}.npy", array)
        return list(array.shape)


def place() -> Place:
    url, grpc, folder = sys.argv[1:]
    return Place(url, grpc, Path(folder))


def write(where: Place, observations: Iterable[tuple[str, Callable[[], Any]]]) -> None:
    """Makes all of them, whatever happens in one."""
    seen = {name: _made(observation) for name, observation in observations}
    (where.folder / f"{Path(sys.argv[0]).stem}.json").write_text(json.dumps(seen, default=_plain))


def until_denoising(where: Place, condition: Callable[[int], bool]) -> float:
    """Return the seconds until the number of images in work is as wanted."""
    start = time.perf_counter()
    while time.perf_counter() < start + SLOW_S:
        connection = http.client.HTTPConnection(where.host, timeout=SLOW_S)
        connection.request("GET", "/admin/cluster")
        workers = json.loads(connection.getresponse().read())["workers"]
        connection.close()
        if condition(sum(worker["denoising"] for worker in workers)):
            return time.perf_counter() - start
    raise TimeoutError(f"workers are at {workers!r:.300}")


def error_text(call: Callable[[], Any]) -> str:
    """Return the text of the client's own exception, for calls that must be refused."""
    try:
        answer = call()
    except Exception as error:
        return str(error)
    raise AssertionError(f"was not refused, but answered with {answer!r:.200}")


def _made(observation: Callable[[], Any]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        seen = {"value": observation()}
    except Exception as error:
        seen = {"raised": f"{type(error).__name__}: {error}"}
    return seen | {"seconds": round(time.perf_counter() - start, 3)}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
