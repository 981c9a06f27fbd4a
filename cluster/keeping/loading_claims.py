"""Who is getting an extent that nobody has yet, so that the others can wait for it. Pure, with the clock given.

One node reading an extent is enough for a cluster: the first who asks for it is expected to get it, and says so by
reporting it as held, or as removed when it could not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

CLAIM_S: Final = 60.0  # a node that has said nothing for so long is not getting it


@dataclass(frozen=True, slots=True)
class _Claim:
    node_id: str
    until_s: float


class LoadingClaims:
    """Not thread-safe: the registry decides one after the other, which is what makes the first the first."""

    def __init__(self, clock: Callable[[], float], claim_s: float = CLAIM_S) -> None:
        self._clock = clock
        self._claim_s = claim_s
        self._claims: dict[str, _Claim] = {}

    def claim(self, ids: Iterable[str], node_id: str) -> dict[str, str]:
        """The other node that is getting each extent; what nobody is getting is `node_id`'s from now on."""
        now_s = self._clock()
        others = {}
        for id_ in ids:
            found = self._claims.get(id_)
            if found and found.node_id != node_id and found.until_s > now_s:
                others[id_] = found.node_id
            else:
                self._claims[id_] = _Claim(node_id, now_s + self._claim_s)
        return others

    def settle(self, node_id: str, ids: Iterable[str]) -> None:
        """The node has them, or has failed to get them."""
        for id_ in ids:
            if (found := self._claims.get(id_)) and found.node_id == node_id:
                del self._claims[id_]

    def forget(self, node_id: str) -> None:
        """The node is gone or has begun anew."""
        self._claims = {id_: found for id_, found in self._claims.items() if found.node_id != node_id}
