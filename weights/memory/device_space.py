"""The memory of a device: the host's own views, private host memory, or a card's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weights.errors import BudgetExceeded, WeightsError
from weights.loader import memory_form
from weights.memory.device_records import DeviceKey
from weights.memory.device_transfer import DeviceCopy
from weights.memory.devices import allocated_bytes, open_device
from weights.memory.transfer import HostCopy, Transfer


class DeviceFull(BudgetExceeded):
    """The device has less memory free than the budget allows, for now or for good."""


class DeviceSpace:
    """The memory of one device, allocated and filled.

    On "cpu" the host's views are the device's tensors and nothing is copied; "cpu-private" copies on a machine
    without a card, so that every byte of a switch can be counted there.

    `transfer` None: the fitting one. Raises WeightsError for a device that is not there.
    """

    def __init__(self, name: str, transfer: Transfer | None = None) -> None:
        self.device = open_device(name)
        self.name = name if name == "cpu-private" else str(self.device)
        self._transfer = None if self.name == "cpu" else transfer or _fitting_transfer(self.device)

    @property
    def copies(self) -> bool:
        """False where the host's views are the tensors."""
        return self._transfer is not None

    def size_of(self, nbytes: int) -> int:
        """Return the bytes of memory that a tensor of `nbytes` bytes takes here."""
        return allocated_bytes(self.device, nbytes)

    def place(self, hosts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the same bytes on the device, each in an allocation of its own; 1-D uint8 in and out.

        Raises DeviceFull when the device has less memory than its budget promised.
        """
        if self._transfer is None:
            return list(hosts)
        try:
            targets = [torch.empty(len(host), dtype=torch.uint8, device=self.device) for host in hosts]
        except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
            wanted_bytes = sum(len(host) for host in hosts)
            raise DeviceFull(
                f"{self.name} has no memory for {wanted_bytes} bytes, though the arena's budget allows them: {error}"
            ) from None
        self._transfer.copy(list(zip(hosts, targets, strict=True)))
        return targets


def bytes_of(name: str, key: DeviceKey, view: torch.Tensor) -> torch.Tensor:
    """Return a host view as 1-D uint8. Raises WeightsError naming the tensor when it has another size than its key."""
    if view.device.type != "cpu" or view.nbytes != key.nbytes:
        raise WeightsError(
            f"tensor {name!r}: expected {key.nbytes} bytes in host memory ({key.dtype} {list(key.shape)}), got "
            f"{view.nbytes} on {view.device} ({view.dtype} {list(view.shape)})"
        )
    return view.detach().reshape(-1).view(torch.uint8)


def tensor_of(base: torch.Tensor, key: DeviceKey) -> torch.Tensor:
    """Return the bytes `base` in the type and shape of `key`: equal bytes may be wanted as different tensors.

    Copies when a view of the host that came in for bytes is not aligned for a wider type. Raises WeightsError when
    the key claims another size than the bytes of its hash have.
    """
    if len(base) != key.nbytes:
        raise WeightsError(f"{key.dtype} {list(key.shape)} has {key.nbytes} bytes, tensor {key.sha256} has {len(base)}")
    dtype, shape = memory_form(key.dtype, key.shape)
    if base.storage_offset() % dtype.itemsize or base.data_ptr() % dtype.itemsize:
        base = base.clone()
    typed = base if dtype == torch.uint8 else base.view(dtype)
    return typed.view(shape)


def _fitting_transfer(device: torch.device) -> Transfer:
    return HostCopy() if device.type == "cpu" else DeviceCopy(device)
