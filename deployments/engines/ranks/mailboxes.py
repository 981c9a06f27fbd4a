"""The exchange of tensors between ranks of one node, through memory that all of them have mapped.

Each rank has a mailbox, which it alone writes: two slots, and the number of the last round that it has posted. Rounds
are the same on all ranks. A rank writes into a slot again two rounds later, when all others have posted the round
between, which they do once they have read the one before. Waits spin for a moment, and sleep in the kernel then.

A mailbox is memory without a name: it ends with its process, and so does the lock on it that says that the rank lives.
HAZARD: stores are seen in their order on x86 alone; elsewhere there are no mailboxes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_HEADER: Final = mmap.PAGESIZE  # a token of 16 bytes, and the number of the last round
_COUNT: Final = 64  # where that number is
_SLOT: Final = 2**20
_NUM_SLOTS: Final = 2
_NBYTES: Final = _HEADER + _NUM_SLOTS * _SLOT
_TOKEN_BYTES: Final = 16
_SPINS: Final = 400  # looks at a number that is about to change, some 40 us: to sleep and wake takes as long
_LOOK_S: Final = 0.1  # between looks at whether a rank lives; after a while of silence less often
_SILENCE_S: Final = 5.0
_SELDOM_S: Final = 1.0
_FUTEX: Final = 202  # of x86-64 Linux
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_LIBRARY: Final = ctypes.CDLL(None, use_errno=True)

Bytes = npt.NDArray[np.uint8]


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Mailbox:
    """The mailbox of a rank, as this process or another one has it mapped."""

    def __init__(self, file: int) -> None:
        """Map the memory of an open `file`, which this object closes. Raises OSError, ValueError."""
        self._file = file
        memory = np.frombuffer(mmap.mmap(file, _NBYTES), np.uint8)
        self.token = memory[:_TOKEN_BYTES]
        self._count = memory[_COUNT : _COUNT + 4].view(np.uint32)
        self._address = ctypes.c_void_p(self._count.ctypes.data)
        starts = (_HEADER + slot * _SLOT for slot in range(_NUM_SLOTS))
        self._slots = [memory[start : start + _SLOT] for start in starts]

    @classmethod
    def create(cls) -> _Mailbox:
        """Return a new one of this process, which lives as long as it is not closed. Raises OSError."""
        file = os.memfd_create("atelier-rank")
        try:
            os.posix_fallocate(file, 0, _NBYTES)  # or a process would end by a signal where memory is short
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            box = cls(file)
        except BaseException:
            os.close(file)
            raise
        box.token[:] = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.uint8)
        return box

    def said(self) -> list[Any]:
        """Return by what another process finds it."""
        return [os.getpid(), self._file, self.token.tobytes().hex()]

    @classmethod
    def found(cls, said: Sequence[Any]) -> _Mailbox:
        """Return another process's. Raises OSError, ValueError for one that is not there, or is another."""
        process, number, token = said
        file = os.open(f"/proc/{int(process)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size != _NBYTES:
                raise ValueError("another file")
            box = cls(file)
        except BaseException:
            os.close(file)
            raise
        if box.token.tobytes().hex() != token:
            box.close()
            raise ValueError("another mailbox")
        return box

    def slot(self, number: int) -> Bytes:
        """Return the slot of a round."""
        return self._slots[number % _NUM_SLOTS]

    def has_posted(self, number: int) -> bool:
        """Return whether the rank has posted a round. Numbers go around."""
        return (int(self._count[0]) - number) % 2**32 < 2**31

    def post(self, number: int) -> None:
        """Post a round: its slot is written."""
        self._count[0] = number % 2**32
        self._wake()

    def sleep(self, number: int, timeout_s: float) -> None:
        """Sleep until a rank that has not posted a round does, or for so long."""
        seen = int(self._count[0])
        if (seen - number) % 2**32 < 2**31:
            return
        seconds, rest = divmod(timeout_s, 1)
        limit = _Time(int(seconds), int(rest * 1e9))
        self._call(_WAIT, seen, ctypes.byref(limit))

    def is_gone(self) -> bool:
        """Return whether its rank has closed it, or is dead."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Let go of it; whoever waits for it sees that. Its memory is free when nobody refers to it any more."""
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._wake()
            os.close(self._file)
            self._file = -1

    def _wake(self) -> None:
        self._call(_WAKE, _ALL, None)

    def _call(self, operation: int, value: int, limit: Any) -> None:
        """Ask the kernel to sleep at, or to wake sleepers at, the number. Any return says to look again."""
        _LIBRARY.syscall(
            ctypes.c_long(_FUTEX), self._address, ctypes.c_int(operation), ctypes.c_uint32(value), limit, None, 0
        )


class SharedLink:
    """A link between ranks of one node, by their mailboxes."""

    def __init__(self, rank: int, boxes: Sequence[_Mailbox]) -> None:
        self.rank, self.size = rank, len(boxes)
        self._boxes = list(boxes)
        self._others = [number for number in range(self.size) if number != rank]
        self._round = 0
        self._is_closed = False

    @classmethod
    def join(cls, store: Any, rank: int, size: int) -> SharedLink | None:
        """Meet the other ranks of the link in `store`; None, on each of them, unless they share this node's memory.

        Raises RuntimeError when they do not come.
        """
        boxes: dict[int, _Mailbox] = {}
        with contextlib.suppress(OSError):
            if platform.machine() == "x86_64" and sys.platform == "linux":
                boxes[rank] = _Mailbox.create()
        store.set(f"box/{rank}", json.dumps(boxes[rank].said() if boxes else None))
        for other in range(size):
            said = json.loads(store.get(f"box/{other}"))
            if other != rank and said is not None:
                with contextlib.suppress(OSError, ValueError):
                    boxes[other] = _Mailbox.found(said)
        store.set(f"seen/{rank}", str(len(boxes)))
        if all(int(store.get(f"seen/{other}")) == size for other in range(size)):
            return cls(rank, [boxes[number] for number in range(size)])
        for box in boxes.values():
            box.close()
        return None

    def broadcast(self, tensor: torch.Tensor, bound_s: float) -> None:
        """Overwrite `tensor` with rank 0's."""
        deadline_s, content = time.monotonic() + bound_s, _bytes_of(tensor)
        for start in range(0, len(content), _SLOT):
            part = content[start : start + _SLOT]
            self._begin(deadline_s)
            if self.rank == 0:
                self._own[: len(part)] = part
            self._post()
            if self.rank:
                self._await([0], self._round, deadline_s)
                part[:] = self._boxes[0].slot(self._round)[: len(part)]

    def gather_all(self, tensor: torch.Tensor, bound_s: float) -> Sequence[torch.Tensor]:
        """Return the tensors of all ranks, which have one shape, in their order."""
        deadline_s, own = time.monotonic() + bound_s, tensor.contiguous()
        whole = own.new_empty((self.size, *own.shape))
        content, found = _bytes_of(own), [_bytes_of(one) for one in whole.unbind()]
        for start in range(0, len(content), _SLOT):
            part = content[start : start + _SLOT]
            self._begin(deadline_s)
            self._own[: len(part)] = part
            self._post()
            found[self.rank][start : start + _SLOT] = part
            self._await(self._others, self._round, deadline_s)
            for other in self._others:
                found[other][start : start + _SLOT] = self._boxes[other].slot(self._round)[: len(part)]
        return whole.unbind()

    def exchange(self, parts: torch.Tensor, bound_s: float) -> torch.Tensor:
        """Send part i of `parts` (size, ...) to rank i; return those for this one, by their ranks."""
        deadline_s, own = time.monotonic() + bound_s, parts.contiguous()
        whole = torch.empty_like(own)
        content, found = _bytes_of(own).reshape(self.size, -1), _bytes_of(whole).reshape(self.size, -1)
        found[self.rank] = content[self.rank]
        room = _SLOT // self.size
        for start in range(0, content.shape[1], room):
            stop = min(start + room, content.shape[1])
            size = stop - start
            self._begin(deadline_s)
            for other in self._others:
                self._own[other * size : (other + 1) * size] = content[other, start:stop]
            self._post()
            self._await(self._others, self._round, deadline_s)
            place = slice(self.rank * size, (self.rank + 1) * size)
            for other in self._others:
                found[other, start:stop] = self._boxes[other].slot(self._round)[place]
        return whole

    def close(self) -> None:
        """End it: the others' calls fail."""
        self._is_closed = True
        for box in self._boxes:
            box.close()

    @property
    def _own(self) -> Bytes:
        return self._boxes[self.rank].slot(self._round)

    def _begin(self, deadline_s: float) -> None:
        """Begin a round, once all others have read what this rank's slot has had."""
        if self._is_closed:
            raise RuntimeError("the link is closed")
        self._await(self._others, self._round, deadline_s)
        self._round += 1

    def _post(self) -> None:
        self._boxes[self.rank].post(self._round)

    def _await(self, others: Iterable[int], number: int, deadline_s: float) -> None:
        """Wait until the others have posted a round. Raises RuntimeError."""
        for other in others:
            box = self._boxes[other]
            if not any(box.has_posted(number) for _ in range(_SPINS)):
                self._sleep(other, number, deadline_s)

    def _sleep(self, other: int, number: int, deadline_s: float) -> None:
        box, begun_s = self._boxes[other], time.monotonic()
        while not box.has_posted(number):
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise RuntimeError(f"nothing came from number {other} of {self.size} within the bound")
            pause_s = _LOOK_S if now_s - begun_s < _SILENCE_S else _SELDOM_S
            box.sleep(number, min(pause_s, deadline_s - now_s))
            if self._is_closed:
                raise RuntimeError("the link is closed")
            if box.is_gone() and not box.has_posted(number):
                raise RuntimeError(f"number {other} of {self.size} is gone")


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a contiguous tensor's memory."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    flat = tensor.detach().view(-1)
    # One element that was expanded has a stride of 0.
    found: Bytes = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()
    return found
