"""Claims on loading what is missing: one holder loads an entry, and the others wait for it. Pure, the clock is given.

A claim is for loaders that cannot see each other, such as the nodes of a cluster; within one table an entry that is
coming is its own claim. A loader renews its claims while it loads: a slow disk is not a dead node, and a dead node's
claims end soon. One that takes very long does not hold up the others for ever: one more may load then, later another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

RENEW_S: Final = 1.5
CLAIM_S: Final = 6.0  # a holder that has not renewed for so long is not loading any more
SLOW_S: Final = 30.0  # after so long a second holder may load, after twice that a third, then a fourth


@dataclass(slots=True)
class _LoadingClaim:
    since_s: float
    until_s: float


class LoadingClaims:
    """The loaders of missing entries. Not thread-safe: the order of calls is what makes the first the first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._claims: dict[str, dict[str, _LoadingClaim]] = {}  # by key and holder
        self._by_holder: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def keys(self) -> list[str]:
        """Return the keys that have claims, ended ones perhaps among them."""
        return list(self._claims)

    def loader(self, key: str) -> str | None:
        """Return the holder that has been loading it longest; None when another one may load."""
        found = self._alive(key)
        if not found:
            return None
        holder, oldest = min(found.items(), key=lambda item: item[1].since_s)
        num_allowed = 1 + int((self._clock() - oldest.since_s) // SLOW_S).bit_length()
        return holder if len(found) >= num_allowed else None

    def claim(self, key: str, holder: str) -> bool:
        """Return whether it is this holder's to load, from now on or still."""
        now_s = self._clock()
        found = self._alive(key)
        if holder not in found:
            if self.loader(key) is not None:
                return False
            self._by_holder.setdefault(holder, set()).add(key)
        since_s = found[holder].since_s if holder in found else now_s
        self._claims.setdefault(key, found)[holder] = _LoadingClaim(since_s, now_s + CLAIM_S)
        return True

    def renew(self, keys: Iterable[str], holder: str) -> None:
        """Extend the claims of a holder that is still loading; one that ended is claimed anew if nobody else has it."""
        for key in keys:
            self.claim(key, holder)

    def settle(self, holder: str, keys: Iterable[str]) -> None:
        """End claims of a holder that has loaded them, or has failed to."""
        mine = self._by_holder.get(holder)
        for key in mine.intersection(keys) if mine else ():
            self._end(key, holder)

    def forget(self, holder: str) -> None:
        """End all claims of a holder that is gone or has begun anew."""
        for key in list(self._by_holder.get(holder, ())):
            self._end(key, holder)

    def _alive(self, key: str) -> dict[str, _LoadingClaim]:
        found = self._claims.get(key, {})
        now_s = self._clock()
        for holder in [holder for holder, claim in found.items() if claim.until_s <= now_s]:
            self._end(key, holder)
        return self._claims.get(key, {})

    def _end(self, key: str, holder: str) -> None:
        found, mine = self._claims[key], self._by_holder[holder]
        del found[holder]
        mine.discard(key)
        if not found:
            del self._claims[key]
        if not mine:
            del self._by_holder[holder]
