"""Ray's object store of this node: puts that stay in memory, or fail and say so, and objects written piece by piece.

When its store is full, Ray waits two seconds and then puts the object into a file on disk, without a word (fallback
allocation). Where an object lies shows in /proc/self/maps: it is mapped here, and the mapping names its device.

Ray only copies complete objects. An object larger than the memory that it is read through is therefore put
without contents (`ray_seam/unfilled_objects.py`), or as zeros that take no memory, and then written in place: Ray
maps its store for writing in every process.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray

from cluster.keeper.records import StoreFull
from cluster.ray_seam.ray_files import SHARED_MEMORY
from cluster.ray_seam.unfilled_objects import is_unfilled_possible, put_unfilled
from weights.memory.host_pool import PAGE_BYTES, ByteArray, allocate_pages

MAPS: Final = Path("/proc/self/maps")
PREALLOCATE: Final = "RAY_preallocate_plasma_memory"
PROBE_BYTES: Final = 2**20
MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
STEP_BYTES: Final = 2 * 2**20  # a step holds the address space's lock: short enough even where it gets little time
_MAPPING: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-s \S+ \S+ \S+ +(/\S*plasma\S*)", re.MULTILINE)

logger = logging.getLogger("atelier.keeper")


@dataclass(frozen=True)
class NewObject:
    """An object that is being written. `out` is its memory, uint8, of which `reserved_bytes` are in the store already.

    `seal` ends the writing and gives reference and view. It takes what is in the store beside, and may raise StoreFull.
    """

    out: ByteArray
    reserved_bytes: int
    seal: Callable[[int], tuple[Any, ByteArray]]


def let_go(error: BaseException) -> None:
    """Drop the references of `error`'s frames: they would keep an object being written."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        found = pending.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            pending += [found.__cause__, found.__context__]


class ObjectStore:
    """Ray's object store of a node, opened inside an actor. Thread-safe.

    `environ` says whether Ray touched every page of the store at its start.
    """

    def __init__(self, node_id: str, environ: Mapping[str, str] = os.environ) -> None:
        self.capacity_bytes = _capacity_bytes(node_id)
        self._touched_bytes = self.capacity_bytes if environ.get(PREALLOCATE) in ("1", "true") else 0
        # A store configured outside shared memory is slow, but there is no other.
        probe = ray.get(ray.put(np.zeros(PROBE_BYTES, np.uint8)))
        self._is_shared = _in_shared_memory(probe)
        if not self._is_shared:
            logger.warning("Ray's object store is not in %s", SHARED_MEMORY)
        self.writes_in_place = _is_mapped_for_writing(probe)
        if not self.writes_in_place:
            logger.warning("Ray's object store is mapped read-only: an extent takes twice its size while it loads")
        self.clears_objects = not (self.writes_in_place and is_unfilled_possible())

    def populate(self) -> None:
        """Make and map every page of the store now, so that no put has to. Takes seconds; puts may go on meanwhile."""
        self._touched_bytes = max(self._touched_bytes, _populate_store())

    def create_object(self, nbytes: int, used_bytes: int) -> NewObject:
        """Room for an object that only the caller writes. Raises StoreFull."""
        # Ray keeps small objects out of shared memory.
        if nbytes < PROBE_BYTES or not self.writes_in_place:
            private = allocate_pages(nbytes)
            return NewObject(private, 0, lambda used_bytes: self.put(private, used_bytes))
        if self.clears_objects:
            ref, view = self.put(allocate_pages(nbytes), used_bytes)  # unwritten pages are all the same one
        else:
            ref, view = self._put(nbytes, used_bytes, lambda: put_unfilled(nbytes))
            if used_bytes + nbytes > self._touched_bytes:
                _make_pages(view)
        # HAZARD: no one else may have the reference yet. The view keeps Ray from moving the object to disk meanwhile.
        return NewObject(_writable(view), nbytes, lambda _: (ref, view))

    def put(self, array: ByteArray, used_bytes: int) -> tuple[Any, ByteArray]:
        """Reference and view of a copy; `used_bytes` are in the store already. Raises StoreFull."""
        return self._put(array.nbytes, used_bytes, lambda: ray.put(array))

    def _put(self, nbytes: int, used_bytes: int, put: Callable[[], Any]) -> tuple[Any, ByteArray]:
        self._touched_bytes = max(self._touched_bytes, used_bytes)
        # HAZARD: to touch a page of a full /dev/shm is a SIGBUS, not an error. Pages that were used before exist.
        if self._is_shared and used_bytes + nbytes > self._touched_bytes:
            free_bytes = _free_bytes()
            if free_bytes < nbytes:
                raise StoreFull(f"{SHARED_MEMORY} is full: {nbytes} bytes are needed, {free_bytes} are free")
        try:
            ref = put()
            view = ray.get(ref)
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:  # it may not spill either
            raise StoreFull(f"Ray's object store has no room for {nbytes} bytes: {error}") from None
        if self._is_shared and not _in_shared_memory(view):
            raise StoreFull(
                f"Ray's object store of {self.capacity_bytes} bytes has no room in memory for {nbytes} bytes "
                f"beside {used_bytes} bytes of weights and of other objects"
            )
        return ref, view


