"""`torch.sim`: what code asks of an accelerator's module in torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from configs.simulated import SimulatedConfig
from weights.memory.simulated.memory import DeviceMemory

DeviceLike = torch.device | str | int | None


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
