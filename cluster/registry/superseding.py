"""The end of a control plane that was superseded: nobody uses it, and another config of its cluster is in use. Pure.

A config that is deployed over another one brings a registry, keepers and a controller of its own, and those of the
config before have nothing to do once the last of its replicas has drained. The only one never ends itself, however
long Serve is away: another one has to be in use. Two cannot end for each other: one that has just been used answers
so for `IN_USE_S`, which together with `ASK_S`, how old such an answer may be, is less than `UNUSED_S`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

UNUSED_S: Final = 30.0  # no replica for so long: it has ended, or Serve was slow to start it again
EXPECTED_S: Final = 600.0  # replicas that were deployed may wait so long for the resources of others
IN_USE_S: Final = 10.0  # a look at the keepers, and one that was late
ASK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a control plane, told by its registry: no replica was seen for `unused_s`.

    `is_expected`: since then it started, or was deployed, and no replica has come yet. `is_unclear`: a keeper does not
    say whether it has replicas.
    """

    unused_s: float
    is_expected: bool = False
    is_unclear: bool = False

    @property
    def has_ended(self) -> bool:
        """Return whether the replicas have gone, and none is waited for any more."""
        return self.unused_s >= (EXPECTED_S if self.is_expected else UNUSED_S) and not self.is_unclear


def is_superseded(own: Use, others: Iterable[Use]) -> bool:
    """Return whether the control plane ends, by its own use and that of the others of its cluster."""
    return own.has_ended and any(other.unused_s <= IN_USE_S and not other.is_expected for other in others)


class UseBook:
    """The record of when replicas were seen. Lives on one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = clock()
        self._is_expected = True
        self._num_watching = 0

    def note(self) -> None:
        """Note that there is a replica."""
        self._last_s, self._is_expected = self._clock(), False

    def expect(self) -> None:
        """Note that replicas are about to come."""
        self._last_s, self._is_expected = self._clock(), True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note that there is a replica, for the length of the block."""
        self._num_watching += 1
        try:
            yield
        finally:
            self._num_watching -= 1
            self.note()

    def use(self, *, is_unclear: bool) -> Use:
        """Return the use at this moment."""
        if self._num_watching:
            self.note()
        return Use(self._clock() - self._last_s, self._is_expected, is_unclear)
