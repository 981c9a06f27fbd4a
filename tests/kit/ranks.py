"""Ranks of one group as threads of the test: their collectives are real, and take no start of processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import distributed

from deployments.engines.ranks.group import RankGroup
from deployments.engines.ranks.layout import RankLayout

T = TypeVar("T")
BOUND_S = 60.0


def run_ranks(layout: RankLayout, rank_of: Callable[[RankGroup], T], bound_s: float = BOUND_S) -> list[T]:
    """Return the results of `rank_of` by rank. Raises the first rank's error, when all have ended."""
    store = distributed.HashStore()

    def run(rank: int) -> T:
        group = RankGroup.join(layout, rank, store, bound_s=bound_s)
        try:
            return rank_of(group)
        except BaseException:
            group.leave()
            raise

    with ThreadPoolExecutor(layout.size) as threads:
        return [one.result() for one in [threads.submit(run, rank) for rank in range(layout.size)]]
