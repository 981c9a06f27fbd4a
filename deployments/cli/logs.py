"""The logs of `atelier up --detach`: kept over starts and reboots, the oldest removed."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from cluster.errors import SessionError
from weights.private_folder import private_folder, state_folder

app = typer.Typer()

KEPT: Final = 5  # earlier starts of a cluster
RAY_LOGS: Final = Path("/tmp/ray/session_latest/logs")  # noqa: S108  # Ray's own place
_POLL_S: Final = 0.2
_CHUNK_BYTES: Final = 2**16


def _log_file(name: str, folder: Path | None = None) -> Path:
    """Return the log of a cluster's newest start. Raises SessionError when others could write there."""
    try:
        return private_folder(folder or state_folder()) / f"{name}.log"
    except OSError as error:
        raise SessionError(f"no place for logs: {error}") from None


def begin_log(name: str, folder: Path | None = None) -> Path:
    """Return the path of a log that is not there yet; those of earlier starts are numbered, and `KEPT` are kept."""
    log = _log_file(name, folder)
    for number in range(KEPT, 0, -1):
        before = log if number == 1 else _earlier(log, number - 1)
        if before.exists():
            before.replace(_earlier(log, number))
    return log


def _earlier(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def _known_logs(folder: Path | None = None) -> list[str]:
    """Return the names of the clusters that have a log, the last one to write first."""
    found = sorted((folder or state_folder()).glob("*.log"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.stem for file in found]


def read_on(log: Path, pause_s: float = _POLL_S) -> Iterator[str]:
    """Yield what the log has, then what comes, also after another start has begun a new file. Never ends."""
    file = log.open(errors="replace")
    while True:
        while text := file.read(_CHUNK_BYTES):
            yield text
        time.sleep(pause_s)
        if log.exists() and not os.path.samestat(os.fstat(file.fileno()), log.stat()):
            file.close()
            file = log.open(errors="replace")


@app.command()
def logs(
    name: Annotated[str | None, typer.Argument(help="Cluster name; default: the one that wrote last.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    earlier: Annotated[int, typer.Option(min=0, max=KEPT, help="How many starts ago.")] = 0,
) -> None:
    """Print the log of a cluster that was started with `atelier up --detach`."""
    known = _known_logs()
    if name is None and known:
        name = known[0]
    if name is None or not re.fullmatch(r"[\w.-]+", name) or name not in known:
        there = f"there are logs of {', '.join(known[:20])}" if known else "`atelier up --detach` writes one"
        raise SessionError(f"no log of cluster {name!r}: {there}" if name else f"no log: {there}")
    log = _log_file(name)
    if earlier:
        log = _earlier(log, earlier)
        if not log.exists():
            raise SessionError(f"no log of {earlier} starts ago: {log} is not there")
    typer.echo(f"{log}; of Ray's processes: {RAY_LOGS}", err=True)
    if follow and not earlier:
        for text in read_on(log):
            sys.stdout.write(text)
            sys.stdout.flush()
    with log.open(errors="replace") as file:
        while text := file.read(_CHUNK_BYTES):
            sys.stdout.write(text)
