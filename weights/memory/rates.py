"""Rates of this machine, its link and its host: measured once in a process, in a few hundredths of a second."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Final

import torch

from weights.memory.block_plan import Rates
from weights.memory.devices import pinned_buffers

_SIDE: Final = 2048  # of a float32 matrix of 16 MiB, more than most caches have
_ROWS: Final = 64
_REPEATS: Final = 3


@functools.cache
def measured_rates(device: torch.device) -> Rates:
    """Return the rates of the link to `device` and of the host, with as many threads as this process has."""
    weights, rows = torch.ones(_SIDE, _SIDE), torch.ones(_ROWS, _SIDE)
    (pinned,) = pinned_buffers(device, 1, weights.nbytes)
    target = torch.empty(weights.nbytes, dtype=torch.uint8, device=device)

    def upload() -> None:
        target.copy_(pinned)
        torch.get_device_module(device).synchronize()

    return Rates(
        link_bytes_per_s=weights.nbytes / _least_s(upload),
        host_bytes_per_s=weights.nbytes / _least_s(lambda: rows[:1] @ weights),
        host_flops_per_s=2 * weights.numel() * _ROWS / _least_s(lambda: rows @ weights),
    )


def _least_s(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest call: what disturbs one makes it slower."""
    found = []
    for _ in range(_REPEATS):
        begin_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin_s)
    return max(min(found), 1e-9)
