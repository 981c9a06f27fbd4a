"""Objects of Ray's store that nobody has filled: who writes them where they lie need not have them cleared before.

`ray.put` makes an object as large as what it serialized says, and writes what it serialized. So a value of a few bytes
that says that it is larger leaves the rest of its object as it was. Read anywhere, it is an array over all of it.
"""

from __future__ import annotations

import pickle
import threading
from functools import cache
from typing import Any, Final

import numpy as np
import ray

from cluster.ray_seam import shims
from weights.memory.host_pool import ByteArray

_HEAD_BYTES: Final = 64  # of the array: what Ray writes of it
_TRIED_BYTES: Final = 2**20


class _ExtraBytes(threading.local):
    """Bytes that the object, which this thread is putting, has beyond what is serialized."""

    nbytes = 0


_EXTRA: Final = _ExtraBytes()


class _Array:
    """numpy's array interface over memory that begins with `head`, which keeps it alive."""

    def __init__(self, head: Any, nbytes: int) -> None:
        self._head = head
        address = np.frombuffer(head, np.uint8).ctypes.data
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, True)}


def _array_from(head: Any, nbytes: int) -> ByteArray:
    """Return the object's array, read-only. HAZARD: `head` must be where `put_unfilled` has let Ray write it."""
    return np.asarray(_Array(head, nbytes))


class _Unfilled:
    """A value that is read as an array of `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _array_from, (pickle.PickleBuffer(bytes(_HEAD_BYTES)), self._nbytes)


def put_unfilled(nbytes: int) -> Any:
    """Return the reference of a new object in Ray's store: an array of `nbytes`, at least 64, of arbitrary contents.

    HAZARD: they may be those of an object that was there before. Raises RayIncompatible, and what `ray.put` does.
    """
    _let_objects_be_larger()
    _EXTRA.nbytes = nbytes - _HEAD_BYTES
    try:
        return ray.put(_Unfilled(nbytes))
    finally:
        _EXTRA.nbytes = 0


def is_unfilled_possible() -> bool:
    """Try it: whether such an object has its size, and does not take the time to be written."""
    try:
        view = ray.get(put_unfilled(_TRIED_BYTES))
    except Exception:
        return False
    return isinstance(view, np.ndarray) and view.nbytes == _TRIED_BYTES and not view.flags.writeable


@cache
def _let_objects_be_larger() -> None:
    shims.require(shims.UNFILLED)
    from ray._private import serialization

    class Larger(serialization.MessagePackSerializedObject):
        @property
        def total_bytes(self) -> int:
            return int(super().total_bytes) + _EXTRA.nbytes

    serialization.MessagePackSerializedObject = Larger
