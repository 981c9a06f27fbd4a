"""The records of this user's clusters: a small file lets `atelier down` and `atelier status` find the process of an
`atelier up`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import psutil

from cluster.process.processes import is_alive
from cluster.records.errors import SessionError
from cluster.start.ray_folders import own_folder
from configs.cluster import ClusterConfig
from weights.platform.private_folder import private_folder, temporary_folder

_STOP_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A running `atelier up`: its process and where it listens. `started` guards against a reused `pid`.

    `lacking` says which models could not be used when it was `ready`, "" where all could. `ray` is the address of its
    private Ray, "" before it is there and for a Ray of others. `digest` is that of its present config.
    """

    name: str
    pid: int
    started: float
    url: str
    config: str
    ready: bool = False
    lacking: str = ""
    ray: str = ""
    digest: str = ""

    @property
    def alive(self) -> bool:
        """Return whether that very process runs."""
        try:
            process = psutil.Process(int(self.pid))  # a damaged record may hold anything
            return process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def config_digest(config: ClusterConfig) -> str:
    """Return a digest of all values of a config, its defaults included."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


def record_folder() -> Path:
    """Return the user's private folder of session records, created if need be.

    It is $XDG_RUNTIME_DIR/atelier, or a folder in the temporary directory. Raises SessionError when another user could
    write there, who could then choose the processes that `atelier down` ends.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    try:
        return private_folder(Path(base) / "atelier" if base else temporary_folder())
    except OSError as error:
        raise SessionError(str(error)) from None


def running_sessions(folder: Path) -> list[SessionRecord]:
    """Return the user's clusters that are up on this machine, and remove the records of dead processes."""
    sessions = []
    for file in sorted(folder.glob("*.json")):
        try:
            record = SessionRecord(**json.loads(file.read_text()))
            alive = record.alive
        except FileNotFoundError:
            continue  # its process ended just now
        except (ValueError, TypeError):
            alive = False
        if alive:
            sessions.append(record)
        else:
            file.unlink(missing_ok=True)
    return sessions


class SessionFile:
    """The record file of this process's cluster. It exists for the length of a `with` block."""

    def __init__(self, config: ClusterConfig, url: str, config_path: str, folder: Path) -> None:
        started = psutil.Process().create_time()
        digest = config_digest(config)
        self._record = SessionRecord(config.name, os.getpid(), started, url, config_path, digest=digest)
        self._file = folder / f"{config.name}.json"

    def __enter__(self) -> Self:
        self._write(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)

    def note_ray(self) -> None:
        """Record where its private Ray, which is up now, has its files, for who joins it."""
        self._record = replace(self._record, ray=own_folder(self._record.name) or "")
        self._write(self._record)

    def mark_ready(self, lacking: str = "") -> None:
        """Record that the cluster answers requests, and what it lacks."""
        self._write(replace(self._record, ready=True, lacking=lacking))

    def _write(self, record: SessionRecord) -> None:
        _write_record(self._file, record)


def note_applied(folder: Path, before: ClusterConfig, after: ClusterConfig) -> None:
    """Record the new config of a running cluster. A cluster of that name with another config is on another Ray."""
    for record in running_sessions(folder):
        if (record.name, record.digest) == (before.name, config_digest(before)):
            _write_record(folder / f"{record.name}.json", replace(record, digest=config_digest(after)))


def _write_record(file: Path, record: SessionRecord) -> None:
    staged = file.with_suffix(f".{os.getpid()}.tmp")
    staged.write_text(json.dumps(asdict(record)))
    staged.replace(file)


def stop_session(record: SessionRecord, timeout_s: float = _STOP_TIMEOUT_S) -> None:
    """End an `atelier up` and all its processes: terminate them, then kill those that remain after `timeout_s`.

    Raises SessionError when a process survives that.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(record.pid), *psutil.Process(record.pid).children(recursive=True)]
        os.kill(record.pid, signal.SIGTERM)
        for process in _left_of(family, timeout_s):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if remaining := _left_of(family, _KILL_TIMEOUT_S):
            raise SessionError(f"processes that would not end: {', '.join(str(p.pid) for p in remaining)}")


def _left_of(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until the processes have ended, and return those that have not in that time.

    One that has ended and that nobody reaps, as below a container's PID 1, counts as ended.
    """
    end_s = time.monotonic() + timeout_s
    while (left := [process for process in processes if is_alive(process)]) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    return left
