"""The memories and links of simulated devices: what is allocated on each, and what went over its link.

A tensor of such a device lies over a block of its memory, whose bytes are a host tensor's.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any, Final, cast

import torch
from torch.utils import dlpack

from weights.platform.torch_seam import host_keys, storage_with_address

__all__ = [
    "HOST",
    "STEP_BYTES",
    "DeviceMemory",
    "SimulatedBlock",
    "adopt",
    "block_of",
    "host_alias",
    "lay_over",
    "storage_over",
    "tensor_over",
]

HOST: Final[Any] = host_keys()
STEP_BYTES: Final = 512  # what CUDA's allocator rounds up to
_FIRST_ADDRESS: Final = 1 << 44  # of no process's memory: whoever follows a pointer dies at once
_ADDRESSES_PER_DEVICE: Final = 1 << 42
_as_strided: Final[Any] = torch.ops.aten.as_strided.default
_set_storage: Final[Any] = torch.ops.aten.set_.source_Storage_storage_offset
_view_type: Final[Any] = torch.ops.aten.view.dtype


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
        self.copied_s = 0.0
        self.computed_s = 0.0
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
        """Largest number of bytes that were in use at once since the last reset."""
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
        """Begin to count the bytes of the link, and the seconds of copies and kernels, anew."""
        with self._lock:
            self.uploaded_bytes = self.downloaded_bytes = self.num_transfers = 0
            self.copied_s = self.computed_s = 0.0

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

    def count_kernel(self, seconds: float) -> None:
        """Count the processor time that the host took for a kernel of the device, in `computed_s`."""
        with self._lock:
            self.computed_s += seconds

    def count_transfer(self, nbytes: int, *, is_upload: bool, copy_s: float = 0.0) -> None:
        """Count a copy over the link, and the processor time that the host took for it, in `copied_s`."""
        with self._lock:
            self.num_transfers += 1
            self.copied_s += copy_s
            if is_upload:
                self.uploaded_bytes += nbytes
            else:
                self.downloaded_bytes += nbytes

    def _count_freed(self) -> int:
        while self._freed:
            self._used_bytes -= self._freed.popleft()
        return self._used_bytes


class SimulatedBlock:
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


def block_of(tensor: torch.Tensor) -> SimulatedBlock:
    """Return the memory of a simulated tensor. Raises RuntimeError for one that torch made behind our back."""
    storage: Any = tensor.untyped_storage()
    try:
        block: SimulatedBlock = storage._simulated
    except AttributeError:
        raise RuntimeError(f"a tensor on {tensor.device} has no memory: the simulated device did not make it") from None
    return block


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor over the bytes of a simulated one. HAZARD: only below autograd."""
    base = block_of(tensor).typed(tensor.dtype)
    return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def storage_over(memory: DeviceMemory, host: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage on the device that has its bytes in `host`, and nobody else's. Raises OutOfMemoryError."""
    block = SimulatedBlock(memory, host)
    # The pointer is never followed. The attribute lives exactly as long as torch's own storage does.
    storage: Any = storage_with_address(block.address, memory.device, host.nbytes())
    storage._simulated = block
    return cast("torch.UntypedStorage", storage)


def adopt(memory: DeviceMemory, host: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device with the bytes of `host`, which nobody else may use. Raises OutOfMemoryError."""
    return tensor_over(memory, storage_over(memory, host.untyped_storage()), host)


def tensor_over(memory: DeviceMemory, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device over `storage`, of the type, size, stride and offset of `like`."""
    tensor: torch.Tensor = _as_strided.redispatch(HOST, _blank(memory, like.dtype), (0,), (1,))
    lay_over(tensor, storage, like)
    return tensor


def lay_over(tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> None:
    """Let a tensor of the device be over `storage`, of the size, stride and offset of `like`."""
    _set_storage.redispatch(HOST, tensor, storage, like.storage_offset(), like.size(), like.stride())


def _blank(memory: DeviceMemory, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the device without elements; it has no memory. One made in inference mode stays in it."""
    key = dtype, torch.is_inference_mode_enabled()
    found = memory.blanks.get(key)
    if found is None:
        raw = dlpack.from_dlpack(_empty_capsule(memory.index))
        found = memory.blanks[key] = raw if dtype == torch.uint8 else _view_type.redispatch(HOST, raw, dtype)
    return found


# torch makes no tensor on a device of Python's making but on its first one. DLPack, version 0, can say any index.


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_EXTENSION_DEVICE: Final = 12  # DLPack's name for PrivateUse1
_UNSIGNED: Final = 1
_kept: Final[list[_Managed]] = []  # without a deleter, torch reads it as long as the tensor lives


def _empty_capsule(index: int) -> Any:
    """Return a capsule of a uint8 tensor of size (0,) on the simulated device `index`."""
    shape, strides = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1)
    tensor = _Tensor(None, _Device(_EXTENSION_DEVICE, index), 1, _Type(_UNSIGNED, 8, 1), shape, strides, 0)
    _kept.append(_Managed(tensor, None, None))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(_kept[-1]), b"dltensor", None)
