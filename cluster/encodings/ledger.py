"""The ledger of shared encodings: entries, claims and waiters. Pure: no Ray, no torch, and the clock is given.

The first holder that asks for a missing encoding gets a claim on it, and all others wait for what it publishes. A
claim ends when its time is over, unless it is renewed, and in any case after `max_claim_s`: then it is the next
waiter's. So an encoding is computed once for all that want it, and nobody waits for a holder that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Generic

from cluster.encodings.eviction import CostAwareEviction
from cluster.encodings.records import Answer, Payload, SharedStats, entries_per_gib
from weights.residency.claims import LoadingClaims

CLAIM_S: Final = 3.0  # of silence; whoever lives renews it several times in that
MAX_CLAIM_S: Final = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class Waiter(Generic[Payload]):
    """A holder that waits. `tell` is called once, with `found` or `yours`; it must not call the ledger."""

    holder: str
    tell: Callable[[Answer[Payload]], None]


@dataclass(slots=True)
class _Computation(Generic[Payload]):
    """A computation under way, and the waiters for its result. Its holder has the claim."""

    holder: str
    waiters: dict[Waiter[Payload], None] = field(default_factory=dict)  # in the order in which they came


class EncodingLedger(Generic[Payload]):
    """Encodings with the claims on missing ones. Not thread-safe. `expire` has to be called now and then."""

    def __init__(
        self,
        max_bytes: int,
        *,
        claim_s: float = CLAIM_S,
        max_claim_s: float = MAX_CLAIM_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._eviction = CostAwareEviction(max_bytes)
        self._claims = LoadingClaims(clock, claim_s=claim_s, slow_s=max_claim_s)
        self._clock = clock
        self._payloads: dict[str, Payload] = {}
        self._computing: dict[str, _Computation[Payload]] = {}
        self._hits = self._claimed = self._waits = self._published = self._abandoned = self._lost = self._refused = 0

    def find_or_claim(self, digest: str, holder: str) -> Answer[Payload]:
        """Return the encoding or a claim on it. A holder that asks again keeps its claim: the answer was lost."""
        if digest in self._payloads:
            self._hits += 1
            self._eviction.touch(digest, self._clock())
            return Answer("found", self._payloads[digest])
        self._expire(digest)
        if self._computing.setdefault(digest, _Computation(holder)).holder != holder:
            return Answer("wait")
        return self._give_claim(digest, holder)

    def wait(self, digest: str, waiter: Waiter[Payload]) -> Answer[Payload] | None:
        """Return an answer, or None when it comes through `tell`, until `leave`."""
        answer = self.find_or_claim(digest, waiter.holder)
        if answer.state != "wait":
            return answer
        self._waits += 1
        self._computing[digest].waiters[waiter] = None
        return None

    def stop_waiting(self, digest: str, waiter: Waiter[Payload]) -> None:
        """Stop waiting; nothing happens when it did not wait."""
        if digest in self._computing:
            self._computing[digest].waiters.pop(waiter, None)

    def note_uses(self, digests: Iterable[str]) -> None:
        """Count uses of copies elsewhere: what every replica has a copy of is popular, although nobody asks."""
        for digest in digests:
            if digest in self._payloads:
                self._eviction.touch(digest, self._clock())

    def renew(self, digests: Iterable[str], holder: str) -> None:
        """Prolong the holder's claims. Claims that are another's by now stay as they are."""
        self._claims.renew((digest for digest in digests if self._is_holder(digest, holder)), holder)

    def publish(self, digest: str, payload: Payload, nbytes: int, cost_s: float, *, keep: bool = False) -> None:
        """Keep an encoding and tell all waiters. Anybody may: after a lost claim the encoding is the same."""
        self._published += 1
        if digest in self._payloads:
            self._eviction.touch(digest, self._clock(), keep=keep)
            return
        self._end_claim(digest, payload)
        self._payloads[digest] = payload
        for victim in self._eviction.add(digest, nbytes, cost_s, self._clock(), keep=keep):
            del self._payloads[victim]
        self._refused += digest not in self._payloads

    def hand_out(self, digest: str, payload: Payload) -> None:
        """Tell all waiters an encoding that cannot be kept."""
        self._published += 1
        self._refused += 1
        self._end_claim(digest, payload)

    def abandon(self, digest: str, holder: str) -> None:
        """Pass on the claim of a holder that cannot compute it; perhaps the next one can."""
        if self._is_holder(digest, holder):
            self._abandoned += 1
            self._pass_on(digest)

    def forget_all(self) -> None:
        """Drop all entries, which may be wrong. Claims stay: their holders publish only what is sound."""
        for digest in self._payloads:
            self._eviction.remove(digest)
        self._payloads.clear()

    def expire(self) -> None:
        """Pass on the claims of silent holders."""
        for digest in list(self._computing):
            self._expire(digest)

    def stats(self) -> SharedStats:
        """Return a snapshot."""
        entries = len(self._payloads)
        return SharedStats(
            hits=self._hits,
            claimed=self._claimed,
            waits=self._waits,
            published=self._published,
            abandoned=self._abandoned,
            lost_claims=self._lost,
            refused=self._refused,
            evicted=self._eviction.num_evicted,
            waiting=sum(len(one.waiters) for one in self._computing.values()),
            in_flight=len(self._computing),
            entries=entries,
            kept=self._eviction.num_kept,
            nbytes=self._eviction.nbytes,
            kept_bytes=self._eviction.kept_bytes,
            max_bytes=self._eviction.max_bytes,
            entries_per_gib=entries_per_gib(entries, self._eviction.nbytes),
        )

    def _is_holder(self, digest: str, holder: str) -> bool:
        return digest in self._computing and self._computing[digest].holder == holder

    def _give_claim(self, digest: str, holder: str) -> Answer[Payload]:
        self._claims.claim(digest, holder)
        self._claimed += 1
        return Answer("yours")

    def _expire(self, digest: str) -> None:
        if digest in self._computing and self._claims.loader(digest) is None:
            self._lost += 1
            self._pass_on(digest)

    def _pass_on(self, digest: str) -> None:
        computation = self._computing[digest]
        self._claims.settle(computation.holder, [digest])
        if not computation.waiters:
            del self._computing[digest]
            return
        waiter = next(iter(computation.waiters))
        del computation.waiters[waiter]
        computation.holder = waiter.holder
        waiter.tell(self._give_claim(digest, waiter.holder))

    def _end_claim(self, digest: str, payload: Payload) -> None:
        if computation := self._computing.pop(digest, None):
            self._claims.settle(computation.holder, [digest])
            for waiter in computation.waiters:
                waiter.tell(Answer("found", payload))
