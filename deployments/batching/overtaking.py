"""Who went first although they came later: the count that keeps anybody from starving. Pure."""

from __future__ import annotations

from bisect import bisect_right, insort


class Overtaking:
    """Requests are known by their number in the order of coming.

    A request that came after another and has started has passed it. So how often a waiting request was passed is the
    number of higher ones that have started, and the oldest that waits was passed most: it alone has to be watched.
    Numbers below the oldest are dropped, which leaves no more than were allowed to pass it.
    """

    def __init__(self) -> None:
        self._started: list[int] = []

    def __len__(self) -> int:
        return len(self._started)

    def passed(self, number: int) -> int:
        """How many went first."""
        return len(self._started) - bisect_right(self._started, number)

    def start(self, number: int) -> None:
        insort(self._started, number)

    def forget_before(self, oldest: int) -> None:
        """Nobody older waits any more."""
        del self._started[: bisect_right(self._started, oldest)]
