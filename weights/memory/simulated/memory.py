"""The memories and links of simulated devices: what is allocated on each, and what went over its link."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import torch

__all__ = ["STEP_BYTES", "Block", "DeviceMemory"]

STEP_BYTES: Final = 512  # what CUDA's allocator rounds up to
_FIRST_ADDRESS: Final = 1 << 44  # of no process's memory: whoever follows a pointer dies at once
_ADDRESSES_PER_DEVICE: Final = 1 << 42


class DeviceMemory:
    """The memory of one simulated device, and the link to it. Thread-safe.

    HAZARD: blocks end whenever Python lets go of them, also in the middle of one of these methods. They only note
    their bytes, and the next one who looks counts them.
    """

    def __init__(self, index: int, total_bytes: int, link_bytes_per_s: float) -> None:
        self.index = index
        self.total_bytes = total_bytes
        self.uploaded_bytes = 0
        self.downloaded_bytes = 0
        self.num_transfers = 0
        self.blanks: dict[tuple[torch.dtype, bool], torch.Tensor] = {}  # by type, and whether of inference mode
        self._link_bytes_per_s = link_bytes_per_s
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()
        self._used_bytes = 0
        self._peak_bytes = 0
        self._address = _FIRST_ADDRESS + index * _ADDRESSES_PER_DEVICE

    @property
    def device(self) -> torch.device:
        return torch.device("sim", self.index)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._count_freed()

    @property
    def peak_bytes(self) -> int:
        with self._lock:
            return self._peak_bytes

    @property
    def link_s(self) -> float:
        """Seconds that the link was busy, had it moved one transfer after the other."""
        return (self.uploaded_bytes + self.downloaded_bytes) / self._link_bytes_per_s

    def reset_peak(self) -> None:
        """Begin to look for the peak anew."""
        with self._lock:
            self._peak_bytes = self._count_freed()

    def reset_link(self) -> None:
        """Begin to count the link's bytes and seconds anew."""
        with self._lock:
            self.uploaded_bytes = self.downloaded_bytes = self.num_transfers = 0

    def charge(self, nbytes: int) -> tuple[int, int]:
        """Take memory for `nbytes` bytes; returns an address, and the bytes that it took. Raises OutOfMemoryError."""
        charged = -(-nbytes // STEP_BYTES) * STEP_BYTES
        with self._lock:
            used = self._count_freed() + charged
            if used > self.total_bytes:
                raise torch.OutOfMemoryError(
                    f"sim:{self.index} out of memory. Tried to allocate {charged} bytes: of {self.total_bytes}, "
                    f"{used - charged} are in use"
                )
            self._used_bytes = used
            self._peak_bytes = max(self._peak_bytes, used)
            address = self._address
            self._address += max(charged, STEP_BYTES)
        return address, charged

    def note_free(self, charged: int) -> None:
        """Give memory back. Takes no lock."""
        self._freed.append(charged)

    def count_transfer(self, nbytes: int, *, is_upload: bool) -> None:
        """Count a copy over the link."""
        with self._lock:
            self.num_transfers += 1
            if is_upload:
                self.uploaded_bytes += nbytes
            else:
                self.downloaded_bytes += nbytes

    def _count_freed(self) -> int:
        while self._freed:
            self._used_bytes -= self._freed.popleft()
        return self._used_bytes


class Block:
    """Memory of a simulated device: the bytes themselves, in host memory. Lives as long as the storage it is for."""

    __slots__ = ("_charged", "_typed", "address", "memory", "storage")

    def __init__(self, memory: DeviceMemory, storage: torch.UntypedStorage) -> None:
        """`storage` is what holds the bytes on the host. Raises OutOfMemoryError."""
        self._charged = 0
        self.address, self._charged = memory.charge(storage.nbytes())
        self.memory = memory
        self.storage = storage
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all its bytes as a 1-D host tensor of this type."""
        base = self._typed.get(dtype)
        if base is None:
            with torch.inference_mode(False):  # who made it may be in inference mode, who needs it next may not
                base = torch.empty(0, dtype=dtype).set_(self.storage)
            self._typed[dtype] = base
        return base

    def __del__(self) -> None:
        if self._charged:
            self.memory.note_free(self._charged)
