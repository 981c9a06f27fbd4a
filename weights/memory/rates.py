"""Rates of this machine, its link and its host: measured in a few hundredths of a second, and remembered on disk."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from pydantic import TypeAdapter, ValidationError

from weights.memory.block_plan import Rates
from weights.memory.devices import pinned_buffers
from weights.platform.private_folder import cache_folder, recall, remember
from weights.platform.processor import processor_name

_SIDE: Final = 2048  # of a float32 matrix of 16 MiB, more than most caches have
_ROWS: Final = 64
_REPEATS: Final = 3


@functools.cache
def measured_rates(device: torch.device) -> Rates:
    """Return the rates of the link to `device` and of the host, with as many threads as this process has.

    Raises RuntimeError where there is no memory to measure with.
    """
    return _remembered_rates(_rates_key(device), cache_folder() / "rates.json", lambda: _measure(device))


def _rates_key(device: torch.device) -> str:
    """Return the key of rates: the processor, the threads, torch and the device, which they depend on."""
    card = torch.get_device_module(device).get_device_name(device) if device.type == "cuda" else device.type
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} threads"
    return f"{processor_name()}, {threads}, torch {torch.__version__}, {card}"


def _remembered_rates(key: str, file: Path, measure: Callable[[], Rates]) -> Rates:
    """Return the rates of `key` in a JSON file, measured and written there first where it does not have them.

    The file saves time only: what is damaged in it counts as nothing.
    """
    kept = TypeAdapter(dict[str, Rates])
    try:
        known = kept.validate_json(recall(file))
    except ValidationError:
        known = {}
    if key not in known:
        known[key] = measure()
        remember(file, kept.dump_json(known))
    return known[key]


def _measure(device: torch.device) -> Rates:
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
