"""The machine that a bench runs on, brought into the state of a node that has been up for a while."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import ray

from infra.bench.command.figures import private_bytes, pss_bytes

_QUIET_WAIT_S: Final = 20.0
_BUSY_PERCENT: Final = 15.0


def touch_memory(nbytes: int) -> None:
    """Touch free memory: a virtual machine makes it at the first touch, at a tenth of its speed."""
    nbytes = min(nbytes, int(psutil.virtual_memory().available * 0.7))
    with mmap.mmap(-1, nbytes) as memory:
        for page in range(0, nbytes, mmap.PAGESIZE):
            memory[page] = 1


def wait_for_quiet() -> None:
    """Wait until the processor is idle or the time is over: Ray starts spare workers after one ends."""
    deadline_s = time.monotonic() + _QUIET_WAIT_S
    while psutil.cpu_percent(interval=0.5) > _BUSY_PERCENT and time.monotonic() < deadline_s:
        pass


@contextlib.contextmanager
def private_ray(object_store_bytes: int, *, preallocate: bool = True) -> Iterator[None]:
    """Run a private Ray. `preallocate`: the pages of its object store exist, as on a node that has been up;
    without it only those exist that something was put into."""
    settings = {"preallocate_plasma_memory": int(preallocate), "USAGE_STATS_ENABLED": 0, "worker_niceness": 0}
    os.environ |= {f"RAY_{name}": str(value) for name, value in settings.items()}  # the rest as in the product
    # Ray prints to stdout when a process of it dies, at its end too, and stdout is for figures only.
    with contextlib.redirect_stdout(sys.stderr):
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
        try:
            yield
        finally:
            ray.shutdown()


def own_memory_bytes(pid: int) -> int:
    """Return a process's own memory, without files and shared memory."""
    return private_bytes(Path(f"/proc/{pid}/smaps_rollup").read_text())


def object_store_bytes() -> int:
    """Return the bytes of the object store's pages, over this process and its children: all of this Ray."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            total += pss_bytes(Path(f"/proc/{process.pid}/smaps").read_text(), "plasma")
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return total
