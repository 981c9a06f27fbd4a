"""Transfers from host to device memory: the protocol, chunks, and the plain copy within host memory.

Chunks of 10 MB and more reach the bandwidth of memory and link; a copy per small tensor would be all overhead, so
small tensors share a chunk.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from weights.memory.host_pool import ByteArray
from weights.records.errors import WeightsError

CHUNK_BYTES: Final = 16 * 2**20
PIECE_ALIGNMENT: Final = 512  # what torch's CUDA allocator aligns to; copy engines are slower off 128 bytes
MAX_THREADS: Final = 4  # more than that do not copy faster on one memory controller

_BYTE_TYPES: Final = (torch.uint8, np.uint8)

# From host to device, each 1-D uint8, contiguous and of equal length. HAZARD: the host side may be memory that is
# shared and read-only; nothing may write into it.
Pair = tuple[torch.Tensor | ByteArray, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a chunk: `nbytes` bytes from byte `offset` of copy number `index`, at byte `at` of the chunk."""

    index: int
    offset: int
    nbytes: int
    at: int


Chunk = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class TransferReport:
    """A report of `nbytes` copied in `wall_s` seconds, all of them arrived."""

    nbytes: int
    wall_s: float

    @property
    def gbps(self) -> float:
        """10^9 bytes per second."""
        return self.nbytes / self.wall_s / 1e9 if self.wall_s else 0.0


class Transfer(Protocol):
    """A way to move bytes from host to device. Thread-safe."""

    def copy(self, pairs: Sequence[Pair]) -> TransferReport:
        """Copy all pairs; block until all bytes are there, or until nothing is under way and the first error is raised.

        Raises WeightsError when the two sides of a pair do not fit; then nothing was copied.
        """
        ...


class HostCopy:
    """A transfer within host memory, for the `cpu-private` device."""

    def __init__(
        self,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        num_threads: int | None = None,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._num_threads = num_threads or min(MAX_THREADS, num_cores())

    def copy(self, pairs: Sequence[Pair]) -> TransferReport:
        start_s = time.perf_counter()
        sizes = check_pairs(pairs)
        # numpy lets go of the interpreter lock, and unlike torch it starts no threads of its own in each of ours.
        arrays = [(host_array(source), target.numpy()) for source, target in pairs]

        def copy_chunk(chunk: Chunk) -> None:
            for piece in chunk:
                source, target = arrays[piece.index]
                end = piece.offset + piece.nbytes
                np.copyto(target[piece.offset : end], source[piece.offset : end])

        run_all(copy_chunk, plan_chunks(sizes, self._chunk_bytes), self._num_threads)
        return TransferReport(sum(sizes), time.perf_counter() - start_s)


def plan_chunks(sizes: Sequence[int], chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut copies of `sizes` bytes into chunks that take at most `chunk_bytes`, in order, each as full as can be.

    Pieces begin at multiples of PIECE_ALIGNMENT, in their chunk and in their copy. Raises WeightsError for a
    `chunk_bytes` that is not a positive multiple of it.
    """
    if chunk_bytes <= 0 or chunk_bytes % PIECE_ALIGNMENT:
        raise WeightsError(f"chunks of {chunk_bytes} bytes: expected a positive multiple of {PIECE_ALIGNMENT}")
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    at = 0
    for index, size in enumerate(sizes):
        offset = 0
        while offset < size:
            if at == chunk_bytes:
                chunks.append(tuple(pieces))
                pieces, at = [], 0
            nbytes = min(size - offset, chunk_bytes - at)
            pieces.append(Piece(index, offset, nbytes, at))
            offset += nbytes
            at += -(-nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
    return (*chunks, tuple(pieces)) if pieces else tuple(chunks)


def check_pairs(pairs: Sequence[Pair]) -> list[int]:
    """Return the bytes of each pair. Raises WeightsError for one that is not two runs of equally many bytes."""
    for number, (source, target) in enumerate(pairs):
        for side, memory in (("host", source), ("device", target)):
            contiguous = memory.is_contiguous() if isinstance(memory, torch.Tensor) else memory.flags.c_contiguous
            if memory.dtype not in _BYTE_TYPES or memory.ndim != 1 or not contiguous:
                raise WeightsError(
                    f"copy {number}: expected 1-D contiguous uint8 on the {side} side, got {memory.dtype} of shape "
                    f"{list(memory.shape)}{'' if contiguous else ', not contiguous'}"
                )
        if len(source) != len(target):
            raise WeightsError(f"copy {number}: {len(source)} bytes on the host side, {len(target)} on the device side")
    return [len(target) for _, target in pairs]


def host_array(memory: torch.Tensor | ByteArray) -> ByteArray:
    """Return host memory as a numpy array, without a copy."""
    return memory.numpy() if isinstance(memory, torch.Tensor) else memory


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def run_all(work: Callable[[Chunk], None], chunks: Sequence[Chunk], num_threads: int) -> None:
    """Work on the chunks in order, on up to `num_threads` threads. An error stops it and is raised at the end."""
    if len(chunks) <= 1 or num_threads == 1:
        for chunk in chunks:
            work(chunk)
        return
    with concurrent.futures.ThreadPoolExecutor(min(num_threads, len(chunks)), thread_name_prefix="copy") as threads:
        futures = [threads.submit(work, chunk) for chunk in chunks]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
