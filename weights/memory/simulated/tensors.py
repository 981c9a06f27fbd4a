"""Tensors of a simulated device, and the host tensors that have their bytes."""

from __future__ import annotations

import ctypes
from typing import Any, Final, cast

import torch
from torch.utils import dlpack

from weights.memory.simulated.memory import Block, DeviceMemory

HOST: Final[Any] = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_as_strided: Final[Any] = torch.ops.aten.as_strided.default
_set_storage: Final[Any] = torch.ops.aten.set_.source_Storage_storage_offset
_view_type: Final[Any] = torch.ops.aten.view.dtype


def block_of(tensor: torch.Tensor) -> Block:
    """Return the memory of a simulated tensor. Raises RuntimeError for one that torch made behind our back."""
    storage: Any = tensor.untyped_storage()
    try:
        block: Block = storage._simulated
    except AttributeError:
        raise RuntimeError(f"a tensor on {tensor.device} has no memory: the simulated device did not make it") from None
    return block


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor over the bytes of a simulated one. HAZARD: only below autograd."""
    base = block_of(tensor).typed(tensor.dtype)
    return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def storage_over(memory: DeviceMemory, host: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage on the device that has its bytes in `host`, and nobody else's. Raises OutOfMemoryError."""
    block = Block(memory, host)
    # The pointer is never followed. The attribute lives exactly as long as torch's own storage does.
    storage: Any = torch._C._construct_storage_from_data_pointer(block.address, memory.device, host.nbytes())
    storage._simulated = block
    return cast("torch.UntypedStorage", storage)


def adopt(memory: DeviceMemory, host: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device with the bytes of `host`, which nobody else may use. Raises OutOfMemoryError."""
    return tensor_over(memory, storage_over(memory, host.untyped_storage()), host)


def tensor_over(memory: DeviceMemory, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device over `storage`, of the type, size, stride and offset of `like`."""
    tensor: torch.Tensor = _as_strided.redispatch(HOST, _blank(memory, like.dtype), (0,), (1,))
    place(tensor, storage, like)
    return tensor


def place(tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> None:
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
