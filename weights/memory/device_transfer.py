"""Transfer from host to device through a bounded ring of pinned buffers.

Worker threads copy from the host views (shared, pageable, often read-only, which cards refuse to register) into
pinned buffers, and the copy engines take them from there, on several streams. Page-locking the weights themselves
would cost time per byte and process; the ring is locked once.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from weights.errors import WeightsError
from weights.memory.devices import pinned_buffers
from weights.memory.pages import ByteArray
from weights.memory.transfer import (
    CHUNK_BYTES,
    Chunk,
    Pair,
    TransferReport,
    check_pairs,
    host_array,
    num_cores,
    plan_chunks,
    run_all,
)

NUM_STREAMS: Final = 2  # while one copy ends, the next has begun
MAX_THREADS: Final = 8  # a core fills pinned memory at about 10 GB/s, a PCIe 5 x16 link takes 50


class Fence(Protocol):
    """A point in a queue, such as an event of CUDA."""

    def synchronize(self) -> None:
        """Block until everything before it is done. Raises what failed on the device."""
        ...


class CopyQueue(Protocol):
    """A queue of copies that a device does one after the other, such as a stream of CUDA. Thread-safe."""

    def follow(self) -> None:
        """Let later copies wait for the work that the calling thread has given the device already."""
        ...

    def upload(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue copies, as (target, pinned); what is pinned must keep its bytes until a later fence is reached."""
        ...

    def fence(self) -> Fence:
        """Return the point after everything that was enqueued so far."""
        ...


@dataclass(slots=True)
class _Slot:
    pinned: torch.Tensor
    fence: Fence | None = None  # until it is reached the device may still read from the buffer


class RingCopy:
    """A transfer through `buffers` (1-D uint8 of one size, pinned), round robin over `queues`. Thread-safe.

    Several copies at a time share the ring chunk by chunk, so a small one does not wait for a large one to end.
    """

    def __init__(
        self,
        queues: Sequence[CopyQueue],
        buffers: Sequence[torch.Tensor],
        *,
        num_threads: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._queues = queues
        self._chunk_bytes = min(len(buffer) for buffer in buffers)
        self._ring: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for buffer in buffers:
            self._ring.put(_Slot(buffer))
        self._num_threads = num_threads
        self._clock = clock

    def copy(self, pairs: Sequence[Pair]) -> TransferReport:
        """Copy all pairs, as `Transfer.copy` promises."""
        start_s = self._clock()
        sizes = check_pairs(pairs)
        arrays = [(host_array(source), target) for source, target in pairs]
        fences: list[Fence] = []  # list.append is atomic
        turn = itertools.count()
        for stream in self._queues:
            # The memory of the targets may have been freed by work that this thread's stream has still to do.
            stream.follow()
        try:
            run_all(
                lambda chunk: self._send(chunk, arrays, self._queues[next(turn) % len(self._queues)], fences),
                plan_chunks(sizes, self._chunk_bytes),
                self._num_threads,
            )
            for fence in fences:
                fence.synchronize()
        except BaseException:
            # The caller may free the targets now, so nothing may be on its way to them.
            for fence in fences:
                with contextlib.suppress(Exception):
                    fence.synchronize()
            raise
        return TransferReport(sum(sizes), self._clock() - start_s)

    def _send(
        self,
        chunk: Chunk,
        arrays: Sequence[tuple[ByteArray, torch.Tensor]],
        stream: CopyQueue,
        fences: list[Fence],
    ) -> None:
        slot = self._ring.get()  # first in, first out: the one whose copy began longest ago
        try:
            fence, slot.fence = slot.fence, None
            if fence:
                fence.synchronize()
            staging = slot.pinned.numpy()
            for piece in chunk:
                source = arrays[piece.index][0][piece.offset : piece.offset + piece.nbytes]
                np.copyto(staging[piece.at : piece.at + piece.nbytes], source)
            copies = [
                (
                    arrays[piece.index][1][piece.offset : piece.offset + piece.nbytes],
                    slot.pinned[piece.at : piece.at + piece.nbytes],
                )
                for piece in chunk
            ]
            try:
                stream.upload(copies)
            finally:  # also after an error: what was enqueued before it still reads the buffer
                slot.fence = stream.fence()
                fences.append(slot.fence)
        finally:
            self._ring.put(slot)


class _StreamQueue:
    """A side stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def follow(self) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))

    def upload(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with self._module.stream(self._stream):
            for target, pinned in copies:
                target.copy_(pinned, non_blocking=True)

    def fence(self) -> Fence:
        # Sleeps instead of spinning: the cores are busy staging.
        event: Fence = self._module.Event(blocking=True)
        event.record(self._stream)  # type: ignore[attr-defined]
        return event


class DeviceCopy(RingCopy):
    """A transfer to one device. Locks `num_buffers` x `chunk_bytes` of host memory for CUDA, for as long as it lives.

    HAZARD: a target must have been allocated on the calling thread's current stream. Work on other streams that used
    its memory before must be done, or recorded with `record_stream`; after `copy` every stream may read it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        num_threads: int | None = None,
        num_buffers: int | None = None,
    ) -> None:
        if not torch.get_device_module(device).is_available():
            raise WeightsError(f"cannot copy to {device}: this torch has no such device")
        threads = num_threads or min(MAX_THREADS, num_cores())
        # HAZARD: torch's pinned allocator rounds each buffer up to a power of two.
        count = num_buffers or 2 * threads  # one is staged while another is on its way
        buffers = pinned_buffers(device, count, chunk_bytes)
        super().__init__([_StreamQueue(device) for _ in range(NUM_STREAMS)], buffers, num_threads=threads)
