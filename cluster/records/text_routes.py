"""The text encoder replica that a text goes to: the same one for equal texts, so that it is computed once. Pure.

The replica is chosen by rendezvous hashing (Thaler and Ravishankar, 1998): when one comes or goes, only its own texts
move. Loads are bounded (Mirrokni, Thorup and Zadimoghaddam, 2018): a replica with many more texts to compute than the
mean passes new ones on. Equal texts count once and stay together: they wait for the same computation.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

__all__ = ["FEW_TEXTS", "SPREAD", "TextCalls", "encoder_for", "is_route", "route_of"]

SPREAD: Final = 1.25  # times the mean load is the most that a replica gets
FEW_TEXTS: Final = 16  # share a forward or two: no reason to go elsewhere
_PREFIX: Final = "texts:"  # no replica's name begins so


def route_of(texts: Sequence[str | tuple[int, ...]]) -> str:
    """Return the route of a request: the number of its texts, which stay together, and their digest."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        # Python draws no seed for the hash of numbers: it is the same in every process.
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else b"ids %d" % hash(text)
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return f"{_PREFIX}{len(texts)}:{digest.hexdigest()}"


def is_route(name: str) -> bool:
    """Return whether it is a route, and not a replica's name."""
    return name.startswith(_PREFIX)


def encoder_for(route: str, replicas: Collection[str], loads: Mapping[str, int]) -> str:
    """Return the replica of a route: the first in its own order of all `replicas` whose load is within the bound.

    `loads` are numbers of texts to compute. One replica is always below the bound, which is above the mean.
    """
    mean = (1 + sum(loads.get(name, 0) for name in replicas)) / len(replicas)
    most = max(FEW_TEXTS, math.ceil(SPREAD * mean))
    ranked = sorted(replicas, key=lambda name: hashlib.blake2b(f"{name} {route}".encode(), digest_size=8).digest())
    return next(name for name in ranked if loads.get(name, 0) < most)


class TextCalls:
    """The calls with texts that one process has under way. A text that is under way is joined where it is."""

    def __init__(self) -> None:
        self.loads: Counter[str] = Counter()  # different texts, by replica
        self._calls: Counter[tuple[str, str]] = Counter()  # by route and replica
        self._replica_of: dict[str, str] = {}  # by route

    def begin(self, route: str, replicas: Collection[str]) -> str:
        """Count a call, and return which of the `replicas` it goes to."""
        name = self._replica_of.get(route)
        if name is None or name not in replicas:
            name = self._replica_of[route] = encoder_for(route, replicas, self.loads)
        if not self._calls[route, name]:
            self.loads[name] += _num_texts(route)
        self._calls[route, name] += 1
        return name

    def end(self, route: str, name: str) -> None:
        """Count a call as over, however it ended."""
        self._calls[route, name] -= 1
        if self._calls[route, name]:
            return
        del self._calls[route, name]
        self.loads[name] -= _num_texts(route)
        if not self.loads[name]:
            del self.loads[name]
        if self._replica_of.get(route) == name:
            del self._replica_of[route]


def _num_texts(route: str) -> int:
    return int(route.removeprefix(_PREFIX).partition(":")[0])
