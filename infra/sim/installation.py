"""Installation of simulated devices into torch, as `torch.sim`: once per process, and for its life."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Final, cast

import torch

from configs.simulated import SimulatedConfig, parse_simulated
from infra.sim.kernels import SimulatedKernels
from infra.sim.memory import DeviceMemory
from weights.platform.torch_seam import op_names, patch_data, patch_storages, register_device
from weights.records.errors import WeightsError

VARIABLE: Final = "ATELIER_SIMULATED"

logger = logging.getLogger("atelier.simulated")
DeviceLike = torch.device | str | int | None


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
    names = op_names()
    known = {*names, *(name.partition(".")[0] for name in names)}
    if unknown := sorted((config.unsupported_ops | config.host_ops) - known):
        raise WeightsError(f"torch has no op {unknown[0]!r}: expected a name of its dispatcher, such as aten::_softmax")


def _install(config: SimulatedConfig, memories: Sequence[DeviceMemory]) -> SimulatedModule:
    module = SimulatedModule(config, memories)
    register_device("sim", module)
    kernels = SimulatedKernels(memories, config.unsupported_ops, config.host_ops)
    kernels.register()
    # torch's Python side does both by type of device, and would do them wrong for a simulated one.
    patch_storages("sim", kernels.empty_storage)
    patch_data("sim")
    logger.warning(
        "torch is patched in this process: %d simulated device%s of %d bytes, computing on the host",
        config.num_devices,
        "s" if config.num_devices > 1 else "",
        config.memory_bytes,
    )
    return module


class SimulatedModule(ModuleType):
    """`torch.sim`: memory, the link, and stubs of streams and events, since every op is done when it returns."""

    def __init__(self, config: SimulatedConfig, memories: Sequence[DeviceMemory]) -> None:
        super().__init__("torch.sim", self.__doc__)
        self.config = config
        self._memories = memories
        self.Stream: type[Stream] = Stream
        self.Event: type[Event] = Event

    # what torch itself asks

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self._memories)

    def current_device(self) -> int:
        """Return 0: the current device never changes, so name another one where it is meant."""
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers are drawn by the host's generators."""

    manual_seed = manual_seed_all

    def get_rng_state(self, device: DeviceLike = None) -> torch.Tensor:
        """Return the state of the host's generator, which draws for all devices."""
        self.memory_of(device)
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: DeviceLike = None) -> None:
        """Set the state of the host's generator, as `torch.random.fork_rng` does for each device."""
        self.memory_of(device)
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types that `torch.autocast` may be asked for."""
        return [torch.float16, torch.bfloat16]

    # memory

    def memory_of(self, device: DeviceLike = None) -> DeviceMemory:
        """Return the memory of a device, with what went over its link. Raises RuntimeError for an unknown one."""
        given = torch.device("sim", device) if isinstance(device, int) else torch.device(device or "sim")
        index = given.index or 0
        if given.type != "sim" or index >= len(self._memories):
            raise RuntimeError(f"no device {given}: {len(self._memories)} simulated devices here")
        return self._memories[index]

    def memory_allocated(self, device: DeviceLike = None) -> int:
        """Return the bytes of all tensors on the device, in steps of 512."""
        return self.memory_of(device).used_bytes

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: DeviceLike = None) -> int:
        """Return the most that `memory_allocated` has been since the start, or since it was reset."""
        return self.memory_of(device).peak_bytes

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: DeviceLike = None) -> None:
        """Begin to look for the peak anew."""
        self.memory_of(device).reset_peak()

    def mem_get_info(self, device: DeviceLike = None) -> tuple[int, int]:
        """Return free and total bytes."""
        memory = self.memory_of(device)
        return memory.total_bytes - memory.used_bytes, memory.total_bytes

    def empty_cache(self) -> None:
        """Do nothing: memory is free as soon as its last tensor is gone."""

    # streams

    def synchronize(self, device: DeviceLike = None) -> None:
        """Check the device; nothing is under way."""
        self.memory_of(device)

    def current_stream(self, device: DeviceLike = None) -> Stream:
        return Stream(device)

    default_stream = current_stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Do nothing: there is one order of all work."""
        yield


class Stream:
    """A stub of a stream: all work is done when its call returns."""

    def __init__(self, device: DeviceLike = None, priority: int = 0) -> None:
        self.device = torch.device(device) if isinstance(device, str) else device

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class Event:
    """A stub of an event: it has always been reached."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...
