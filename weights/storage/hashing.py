"""Tensors of a checkpoint with their identities: read once to hash, and again, checked, to be written.

Hashing needs no lock of the store, so any number of writers hash at the same time.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import xxhash

from weights.formats.tensors import SourceTensor
from weights.records.dtypes import cast, cast_target
from weights.records.errors import FormatError

HASH_THREADS: Final = 4  # hashlib lets go of the interpreter lock; memory is bounded by this many tensors
Progress = Callable[[int, int], None]  # bytes done, bytes in all
KEEP_BYTES: Final = 64 * 2**20  # a checkpoint of at most so many stays in memory between hashing and writing


@dataclass(frozen=True, slots=True)
class HashedTensor:
    """A tensor as it will be stored, cast to `dtype`: `sha256` is its identity, `checksum` its bytes' xxh3-128."""

    name: str
    source: SourceTensor
    dtype: str
    nbytes: int
    sha256: str
    checksum: str
    data: bytes | memoryview | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self) -> bytes | memoryview:
        """Return the bytes that were hashed. Raises FormatError when the file has others by now."""
        if self.data is not None:
            return self.data
        data = cast(self.source.read(), self.source.dtype, self.dtype)
        if xxhash.xxh3_128_hexdigest(data) != self.checksum:
            raise changed(self)
        return data


def changed(tensor: HashedTensor) -> FormatError:
    """Return the error for a tensor whose bytes are no longer those that were hashed."""
    return FormatError(f"{tensor.source.file}: tensor {tensor.name!r} changed while it was read")


def hash_tensors(
    components: Mapping[str, Mapping[str, SourceTensor]],
    dtypes: Mapping[str, str] = MappingProxyType({}),
    progress: Progress | None = None,
) -> dict[str, dict[str, HashedTensor]]:
    """Read and hash every tensor, cast to the dtype of its component; by component and name, in the order given.

    `progress` gets the source's bytes. Raises FormatError naming the file that cannot be read.
    """
    total_bytes = sum(tensor.nbytes for tensors in components.values() for tensor in tensors.values())
    keep = total_bytes <= KEEP_BYTES
    done_bytes, lock = 0, threading.Lock()

    def hashed(dtype: str, item: tuple[str, SourceTensor]) -> HashedTensor:
        nonlocal done_bytes
        name, source = item
        target = cast_target(source.dtype, dtype)
        data = cast(source.read(), source.dtype, target)
        sha256, checksum = hashlib.sha256(data).hexdigest(), xxhash.xxh3_128_hexdigest(data)
        if progress:
            with lock:  # held while it is told, so that its counts never go down
                done_bytes += source.nbytes
                progress(done_bytes, total_bytes)
        return HashedTensor(name, source, target, len(data), sha256, checksum, data if keep else None)

    with concurrent.futures.ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash") as pool:
        return {
            component: {
                tensor.name: tensor
                for tensor in pool.map(partial(hashed, dtypes.get(component, "auto")), tensors.items())
            }
            for component, tensors in components.items()
        }
