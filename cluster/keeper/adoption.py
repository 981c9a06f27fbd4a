"""Adoption: a restarted keeper gets back what replicas still have mapped, before it reads anything again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import ray
import xxhash

from cluster.keeper.audit import DamageLog
from cluster.keeper.held_extents import HeldExtents
from cluster.keeper.records import HeldExtent, HeldOffer
from cluster.ray_calls import get
from weights.memory.pages import ByteArray

# Replicas tell a restarted keeper what they hold within a second; until then storage is not asked. On a busy machine
# they take longer, but hardly all of them: each offer gives the next one so much more time.
ADOPTION_S: Final = 3.0

logger = logging.getLogger("atelier.keeper")


class Adoption:
    """The offers of replicas to a keeper that was restarted. Thread-safe. Nobody else gets what is damaged."""

    def __init__(
        self,
        held: HeldExtents,
        damage: DamageLog,
        *,
        verify: bool,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._held = held
        self._damage = damage
        self._verify = verify
        self._clock = clock
        self._wait_s = wait_s
        self._until_s = clock() + wait_s
        self._counting = threading.Lock()
        self.adopted_bytes = 0

    def wait_for(self, ids: Sequence[str]) -> None:
        """Wait until all of them are here, or no offer is to be expected any more."""
        while (left_s := self._until_s - self._clock()) > 0:
            if self._held.wait_until_known(ids, left_s):
                return

    def take_offers(self, holder: str, offers: Sequence[HeldOffer]) -> None:
        """Take over the offers, with their leases on the very copies of the holder."""
        self._expect_more()
        for offer in offers:
            self._expect_more()
            if self._held.lease_same(offer.extent.id, offer.ref, holder, offer.num_leases):
                continue
            view = self._sound_view(offer, holder)
            if view is None:
                unknown = HeldExtent(offer.extent, offer.ref, np.empty(0, np.uint8), "adopted")
                self._held.add_detached(unknown, holder, offer.num_leases)
            elif self._held.adopt(HeldExtent(offer.extent, offer.ref, view, "adopted"), holder, offer.num_leases):
                with self._counting:
                    self.adopted_bytes += offer.extent.nbytes

    def _expect_more(self) -> None:
        """Give offers more time, as long as somebody may still wait: an offer that comes late has lost."""
        now_s = self._clock()
        if now_s < self._until_s:
            self._until_s = max(self._until_s, now_s + self._wait_s)

    def _sound_view(self, offer: HeldOffer, holder: str) -> ByteArray | None:
        """Return the bytes; None for what cannot be mapped here, or is damaged."""
        try:
            view: ByteArray = get(offer.ref, ADOPTION_S)
        except ray.exceptions.RayError as error:
            logger.warning("extent %s of %s cannot be adopted: %s", offer.extent.id, holder, error)
            return None
        if self._verify and xxhash.xxh3_128_hexdigest(view.data) != offer.extent.checksum:
            self._damage.note_damage(offer.extent.id, offer.ref, f"as {holder} has it")
            return None
        return view
