"""The deaths of a cluster's processes that a client is told of, with their times: who waited then asks again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

# The deaths of which a client learns, by what it waits for; docs/operations/nodes.md says so.
TOLD: Final = {"answer": ("haproxy",), "stream": ("haproxy", "ingress", "worker"), "job": ("haproxy", "ingress")}
LATER_S: Final = 1.0  # connections that were kept are found broken after the death


class Deaths:
    """The deaths so far, each with the time until all was whole again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spans: list[tuple[str, float]] = []

    def begin(self, victim: str) -> None:
        self._spans.append((victim, float("inf")))

    def end(self) -> None:
        """The cluster is whole after the last death."""
        victim, _ = self._spans[-1]
        self._spans[-1] = victim, self._clock() + LATER_S

    def explain(self, what: str, since_s: float) -> bool:
        """Return whether a death of which this is told was going on then, or came after."""
        return any(victim in TOLD[what] and end_s >= since_s for victim, end_s in self._spans)
