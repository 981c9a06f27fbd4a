"""The memory of a device: the host's own views, private host memory, or a card's; and how it is filled.

A card is filled through a bounded ring of pinned buffers. Worker threads copy from the host views (shared, pageable,
often read-only, which cards refuse to register) into pinned buffers, and the copy engines take them from there, on
several streams. Page-locking the weights themselves would cost time per byte and process; the ring is locked once.

The records of the device arena come first: identities of device tensors, host views, reports, snapshots.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from weights.memory.devices import allocated_bytes, computes_on_host, open_device, pinned_buffers
from weights.memory.host_pool import ByteArray
from weights.memory.transfer import (
    CHUNK_BYTES,
    Chunk,
    HostCopy,
    Pair,
    Transfer,
    TransferReport,
    check_pairs,
    host_array,
    num_cores,
    plan_chunks,
    run_all,
)
from weights.platform.torch_dtypes import memory_form
from weights.records.errors import BudgetExceeded, WeightsError


class DeviceKey(Protocol):
    """The identity of a tensor on a device. A TensorRef is one; equal hashes mean equal bytes."""

    @property
    def sha256(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


# Host tensors by name, or what fetches those of the given names: only what is missing on the device is asked for.
HostViews = Mapping[str, torch.Tensor] | Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ArenaReport:
    """A report of one acquire or prefetch. Equal tensors count once.

    `reused_bytes` were there, or on their way for somebody else; `added_bytes` came for this call. What neither
    counts had no room (prefetch only). `moved_bytes` were copied: those added, or none on "cpu". `evicted` are hashes.
    """

    wanted_bytes: int
    reused_bytes: int
    added_bytes: int
    moved_bytes: int
    wall_s: float
    evicted: tuple[str, ...]


class Acquired(NamedTuple):
    """Leased tensors by name, and what it took."""

    tensors: dict[str, torch.Tensor]
    report: ArenaReport


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """A snapshot. Tensors count as much as the device's allocator takes for them, but in `moved_bytes`.

    `arriving_bytes` are part of `resident_bytes`. `lingering_bytes` were evicted, but somebody without a lease still
    uses them, so they occupy the device and count against the budget. `kernel_bytes` are what the device's libraries
    keep beside tensors and beside the budget.
    """

    device: str
    budget_bytes: int
    num_tensors: int
    resident_bytes: int
    leased_bytes: int
    pinned_bytes: int
    arriving_bytes: int
    lingering_bytes: int
    moved_bytes: int
    num_evicted: int
    kernel_bytes: int = 0


NUM_STREAMS: Final = 2  # while one copy ends, the next has begun
MAX_THREADS: Final = 8  # a core fills pinned memory at about 10 GB/s, a PCIe 5 x16 link takes 50


class DeviceFull(BudgetExceeded):
    """The device has less memory free than the budget allows, for now or for good."""


_kept_by_kernels: Final[dict[torch.device, int]] = {}  # of this process
_kernels_lock: Final = threading.Lock()


def kernel_workspace_bytes(device: torch.device) -> int:
    """Return the bytes that a device's libraries keep beside tensors from their first product and convolution on.

    They take them here, once in a process, so that what is free afterwards is what tensors may have. 0 where the host
    computes. What a kernel takes only while it runs is not among it. HAZARD: what another process takes or gives back
    in that moment is counted with it.
    """
    if device.type == "cpu":
        return 0
    with _kernels_lock:
        if device not in _kept_by_kernels:
            before = _free_bytes(device)
            # Libraries have a handle for each thread: one that has ended leaves its own to the next, with its memory.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(_run_kernels, device).result()
            _kept_by_kernels[device] = max(0, int(before - _free_bytes(device)))
        return _kept_by_kernels[device]


def _run_kernels(device: torch.device) -> None:
    """Run a product and a convolution in each type that models have."""
    if computes_on_host(device):
        return
    with torch.no_grad():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            image = torch.ones(1, 8, 32, 32, dtype=dtype, device=device)
            torch.mm(image.view(256, 32), image.view(32, 256))
            torch.conv2d(image, torch.ones(8, 8, 3, 3, dtype=dtype, device=device), padding=1)
    torch.get_device_module(device).synchronize(device)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cpu":
        return math.inf
    module = torch.get_device_module(device)
    kept = module.memory_reserved(device) - module.memory_allocated(device)  # torch's own, for later
    return float(module.mem_get_info(device)[0] + kept)


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

    def free_bytes(self) -> float:
        """Return the bytes of the device that nobody uses: infinity on the host, whose memory nobody counts here."""
        return _free_bytes(self.device)

    def upload_bytes(self, hosts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the same bytes on the device, each in an allocation of its own; 1-D uint8 in and out.

        Raises DeviceFull when the device has less memory than its budget promised.
        """
        if self._transfer is None:
            return list(hosts)
        targets = self.allocate([len(host) for host in hosts])
        self._transfer.copy(list(zip(hosts, targets, strict=True)))
        return targets

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return memory of so many bytes each, 1-D uint8. Raises DeviceFull as `upload_bytes` does."""
        try:
            return [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for nbytes in sizes]
        except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
            raise DeviceFull(
                f"{self.name} has no memory for {sum(sizes)} bytes, though the arena's budget allows them: {error}"
            ) from None

    def work_so_far(self) -> Any:
        """Return an event after all that the calling thread has told the device to do; None where nothing is told."""
        if self.device.type == "cpu":
            return None
        module = torch.get_device_module(self.device)
        event = module.Event()
        event.record(module.current_stream(self.device))
        return event

    def fill(self, pairs: Sequence[Pair], after: Any) -> None:
        """Copy into memory that was allocated here before, from host to device. Blocks until all bytes are there.

        They come `after` that event of another thread's work, which may read the memory until then, and beside what
        that thread tells the device later.
        """
        assert self._transfer is not None  # where the host's views are the tensors, there is nothing to fill
        if after is None:
            self._transfer.copy(pairs)
            return
        module = torch.get_device_module(self.device)
        stream = module.Stream(self.device)
        after.wait(stream)
        with module.stream(stream):  # the copies follow the stream of their thread
            self._transfer.copy(pairs)


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
    return HostCopy() if device.type == "cpu" else _DeviceCopy(device)


class _Fence(Protocol):
    """A point in a queue, such as an event of CUDA."""

    def synchronize(self) -> None:
        """Block until everything before it is done. Raises what failed on the device."""
        ...


class _CopyQueue(Protocol):
    """A queue of copies that a device does one after the other, such as a stream of CUDA. Thread-safe."""

    def follow(self) -> None:
        """Let later copies wait for the work that the calling thread has given the device already."""
        ...

    def upload(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue copies, as (target, pinned); what is pinned must keep its bytes until a later fence is reached."""
        ...

    def fence(self) -> _Fence:
        """Return the point after everything that was enqueued so far."""
        ...


