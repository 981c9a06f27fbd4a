"""Blocks of a module that take turns in two buffers of a device: while one computes, the next is uploaded.

The weights stay in the host's shared memory, which a module leases for as long as it lives. A block is used where it
was uploaded; what follows a block is learned from the last pass, so that it is there when it is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch

from weights.memory.block_plan import BlockPlan
from weights.memory.device_space import DeviceSpace

_NUM_BUFFERS: Final = 2


class BlockStream:
    """The blocks of one module. One thread at a time may use it; it uploads on a thread of its own.

    `hosts` are views of the streamed tensors by name, which must stay readable until `close`.
    """

    def __init__(self, plan: BlockPlan, hosts: Mapping[str, torch.Tensor], space: DeviceSpace) -> None:
        """Take the memory of the buffers. Raises DeviceFull."""
        self.plan = plan
        self._hosts = hosts
        self._space = space
        self._buffers = space.allocate([plan.buffer_bytes] * _NUM_BUFFERS)
        self._holds: list[int | None] = [None] * _NUM_BUFFERS  # the block that each has, or is getting
        self._arrived: list[Future[None] | None] = [None] * _NUM_BUFFERS
        self._follows: dict[int, int] = {}
        self._last: int | None = None
        self._views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blocks")

    def first_tensors(self) -> dict[str, torch.Tensor]:
        """Return tensors of all blocks by name, on the device, of the right types and shapes, with any content."""
        return {
            name: tensor
            for block in range(len(self.plan.blocks))
            for name, tensor in self._block_views(block, 0).items()
        }

    @torch.inference_mode(False)  # another thread writes what this one may only read in its own mode
    def tensors_of(self, block: int) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a block, which stay until another block was asked for twice. Waits for their upload,
        and begins that of the block that follows. Raises what the upload raised.
        """
        if block not in self._holds:
            self._begin(block, 1 if self._holds[0] == self._last else 0)
        buffer = self._holds.index(block)
        self._wait(buffer)
        if self._last is not None:
            self._follows[self._last] = block
        self._last = block
        following = self._follows.get(block, (block + 1) % len(self.plan.blocks))
        if following not in self._holds:
            self._begin(following, 1 - buffer)
        return self._block_views(block, buffer)

    def close(self) -> None:
        """Wait for the upload that is under way, and let the memory go."""
        self._thread.shutdown(wait=True)
        self._views.clear()
        self._buffers, self._hosts = [], {}

    def _begin(self, block: int, buffer: int) -> None:
        """Upload a block. What was there before is not needed any more, once the device has done what it was told."""
        self._wait(buffer, is_needed=False)
        pairs = [
            (_bytes(self._hosts[name]), target.reshape(-1).view(torch.uint8))
            for name, target in self._block_views(block, buffer).items()
            if target.numel()
        ]
        self._holds[buffer] = block
        self._arrived[buffer] = self._thread.submit(self._space.fill, pairs, self._space.work_so_far())

    def _wait(self, buffer: int, *, is_needed: bool = True) -> None:
        arrived = self._arrived[buffer]
        if arrived is None:
            return
        self._arrived[buffer] = None
        error = arrived.exception()
        if error is not None:
            self._holds[buffer] = None
            if is_needed:
                raise error

    def _block_views(self, block: int, buffer: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a block as views of a buffer."""
        key = block, buffer
        if key not in self._views:
            memory, views = self._buffers[buffer], {}
            for name, offset in self.plan.blocks[block].offsets.items():
                host = self._hosts[name]
                part: Any = memory[offset : offset + host.nbytes]
                views[name] = part.view(host.dtype).view(host.shape)
            self._views[key] = views
        return self._views[key]


def _bytes(host: torch.Tensor) -> torch.Tensor:
    return host.detach().reshape(-1).view(torch.uint8)
