"""Turning requests away: how long one may wait at the most, and when one that was refused is to come back. Pure.

Time is a parameter everywhere.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MAX_TOLD_S: Final = 300.0  # beyond it nobody knows
_FORGOTTEN_S: Final = 3.0  # a kind of request that does not come any more holds nobody back
_LEAST_SHARE: Final = 0.1
_MAX_TENANTS: Final = 1024
_MAX_MARKS: Final = 16_384
_BELIEVED: Final = 4.0  # requests: before anything was seen, all are believed to come back
_REMEMBERED: Final = 2048.0  # requests, about
_GRACE_S: Final = 2.0  # `Retry-After` is in whole seconds
_GRACE_SHARE: Final = 0.25
_SOON_SHARE: Final = 0.05


class FairWait:
    """The longest wait that lets requests of all kinds in.

    In an overload, those that run briefly would be let in until only they can still be in time. So nobody may wait for
    a larger part of its time than the longest requests that come can. Those that could hardly wait at all do not count.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._noted_s = -math.inf

    def bound_s(self, budget_s: float, latency_s: float, now_s: float) -> float:
        """Return how long a request that comes now may wait that has `budget_s` and takes `latency_s` of them."""
        own = 1 - latency_s / budget_s
        self._share += (1 - self._share) * -math.expm1(min(0.0, self._noted_s - now_s) / _FORGOTTEN_S)
        self._noted_s = now_s
        if own >= _LEAST_SHARE:
            self._share = min(self._share, own)
        return min(own, self._share) * budget_s


@dataclass(slots=True)
class _Promise:
    told_s: float  # when
    at_s: float
    is_kept: bool = False  # its client came back

    def has_come(self, now_s: float) -> bool:
        """Return whether a request of the same mark is the same client's. One that comes at once is another's."""
        return now_s >= self.told_s + _SOON_SHARE * (self.at_s - self.told_s)

    @property
    def end_s(self) -> float:
        """The time after which its client does not come any more."""
        return self.at_s + _GRACE_S + _GRACE_SHARE * (self.at_s - self.told_s)


class ReturnRate:
    """The part of those who were told to come back that does. Clients are alike, whichever replicas they need."""

    def __init__(self) -> None:
        self._num_back, self._num_gone = _BELIEVED, 0.0

    @property
    def share(self) -> float:
        return self._num_back / (self._num_back + self._num_gone)

    def note_end(self, is_back: bool) -> None:
        """Count one who came, or whose time is over."""
        self._num_back += is_back
        self._num_gone += not is_back
        total = self._num_back + self._num_gone
        if total > _REMEMBERED:
            self._num_back *= _REMEMBERED / total
            self._num_gone *= _REMEMBERED / total


class ToldTimes:
    """The times at which those who were refused by one pool of replicas were told to come back.

    A place in time is kept for each of them, so that those who come back do not come all at once. Not all do: the part
    that does is learned from the marks of requests, and a place is as long as it is likely to be used. Who comes back
    too early keeps the place.
    """

    def __init__(self, returns: ReturnRate) -> None:
        self._returns = returns
        # By tenant: until when, at which share of those who return.
        self._kept: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._promises: dict[int, _Promise] = {}  # by mark
        self._ends: list[tuple[float, int]] = []  # a heap: when nobody comes back any more

    def note_arrival(self, mark: int, now_s: float) -> None:
        """Count a request that comes, if it was told to."""
        while self._ends and self._ends[0][0] <= now_s:
            _, ended = heapq.heappop(self._ends)
            promise = self._promises.get(ended)
            if promise and promise.end_s <= now_s:
                del self._promises[ended]
                if not promise.is_kept:
                    self._returns.note_end(False)
        promise = self._promises.get(mark)
        if promise and not promise.is_kept and promise.has_come(now_s):
            promise.is_kept = True
            self._returns.note_end(True)

    def is_due(self, mark: int, now_s: float) -> bool:
        """Return whether a request that comes now was told to come by now. Nobody who was told is before it."""
        promise = self._promises.get(mark)
        return promise is not None and now_s >= promise.at_s

    def before_s(self, tenant: str, now_s: float) -> float:
        """Return how long the replicas will be busy with those who were told to come before a request that was not."""
        until_s, share = self._kept.get(tenant, (now_s, 1.0))
        return max(0.0, until_s - now_s) * min(1.0, self._returns.share / share)

    def tell(self, mark: int, tenant: str, soonest_s: float, cost_s: float, now_s: float) -> float:
        """Return in how many seconds a request is to come back that could be served in `soonest_s` if none came before.

        `cost_s` is the time that it keeps the replicas busy; mark 0 says nothing of it. Below 0, `soonest_s` is the
        time for which it could have waited.
        """
        promise = self._promises.get(mark)
        if promise is None or not promise.has_come(now_s):
            before_s = self.before_s(tenant, now_s)
            at_s = now_s + max(0.0, soonest_s, min(soonest_s + before_s, MAX_TOLD_S))
            self._kept.pop(tenant, None)
            share = self._returns.share
            self._kept[tenant] = now_s + min(before_s + cost_s * share, MAX_TOLD_S), share
            if len(self._kept) > _MAX_TENANTS:
                self._kept.popitem(last=False)
        else:
            at_s = max(now_s + soonest_s, promise.at_s)
        is_new = promise is None or promise.at_s != at_s
        if mark and is_new and len(self._ends) < _MAX_MARKS:
            again = self._promises[mark] = _Promise(now_s, at_s, promise is not None and promise.is_kept)
            heapq.heappush(self._ends, (again.end_s, mark))
        return at_s - now_s

    def free_places(self) -> None:
        """Keep no more places: nobody comes."""
        self._kept.clear()