def _capacity_bytes(node_id: str) -> int:
    """Return the bytes of the object store of a node; 0 when Ray does not know the node."""
    sizes = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["NodeID"] == node_id]
    return int(sizes[0]) if sizes else 0


@dataclass(frozen=True, slots=True)
class _MappedFile:
    permissions: str
    device: int
    inode: int


def _in_shared_memory(view: ByteArray, maps: Callable[[], str] = lambda: MAPS.read_text(errors="replace")) -> bool:
    """Return whether the bytes are in no file, or in one of shared memory."""
    found = _mapped_file(view, maps())
    # None: the mapping went between the two looks.
    return found is None or found.inode == 0 or found.device == os.stat(SHARED_MEMORY).st_dev


def _is_mapped_for_writing(view: ByteArray, maps: Callable[[], str] = lambda: MAPS.read_text(errors="replace")) -> bool:
    """Return whether a write to the bytes' address reaches the file that other processes map."""
    found = _mapped_file(view, maps())
    return found is not None and found.permissions.startswith("rw") and found.permissions.endswith("s")


def _mapped_file(view: ByteArray, maps: str) -> _MappedFile | None:
    """Return the mapping behind the bytes. Format of `maps`: proc_pid_maps(5)."""
    address = view.ctypes.data
    for line in maps.splitlines():
        span, permissions, _, device, inode, *_ = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end:
            major, minor = (int(number, 16) for number in device.split(":"))
            return _MappedFile(permissions, os.makedev(major, minor), int(inode))
    return None


class _Writable:
    """numpy's array interface over the memory of a read-only array, which it keeps alive."""

    def __init__(self, view: ByteArray) -> None:
        self._view = view
        self.__array_interface__ = view.__array_interface__ | {"data": (view.ctypes.data, False)}


def _writable(view: ByteArray) -> ByteArray:
    return np.asarray(_Writable(view))


def _make_pages(view: ByteArray) -> None:
    """Make the pages of an unwritten object. Raises StoreFull when shared memory has none left."""
    begin = view.ctypes.data // PAGE_BYTES * PAGE_BYTES
    end = view.ctypes.data + view.nbytes
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_POPULATE_WRITE):
        error = ctypes.get_errno()
        if error != errno.EINVAL:  # an older kernel, whose pages are made when they are written
            raise StoreFull(f"{SHARED_MEMORY} has no pages for {view.nbytes} bytes: {os.strerror(error)}")


def _free_bytes() -> int:
    found = os.statvfs(SHARED_MEMORY)
    return found.f_bavail * found.f_frsize


# The pages of the store. Two costs hide in the first put of a process: the kernel makes the pages of shared memory when
# they are touched first (0.5 GiB/s on a virtual machine), and every process maps each 4 KiB page by a fault of its own
# (4 GiB/s). Afterwards a put runs at the speed of memory, 11 to 14 GiB/s here. MADV_POPULATE_READ (Linux 5.14,
# madvise(2)) does both in bulk.


@dataclass(frozen=True, slots=True)
class _SharedMapping:
    """A shared mapping of this process."""

    address: int
    nbytes: int
    file: str


def _store_mappings(maps: str) -> Iterator[_SharedMapping]:
    """Ray's object store in the text of /proc/self/maps; it is there once the process has put something large."""
    for begin, end, file in _MAPPING.findall(maps):
        yield _SharedMapping(int(begin, 16), int(end, 16) - int(begin, 16), file)


def _populate_mapping(mapping: _SharedMapping, stop: Callable[[], bool] = lambda: False) -> int:
    """Make and map the pages of `mapping`, step by step until `stop()`; return the bytes done.

    Contents stay as they are. Fewer bytes than asked for mean that memory is short or the kernel does not know how:
    nothing is lost then but speed.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    done = 0
    while done < mapping.nbytes and not stop():
        step = min(STEP_BYTES, mapping.nbytes - done)
        if madvise(ctypes.c_void_p(mapping.address + done), ctypes.c_size_t(step), MADV_POPULATE_READ):
            logger.info("pages of %s stay as they are: errno %s", mapping.file, ctypes.get_errno())
            break
        done += step
    return done


def _populate_store(stop: Callable[[], bool] = lambda: False) -> int:
    """Make and map all of the object store that this process has mapped; return the bytes done."""
    return sum(_populate_mapping(mapping, stop) for mapping in _store_mappings(MAPS.read_text()))
