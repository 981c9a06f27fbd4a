"""The memory of a device that a run takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_of(device: torch.device, run: Callable[[], Any]) -> int:
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    with torch.no_grad():
        run()
    return int(module.max_memory_allocated(device) - before)
