"""A clock that only a test moves."""

from __future__ import annotations


class Clock:
    """Seconds that pass when a test says so: `clock.now_s += 5`. Given wherever the product takes a clock."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
