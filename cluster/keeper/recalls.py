"""Which extents a node wants back from whom, and who does not answer. Pure: the clock is given.

A replica keeps what it has mapped under a lease that the node may call back. It asks for recalls by a long poll in a
thread of its own, and answers one with the next poll: nothing is sent while nobody needs room, and no request of the
replica stands before the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.keeper.records import Recall

# An answer takes a few milliseconds. A replica that is just collecting garbage, or importing, stops for 300.
ANSWER_WITHIN_S: Final = 0.5
CHECK_S: Final = 0.05


@dataclass(eq=False)
class _Line:
    """What one holder is to be asked, was asked and has not answered, and how long it has been silent."""

    wake: Callable[[], None]
    number: int = 0
    wanted: dict[str, bool] = field(default_factory=dict)  # by id: overdue
    asked: set[str] = field(default_factory=set)
    silent_s: float = 0.0

    @property
    def is_due(self) -> bool:
        return bool(self.wanted or self.asked)


class Recalls:
    """The lines to the holders that answer recalls. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._checked_s = clock()

    def __contains__(self, holder: object) -> bool:
        return holder in self._lines

    @property
    def is_waiting(self) -> bool:
        """Return whether an answer is due."""
        return any(line.is_due for line in self._lines.values())

    def open_poll(self, holder: str, wake: Callable[[], None]) -> tuple[int, set[str]]:
        """Return the number of this poll, which ends the one before, and the ids that it answers.

        `wake` is called when there is something to hear.
        """
        line = self._lines.setdefault(holder, _Line(wake))
        answered, line.asked = line.asked, set()
        line.silent_s = 0.0
        line.number += 1
        line.wake()
        line.wake = wake
        return line.number, answered

    def is_open(self, holder: str, number: int) -> bool:
        """Return whether the poll has nothing to tell yet and no newer one has taken its place."""
        line = self._lines.get(holder)
        return line is not None and line.number == number and not line.wanted

    def take_recall(self, holder: str, number: int) -> Recall:
        """Return what that poll has to tell, which has to be answered from now on."""
        line = self._lines.get(holder)
        if line is None or line.number != number or not line.wanted:
            return Recall()
        recall = Recall(tuple(line.wanted), any(line.wanted.values()))
        line.asked, line.wanted = set(line.wanted), {}
        return recall

    def call(self, id_: str, holders: Iterable[str], *, is_overdue: bool = False) -> None:
        """Ask these holders for the extent, once until they have answered. Holders that answer nobody are ignored."""
        for holder in holders:
            line = self._lines.get(holder)
            if line is None or id_ in line.asked:
                continue
            if not self.is_waiting:
                self._checked_s = self._clock()
            line.wanted[id_] = is_overdue or line.wanted.get(id_, False)
            line.wake()

    def end(self, holder: str) -> None:
        """Forget a holder that has died; its poll ends."""
        if line := self._lines.pop(holder, None):
            line.wake()

    def silent(self) -> list[str]:
        """Return who has not answered for too long. Call it every `CHECK_S` while somebody waits for answers.

        Time in which nobody called, because this process stood still, is nobody's silence.
        """
        now_s = self._clock()
        passed_s, self._checked_s = min(now_s - self._checked_s, 2 * CHECK_S), now_s
        for line in self._lines.values():
            line.silent_s = line.silent_s + passed_s if line.is_due else 0.0
        return [holder for holder, line in self._lines.items() if line.silent_s > ANSWER_WITHIN_S]
