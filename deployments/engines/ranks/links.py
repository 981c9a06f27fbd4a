"""The exchange of tensors between ranks, by torch's process groups: gloo on the host, NCCL on cards.

A group is made of its own store and never registered with torch: a process may have several, and ends them alone.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from weights.platform.torch_seam import process_group

Store = Any  # one of torch's, which has no type that says so
STORES: Final[Any] = distributed
_OPTIONS: Final[Any] = distributed_c10d


@dataclass(frozen=True, slots=True)
class Meeting:
    """The place where the ranks of one group find each other: a port of rank 0, or a file that all of them see.

    The file is new, and serves one group.
    """

    address: str = "127.0.0.1"
    port: int = 0
    file: Path | None = None

    def open(self, rank: int, size: int, bound_s: float, listener: socket.socket | None = None) -> Store:
        """Return the group's store. Rank 0 may have a `listener`, a socket that listens on the port already.

        Raises:
            RuntimeError: rank 0 is not there within `bound_s`.
        """
        if self.file is not None:
            store: Store = STORES.FileStore(str(self.file), size)
        else:
            store = STORES.TCPStore(
                self.address,
                self.port,
                size,
                is_master=rank == 0,
                timeout=timedelta(seconds=bound_s),
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        store.set_timeout(timedelta(seconds=bound_s))
        return store


def listening(address: str = "127.0.0.1") -> tuple[Meeting, socket.socket]:
    """Return a meeting at a free port of this address, and the socket by which rank 0 opens it. No one else listens."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen()
    return Meeting(address, listener.getsockname()[1]), listener


class Link(Protocol):
    """The connection of `size` ranks along one axis, of which this is number `rank`. All of them call alike.

    A call that meets its bound, or a rank that is gone, raises RuntimeError.
    """

    rank: int
    size: int

    def broadcast(self, tensor: torch.Tensor, bound_s: float) -> None:
        """Overwrite `tensor` with rank 0's."""

    def gather_all(self, tensor: torch.Tensor, bound_s: float) -> Sequence[torch.Tensor]:
        """Return the tensors of all ranks, which have one shape, in their order."""

    def exchange(self, parts: torch.Tensor, bound_s: float) -> torch.Tensor:
        """Send part i of `parts` (size, ...) to rank i; return those for this one, by their ranks."""

    def close(self) -> None:
        """End it: the others' calls fail."""


class TorchLink:
    """A link by a process group of torch."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, address: str, bound_s: float) -> None:
        """Meet the other ranks of the link in `store`, at this rank's `address`."""
        self.rank, self.size = rank, size
        self._group: Any = process_group(store, rank, size, device, address, timedelta(seconds=bound_s))

    def broadcast(self, tensor: torch.Tensor, bound_s: float) -> None:
        """Overwrite `tensor` with rank 0's."""
        options = _OPTIONS.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=bound_s)
        self._group.broadcast([tensor], options).wait()

    def gather_all(self, tensor: torch.Tensor, bound_s: float) -> Sequence[torch.Tensor]:
        """Return the tensors of all ranks, which have one shape, in their order."""
        own = tensor.contiguous()
        whole = own.new_empty((self.size, *own.shape))
        options = _OPTIONS.AllgatherOptions()
        options.timeout = timedelta(seconds=bound_s)
        self._group.allgather([list(whole.unbind())], [own], options).wait()
        return whole.unbind()

    def exchange(self, parts: torch.Tensor, bound_s: float) -> torch.Tensor:
        """Send part i of `parts` (size, ...) to rank i; return those for this one, by their ranks."""
        own = parts.contiguous()
        whole = torch.empty_like(own)
        options = _OPTIONS.AllToAllOptions()
        options.timeout = timedelta(seconds=bound_s)
        self._group.alltoall_base(whole, own, [], [], options).wait()
        return whole

    def close(self) -> None:
        """End it: the others' calls fail."""
        self._group = None
