"""The resources of a running cluster: memory, threads, files, logs, its store, and the time of its answers."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from soak.asking import Asker, Question, probes
from soak.verdicts import MACHINE, Figure, middle, percentile

from cluster.ray_seam.loopback import ray_on_loopback
from infra.bench.idle import short_name

NUM_SAMPLES: Final = 3
SHM: Final = Path("/dev/shm")
SPARE_WORKER: Final = "IDLE"  # Ray keeps one for each of its CPUs where a command has joined it


class Meter:
    """Looks at all processes of this namespace but those that are not the cluster's, and at its folders."""

    def __init__(self, url: str, store: Path, tmp: Path, gcs_address: str, is_judging_times: bool) -> None:
        self._url, self._store, self._tmp = url, store, tmp
        self._logs = (tmp / "ray" / "session_latest" / "logs").resolve(strict=True)
        with ray_on_loopback():
            self._state: Any = get_state_from_address(gcs_address)
            self._state.node_table()
        self._is_judging_times = is_judging_times

    def log_bytes(self) -> int:
        return folder_size(self._logs)[1]

    def calm_figures(
        self, asked: Sequence[Question], answers: Mapping[int, np.ndarray], length_s: float
    ) -> dict[str, Figure]:
        """Ask the same questions for a while, one after the other, and return what that took and what is left."""
        log_bytes = self.log_bytes()
        times = self._times(asked, answers, 0.7 * length_s)
        number = sum(map(len, times.values()))
        figures = {"log per request": Figure((self.log_bytes() - log_bytes) / number, "B")}
        for kind, values in times.items():
            judged = self._is_judging_times and kind != MACHINE
            for share in (0.5, 0.95):
                figures[f"{kind} p{share * 100:.0f}"] = Figure(percentile(values, share) * 1e3, "ms", judged)
        samples = []
        for _ in range(NUM_SAMPLES):
            time.sleep(0.3 * length_s / NUM_SAMPLES)
            samples.append(self.sample())
        return figures | middle(samples)

    def _times(
        self, asked: Sequence[Question], answers: Mapping[int, np.ndarray], length_s: float
    ) -> dict[str, list[float]]:
        """Return the times of requests by kind, and of a sum in this process between them, which the machine takes."""
        times, asker, end_s = defaultdict[str, list[float]](list), Asker(self._url), time.monotonic() + length_s
        for one in probes(asked, answers):
            start_s = time.monotonic()
            if start_s > end_s:
                break
            asker.ask(one)
            asked_s = time.monotonic()
            sum(itertools.repeat(1, 200_000))
            times[one.kind].append(asked_s - start_s)
            times[MACHINE].append(time.monotonic() - asked_s)
        asker.close()
        return times

    def sample(self) -> dict[str, Figure]:
        """Return the resources in use at this moment."""
        return self._processes() | self._places()

    def _processes(self) -> dict[str, Figure]:
        own = {1, os.getpid(), os.getppid()}
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError, KeyError):
                if process.pid in own:
                    continue
                name = short_name(process.cmdline()) or process.name()
                found = [1.0, process.num_threads(), process.num_fds(), _private_bytes(process.pid)]
                for key in ("all", name) if name != SPARE_WORKER else (name,):
                    totals[key] = [*map(sum, zip(totals[key], found, strict=True))]
        figures = {}
        for name, values in totals.items():
            for what, unit, value in zip(
                ("processes", "threads", "open files", "private memory"),
                ("processes", "threads", "files", "bytes"),
                values,
                strict=True,
            ):
                figures[f"{what}, {name}"] = Figure(value, unit, name == "all" and what != "processes")
        return figures

    def _places(self) -> dict[str, Figure]:
        stats = os.statvfs(SHM)
        reply: Any = get_memory_info_reply(self._state)
        store_files, store_bytes = folder_size(self._store)
        tmp_files, tmp_bytes = folder_size(self._tmp, but=self._tmp / "ray")
        index = sum(path.stat().st_size for path in self._store.glob("index.sqlite*"))
        return {
            "/dev/shm": Figure((stats.f_blocks - stats.f_bfree) * stats.f_frsize, "bytes"),
            "/dev/shm, files": Figure(float(len(os.listdir(SHM))), "files"),
            "object store": Figure(float(reply.store_stats.object_store_bytes_used), "bytes"),
            "objects": Figure(float(reply.store_stats.num_local_objects), "files", is_judged=False),
            "index": Figure(float(index), "bytes"),
            "store": Figure(float(store_bytes), "bytes"),
            "store, files": Figure(float(store_files), "files"),
            "temporary": Figure(float(tmp_bytes), "bytes"),
            "temporary, files": Figure(float(tmp_files), "files"),
        }


def folder_size(folder: Path, but: Path | None = None) -> tuple[int, int]:
    """Return the number of files below a folder, `but` left out, and their bytes."""
    number = size = 0
    for path, _, names in os.walk(folder):
        if but and Path(path).is_relative_to(but):
            continue
        for name in names:
            with contextlib.suppress(OSError):  # it has just gone
                number, size = number + 1, size + Path(path, name).lstat().st_size
    return number, size


def _private_bytes(pid: int) -> int:
    """Return the memory that is no file's and nobody else's; what processes have copied of each other is divided."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    raise KeyError("Pss_Anon")
