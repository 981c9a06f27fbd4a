"""Installation of simulated devices into torch: once per process, and for its life."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from configs.simulated import SimulatedConfig, parse_simulated
from weights.errors import WeightsError
from weights.memory.simulated.kernels import Kernels
from weights.memory.simulated.memory import DeviceMemory
from weights.memory.simulated.module import SimulatedModule

VARIABLE: Final = "ATELIER_SIMULATED"

logger = logging.getLogger("atelier.simulated")


def simulate(config: SimulatedConfig | None = None) -> SimulatedModule:
    """Make torch know the devices `sim:0` to `sim:<n-1>`, and return `torch.sim`.

    `config` None takes what this process simulates already, what the variable ATELIER_SIMULATED says, or the defaults.
    HAZARD: torch is patched for the life of the process. Raises WeightsError when the process simulates other devices
    already, uses CUDA, or has less memory than they would, and for ops that torch does not know.
    """
    installed = cast("SimulatedModule | None", getattr(torch, "sim", None))
    if installed is not None:
        if config is not None and installed.config != config:
            raise WeightsError(f"this process simulates other devices already: {installed.config}, not {config}")
        return installed
    config = check_simulated(config)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise WeightsError("cannot simulate a device in a process that uses CUDA: run it in one of its own")
    memories = [DeviceMemory(i, config.memory_bytes, config.link_gbps * 1e9) for i in range(config.num_devices)]
    return _install(config, memories)


def check_simulated(config: SimulatedConfig | None = None) -> SimulatedConfig:
    """Return the config that a process of this machine would simulate, and leave torch as it is.

    Raises WeightsError for more memory than the machine has, and for ops that torch does not know.
    """
    config = config or _config_of_environment()
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.num_devices * config.memory_bytes > machine_bytes:
        raise WeightsError(
            f"cannot simulate {config.num_devices} devices of {config.memory_bytes} bytes each: this machine has "
            f"{machine_bytes}"
        )
    _check_ops(config)
    return config


def _config_of_environment() -> SimulatedConfig:
    try:
        return parse_simulated(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        raise WeightsError(f"{VARIABLE}: {error}") from None


def _check_ops(config: SimulatedConfig) -> None:
    names = torch._C._dispatch_get_all_op_names()
    known = {*names, *(name.partition(".")[0] for name in names)}
    if unknown := sorted((config.unsupported_ops | config.host_ops) - known):
        raise WeightsError(f"torch has no op {unknown[0]!r}: expected a name of its dispatcher, such as aten::_softmax")


def _install(config: SimulatedConfig, memories: Sequence[DeviceMemory]) -> SimulatedModule:
    module = SimulatedModule(config, memories)
    # Experimental in torch, which is pinned.
    _setup_privateuseone_for_python_backend("sim", backend_module=cast("Any", module))
    kernels = Kernels(memories, config.unsupported_ops, config.host_ops)
    kernels.register()
    _patch_torch(kernels)
    logger.warning(
        "torch is patched in this process: %d simulated device%s of %d bytes, computing on the host",
        config.num_devices,
        "s" if config.num_devices > 1 else "",
        config.memory_bytes,
    )
    return module


def _patch_torch(kernels: Kernels) -> None:
    """Patch how storages are made and how `tensor.data` is set, for the life of the process.

    torch's Python side does both by type of device, and would do them wrong for a simulated one.
    """
    _patch_storage(kernels)
    _patch_data()


def _patch_storage(kernels: Kernels) -> None:
    """Make a storage of the device with memory: torch's own has none, and kills the process when it is touched."""
    plain = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "sim":
            return plain(cls, *args, **kwargs)
        (size,) = args or (0,)
        return kernels.empty_storage(torch.device(device), int(size))

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]


def _patch_data() -> None:
    """Let `tensor.data = other` cross between host and device, as it may for CUDA: the tensor stays the same object."""
    inherited: Any = torch._C.TensorBase.data
    compatible = torch._has_compatible_shallow_copy_type

    def get(self: torch.Tensor) -> torch.Tensor:
        plain: torch.Tensor = inherited.__get__(self)
        return plain

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        if self.device == value.device or "sim" not in (self.device.type, value.device.type):
            inherited.__set__(self, value)
            return
        fresh = value.detach().requires_grad_(self.requires_grad)
        torch._C._swap_tensor_impl(self, fresh)

    def has_compatible_shallow_copy_type(input: torch.Tensor, from_: torch.Tensor) -> bool:
        kinds = {input.device.type, from_.device.type}
        return kinds <= {"cpu", "sim"} or compatible(input, from_)

    torch.Tensor.data = property(get, put)  # type: ignore[assignment]
    torch._has_compatible_shallow_copy_type = has_compatible_shallow_copy_type
