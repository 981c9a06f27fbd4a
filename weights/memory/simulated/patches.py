"""Patches of what torch's Python side does by type of device, and would do wrong for a simulated one."""

from __future__ import annotations

from typing import Any

import torch

from weights.memory.simulated.kernels import Kernels


def patch_torch(kernels: Kernels) -> None:
    """Patch how storages are made and how `tensor.data` is set, for the life of the process."""
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
