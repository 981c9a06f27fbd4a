"""Limits on the work that fits into memory at once, learned from what ran out of it. Free of torch and of clocks.

HAZARD: the frames of an error hold the tensors of the call that failed. Retry after the `except` block, not within it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, TypeVar

from weights.residency.recent import Recent

MAX_KINDS: Final = 256  # that are remembered
PROBE_AFTER: Final = 64  # calls that fitted, before a larger one is tried again
MAX_PROBE_AFTER: Final = 8192
PROBE_GROWTH: Final = 4  # a probe is larger by the limit divided by this
# Of RuntimeErrors: the allocators of CPU, CUDA and MPS, and the libraries that allocate workspaces of their own.
_OUT_OF_MEMORY: Final = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")

ResultT = TypeVar("ResultT")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether less work might have gone well.

    Torch's OutOfMemoryError is known by its name: torch may be absent.
    """
    if isinstance(error, MemoryError) or any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def forget_frames(error: BaseException) -> None:
    """Drop the frames of an error that is kept, and of those that led to it.

    HAZARD: frames know what they worked on, tensors in shared memory for example. With an error that one of the frames
    knows as well, in a local name or a future, they make a circle, and stay until Python looks for circles.
    """
    known: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in known:
            known.add(id(one))
            one.__traceback__ = None
            errors += (one.__cause__, one.__context__)


@dataclass(slots=True)
class _Limit:
    size: int
    num_fitted: int = 0
    probe_after: int = PROBE_AFTER

    @property
    def next_size(self) -> int:
        if self.num_fitted < self.probe_after:
            return self.size
        return self.size + max(1, self.size // PROBE_GROWTH)


class MemoryLimits:
    """Greatest sizes of calls by kind of work; sizes in any unit, at least 1.

    A call that ran out of memory halves the limit of its kind. Memory may become free again: after `PROBE_AFTER` calls
    that fitted, one above the limit is tried. If that fails, the next probe comes after twice as many calls.
    """

    def __init__(self) -> None:
        self._limits: Recent[Hashable, _Limit] = Recent(MAX_KINDS)

    def allowed(self, kind: Hashable) -> float:
        """Return the greatest size that the next call should have; infinity where nothing ever failed."""
        limit = self._limits.get(kind)
        return math.inf if limit is None else limit.next_size

    def fitted(self, kind: Hashable, size: int) -> None:
        """Note that a call of this size went well."""
        limit = self._limits.get(kind)
        if limit is None:
            return
        limit.num_fitted += 1
        if size > limit.size:
            limit.size, limit.num_fitted = size, 0

    def ran_out(self, kind: Hashable, size: int) -> None:
        """Note that a call of this size found no memory."""
        limit = self._limits.get(kind)
        if limit is None:
            self._limits.note(kind, _Limit(max(1, size // 2)))
            return
        if size > limit.size:
            limit.probe_after = min(2 * limit.probe_after, MAX_PROBE_AFTER)
        else:
            limit.size = max(1, size // 2)
        limit.num_fitted = 0
        self._limits.move_to_end(kind)


def run_in_parts(
    run: Callable[[int, int], ResultT], num_items: int, max_items: int, limits: MemoryLimits, kind: Hashable
) -> list[ResultT]:
    """Call `run(start, stop)` over 0 to `num_items`, in as few parts as `max_items` and memory allow.

    Return its results in order. Raises what `run` raises, save for running out of memory with more than one item: then
    smaller parts are tried.
    """
    results: list[ResultT] = []
    start = 0
    while start < num_items:
        size = int(min(num_items - start, max(1, max_items), limits.allowed(kind)))
        try:
            results.append(run(start, start + size))
        except Exception as error:
            if size == 1 or not is_out_of_memory(error):
                raise
            limits.ran_out(kind, size)
        else:
            limits.fitted(kind, size)
            start += size
    return results
