"""Transfers to a device, as one JSON: the pinned peak, a whole switch, a switch to a sibling, and `Module.to`.

The weights are those of a FLUX-class transformer by number and size of tensors: few large ones, many small ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from weights.memory.device_arena import DeviceArena
from weights.memory.devices import allocated_bytes, open_device, pinned_buffers

ROUNDS: Final = 5
SIBLING_SHARE: Final = 8  # every so many-th tensor differs in the sibling
MIB: Final = 2**20


class Key(NamedTuple):
    """The identity of a tensor on a device."""

    sha256: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


Tensors = dict[str, torch.Tensor]


def flux_class_tensors(nbytes: int) -> Tensors:
    """Return bf16 tensors of about `nbytes` bytes: per block four matrices, their biases and two norms."""
    width = max(64, int((nbytes / 2 / 57 / 16) ** 0.5) // 64 * 64)
    tensors: Tensors = {}
    for block in range(57):
        for name, rows in (("qkv", 3), ("out", 1), ("up", 8), ("down", 4)):
            tensors[f"{block}.{name}.weight"] = torch.full((rows * width, width), block / 64, dtype=torch.bfloat16)
            tensors[f"{block}.{name}.bias"] = torch.zeros(rows * width, dtype=torch.bfloat16)
        tensors |= {f"{block}.norm{n}": torch.ones(128, dtype=torch.bfloat16) for n in range(2)}
    return tensors


def keys_of(tensors: Tensors, model: str, own: set[str]) -> dict[str, Key]:
    """Name tensors by what they are: those in `own` are of this model alone."""
    return {
        name: Key(f"{model if name in own else 'base'}/{name}", tensor.nbytes, "BF16", tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of `work`, the device's own included; the first round is not counted."""
    module = torch.get_device_module(device)
    seconds = []
    for _ in range(ROUNDS + 1):
        module.synchronize(device)
        start = time.perf_counter()
        kept = work()
        module.synchronize(device)
        seconds.append(time.perf_counter() - start)
        del kept
        gc.collect()
    return statistics.median(seconds[1:])


def measure_peak_gbps(device: torch.device, nbytes: int = 256 * MIB) -> float:
    """Copy from memory that is pinned already: what the link gives."""
    (pinned,) = pinned_buffers(device, 1, nbytes)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return nbytes / timed(lambda: target.copy_(pinned, non_blocking=True), device) / 1e9


def measure_arena(tensors: Tensors, device: torch.device) -> dict[str, float]:
    """Upload a whole model, then its sibling where no more than one has room, and back."""
    different = {name for number, name in enumerate(tensors) if number % SIBLING_SHARE == 0}
    base, sibling = keys_of(tensors, "base", set()), keys_of(tensors, "sibling", different)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    different_bytes = sum(tensors[name].nbytes for name in different)
    arena = DeviceArena(str(device), int(nbytes * 1.1) + different_bytes)
    turn = [0]

    def switch(keys: dict[str, Key]) -> int:
        turn[0] += 1
        tensors_there, report = arena.acquire(keys, tensors, f"h{turn[0]}")
        del tensors_there
        arena.release([key.sha256 for key in keys.values()], f"h{turn[0]}")
        return report.moved_bytes

    def whole() -> None:
        arena.resize(0)
        arena.resize(int(nbytes * 1.1) + different_bytes)
        assert switch(base) == nbytes

    whole_s = timed(whole, device)
    arena.resize(sum(allocated_bytes(device, tensor.nbytes) for tensor in tensors.values()))  # no room for both
    moved = [0, 0]

    def there_and_back() -> None:
        moved[:] = switch(sibling), switch(base)

    both_s = timed(there_and_back, device)
    return {
        "nbytes": nbytes,
        "num_tensors": len(tensors),
        "whole_s": whole_s,
        "whole_gbps": nbytes / whole_s / 1e9,
        "different_bytes": different_bytes,
        "sibling_moved_bytes": moved[0],
        "sibling_s": both_s / 2,
    }


def measure_module_to(tensors: Tensors, device: torch.device) -> float:
    """Move a module with these parameters to the device, and drop it there; returns seconds."""

    def move() -> nn.Module:
        module = nn.Module()
        for name, tensor in tensors.items():
            module.register_parameter(name.replace(".", "_"), nn.Parameter(tensor, requires_grad=False))
        return module.to(device)

    return timed(move, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gigabytes", type=float, default=30.0)
    parser.add_argument("--tests", type=int, default=0, help="exit code of the device tests, for the record")
    parser.add_argument("--out", type=Path, default=Path("out/gpu.json"))
    options = parser.parse_args()
    device = open_device(options.device)
    module = torch.get_device_module(device)
    _, total_bytes = module.mem_get_info(device)
    nbytes = int(min(options.gigabytes * 1e9, total_bytes * 0.4))
    tensors = flux_class_tensors(nbytes)
    found: dict[str, Any] = {
        "device": str(device),
        "name": module.get_device_name(device) if device.type == "cuda" else "simulated",
        "torch": torch.__version__,
        "tests_exit_code": options.tests,
        "pinned_peak_gbps": measure_peak_gbps(device, min(256 * MIB, total_bytes // 8)),
        "arena": measure_arena(tensors, device),
    }
    found["module_to_s"] = measure_module_to(tensors, device)
    found["share_of_peak"] = found["arena"]["whole_gbps"] / found["pinned_peak_gbps"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