@dataclass(slots=True)
class _RingBuffer:
    pinned: torch.Tensor
    fence: _Fence | None = None  # until it is reached the device may still read from the buffer


class _RingCopy:
    """A transfer through `buffers` (1-D uint8 of one size, pinned), round robin over `queues`. Thread-safe.

    Several copies at a time share the ring chunk by chunk, so a small one does not wait for a large one to end.
    """

    def __init__(self, queues: Sequence[_CopyQueue], buffers: Sequence[torch.Tensor], *, num_threads: int) -> None:
        self._queues = queues
        self._chunk_bytes = min(len(buffer) for buffer in buffers)
        self._ring: queue.SimpleQueue[_RingBuffer] = queue.SimpleQueue()
        for buffer in buffers:
            self._ring.put(_RingBuffer(buffer))
        self._num_threads = num_threads

    def copy(self, pairs: Sequence[Pair]) -> TransferReport:
        """Copy all pairs, as `Transfer.copy` promises."""
        start_s = time.perf_counter()
        sizes = check_pairs(pairs)
        arrays = [(host_array(source), target) for source, target in pairs]
        fences: list[_Fence] = []  # list.append is atomic
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
        return TransferReport(sum(sizes), time.perf_counter() - start_s)

    def _send(
        self,
        chunk: Chunk,
        arrays: Sequence[tuple[ByteArray, torch.Tensor]],
        stream: _CopyQueue,
        fences: list[_Fence],
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

    def fence(self) -> _Fence:
        # Sleeps instead of spinning: the cores are busy staging.
        event: _Fence = self._module.Event(blocking=True)
        event.record(self._stream)  # type: ignore[attr-defined]
        return event


class _DeviceCopy(_RingCopy):
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
