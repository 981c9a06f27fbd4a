"""Devices: the one place that opens one, draws random numbers for it, and makes the pinned buffers that feed it.

Other code asks `device.type != "cpu"` and `torch.get_device_module(device)`, never for a vendor, unless it means one.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from configs.distribution import DEVICES, optional_parts
from configs.simulated import SimulatedConfig
from weights.records.errors import WeightsError

KNOWN: Final = "cpu, cpu-private, cuda, cuda:<n>, sim, sim:<n>"
_ALLOCATION_BYTES: Final = 512  # what the allocators of CUDA and of simulated devices round up to


def open_device(name: str, simulated: SimulatedConfig | None = None) -> torch.device:
    """Return the device of this name, with its index. "cpu-private" is host memory that copies are made in.

    `sim` simulates an accelerator in this process, as `simulated` or the environment says (`infra.sim`).
    Raises WeightsError for a name that is not known, and for a device that is not here.
    """
    kind, index = _parse_name(name)
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "sim":
        _simulator(name).simulate(simulated)  # only then: it patches torch, for tests and demos
    module = torch.get_device_module(kind)
    count = module.device_count()
    if index is None:
        index = module.current_device() if count else 0
    _check_index(name, index, count)
    if kind == "cuda":  # cuBLAS reads it at its first use; without it, torch does not promise the same sums twice
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(kind, index)


def with_index(device: torch.device) -> torch.device:
    """Return the device by the name that its tensors tell: "cuda" is the current one."""
    index: int | None = device.index  # torch's own annotation lacks None
    if index is not None or device.type in ("cpu", "meta"):
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def check_device(name: str, simulated: SimulatedConfig | None = None) -> None:
    """Raise WeightsError, as `open_device` would in a fresh process of this machine, without opening anything."""
    kind, index = _parse_name(name)
    if kind == "sim":
        _check_index(name, index or 0, _simulator(name).check_simulated(simulated).num_devices)
    elif kind == "cuda":
        _check_index(name, index or 0, torch.cuda.device_count())


def _simulator(name: str) -> Any:
    """Return the module that simulates devices. Raises WeightsError where it is not installed."""
    try:
        return optional_parts(DEVICES)["sim"]
    except KeyError:
        raise WeightsError(f"no device {name!r}: the simulated accelerator is not installed") from None


def _parse_name(name: str) -> tuple[str, int | None]:
    """Return the kind of a device and its index, if it has one. Raises WeightsError for a name that is not known."""
    if name in ("cpu", "cpu-private"):
        return "cpu", None
    kind, colon, number = name.partition(":")
    if kind not in ("cuda", "sim") or (colon and not (number.isdecimal() and number.isascii())):
        raise WeightsError(f"no device {name!r} (known: {KNOWN})")
    return kind, int(number) if colon else None


def _check_index(name: str, index: int, count: int) -> None:
    if index >= count:
        kind = "simulated" if name.startswith("sim") else "CUDA"
        raise WeightsError(f"no device {name!r}: {count} {kind} devices here")


def allocated_bytes(device: torch.device, nbytes: int) -> int:
    """Return the bytes of the device's memory that a tensor of `nbytes` bytes takes."""
    return nbytes if device.type == "cpu" else -(-nbytes // _ALLOCATION_BYTES) * _ALLOCATION_BYTES


def computes_on_host(device: torch.device) -> bool:
    """Return whether the host's kernels compute there, and round as they do."""
    return device.type in ("cpu", "sim")


def host_generator(seed: int) -> torch.Generator:
    """Return a random stream of this seed: the host's, so that a seed means the same on all devices."""
    return torch.Generator("cpu").manual_seed(seed)


def pinned_buffers(device: torch.device, count: int, nbytes: int) -> list[torch.Tensor]:
    """Return host memory that the device's copy engines read directly: 1-D uint8. Only CUDA wants it locked."""
    return [torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(count)]
