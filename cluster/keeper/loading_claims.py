"""Who is reading an extent from storage, so that the others can wait for it. Pure, with the clock given.

One node reading an extent is enough for a cluster. Who reads says so again and again while it does: a slow disk is not
a dead node, and a dead node's claim ends soon. A reader that takes very long does not hold up the others for ever: then
one more may read, and later another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

RENEW_S: Final = 1.5
CLAIM_S: Final = 6.0  # a node that has not renewed for so long is not reading any more
SLOW_S: Final = 30.0  # after so long a second node may read, after twice that a third, then a fourth


@dataclass(slots=True)
class _Claim:
    since_s: float
    until_s: float


class LoadingClaims:
    """Not thread-safe: the registry decides one after the other, which is what makes the first the first."""

    def __init__(self, clock: Callable[[], float], claim_s: float = CLAIM_S) -> None:
        self._clock = clock
        self._claim_s = claim_s
        self._claims: dict[str, dict[str, _Claim]] = {}  # by extent and node
        self._by_node: dict[str, set[str]] = {}

    def reader(self, id_: str) -> str | None:
        """The node that has been reading it longest; None when another one may read."""
        found = self._alive(id_)
        if not found:
            return None
        node_id, oldest = min(found.items(), key=lambda item: item[1].since_s)
        num_allowed = 1 + int((self._clock() - oldest.since_s) // SLOW_S).bit_length()
        return node_id if len(found) >= num_allowed else None

    def claim(self, id_: str, node_id: str) -> bool:
        """Whether it is this node's to read, from now on or still."""
        now_s = self._clock()
        found = self._alive(id_)
        if node_id not in found:
            if self.reader(id_) is not None:
                return False
            self._by_node.setdefault(node_id, set()).add(id_)
        since_s = found[node_id].since_s if node_id in found else now_s
        self._claims.setdefault(id_, found)[node_id] = _Claim(since_s, now_s + self._claim_s)
        return True

    def renew(self, ids: Iterable[str], node_id: str) -> None:
        """The node is still reading them."""
        for id_ in ids:
            self.claim(id_, node_id)

    def settle(self, node_id: str, ids: Iterable[str]) -> None:
        """The node has them, or has failed to get them."""
        mine = self._by_node.get(node_id)
        for id_ in mine.intersection(ids) if mine else ():
            self._end(id_, node_id)

    def forget(self, node_id: str) -> None:
        """The node is gone or has begun anew."""
        for id_ in list(self._by_node.get(node_id, ())):
            self._end(id_, node_id)

    def _alive(self, id_: str) -> dict[str, _Claim]:
        found = self._claims.get(id_, {})
        now_s = self._clock()
        for node_id in [node_id for node_id, claim in found.items() if claim.until_s <= now_s]:
            self._end(id_, node_id)
        return self._claims.get(id_, {})

    def _end(self, id_: str, node_id: str) -> None:
        found, mine = self._claims[id_], self._by_node[node_id]
        del found[node_id]
        mine.discard(id_)
        if not found:
            del self._claims[id_]
        if not mine:
            del self._by_node[node_id]
