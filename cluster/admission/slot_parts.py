"""The slots of shared replicas that one of several ingresses owns, and its claims for more. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from cluster.admission.places import Places
from cluster.admission.pool import Pool
from cluster.admission.records import PoolClaims, PoolPart, ReplicaUse, SlotClaim
from cluster.admission.replica_choice import possible_replicas
from cluster.admission.replica_slots import NO_PART

_NO_PART: Final = PoolPart({}, 0.0)


class SlotParts:
    """The parts of the pools' replicas that a queue owns, of `num_sharing`; one that is alone owns everything."""

    def __init__(self, pools: Mapping[str, Pool], places: Places, num_sharing: int) -> None:
        self.are_shared = num_sharing > 1
        self._pools = pools
        self._places = places
        self._bound_part = 1 / num_sharing
        self._parts: Mapping[str, PoolPart] = {}
        self._held_until_s = math.inf
        self._is_suspended = False
        self._last_urgency: dict[str, float] = {}  # by pool: the most urgent waiting priority at the last look

    def own_part(self, bound: int) -> int:
        """Return the queue's own part of a bound of all."""
        return max(1, math.floor(bound * self._bound_part)) if self.are_shared else bound

    def set_parts(self, parts: Mapping[str, PoolPart], bound_part: float, now_s: float) -> None:
        """Own these slots from now on, by pool, and no others, and this part of the bounds."""
        self._parts, self._bound_part = parts, bound_part
        self._set_all(now_s)

    def drop(self, now_s: float) -> None:
        """Own nothing until `set_parts`. The part of the bounds stays."""
        self.set_parts({}, self._bound_part, now_s)

    def hold(self, until_s: float) -> None:
        """Own the slots until a time of the clock; nothing starts on shared replicas after it."""
        self._held_until_s = until_s

    def keep_or_let_go(self, now_s: float) -> None:
        """Start nothing while the slots are not known to be its own. They stay its own, as far as anyone knows."""
        if (now_s >= self._held_until_s) != self._is_suspended:
            self._is_suspended = not self._is_suspended
            self._set_all(now_s)

    def set_part(self, name: str, now_s: float) -> None:
        """Own the part of a pool whose replicas may have changed."""
        pool = self._pools[name]
        if self.are_shared:
            part = self._parts.get(name, _NO_PART)
            pool.slots.set_parts(part.replicas, part.capacity, now_s, is_suspended=self._is_suspended)
        pool.look_at_all()

    def _set_all(self, now_s: float) -> None:
        for name in self._pools:
            self.set_part(name, now_s)

    def take_news(self) -> bool:
        """Return whether a change since the last look calls for a new split of slots at once."""
        has_news = False
        for name, pool in self._pools.items() if self.are_shared else ():
            urgency = pool.lanes.most_urgent
            has_news |= urgency < self._last_urgency.get(name, math.inf) or pool.slots.has_overdrawn
            self._last_urgency[name], pool.slots.has_overdrawn = urgency, False
            if pool.has_ended and self._parts.get(name, _NO_PART).is_wanted:
                has_news |= pool.slots.replicas.has_room(pool.least_share)
            pool.has_ended = False
        return has_news

    def claims(self, now_s: float) -> dict[str, PoolClaims]:
        """Return by pool the slots that the queue holds and wants."""
        found = {}
        for name, pool in self._pools.items():
            owned = self._parts.get(name, _NO_PART).replicas
            uses = {id_: ReplicaUse(0.0, 0.0, {}, 0.0, is_listed=False) for id_ in owned} | pool.slots.uses()
            if uses:
                found[name] = PoolClaims(
                    {id_: replace(use, limit=owned.get(id_, NO_PART).limit) for id_, use in uses.items()},
                    tuple(
                        SlotClaim(priority, tenant, pool.lanes.config.weight_of(tenant), share, (replica,))
                        for (replica, priority, tenant), share in pool.slots.running_shares().items()
                    ),
                    self._waiting_claims(pool, now_s),
                    pool.least_share,
                    pool.offered.per_s(now_s)[0],
                    pool.num_started,
                )
        return found

    def _waiting_claims(self, pool: Pool, now_s: float) -> tuple[SlotClaim, ...]:
        """Return claims of waiting requests, together for those that may start on the same replicas.

        Requests of one tenant, priority and model all count like the first: thousands may wait.
        """
        found: dict[tuple[tuple[str, ...] | None, int, str], SlotClaim] = {}
        for priority, front, number in pool.lanes.lines():
            demand = front.demand
            options = self._places.options(front, (), now_s)
            names = None
            if options.among is not None:
                names = possible_replicas(pool.slots.replicas, demand.model, options, now_s)
            if names == ():
                continue
            key, age_s = (names, priority, demand.tenant), now_s - front.arrived_s
            before = found.get(key)
            share = number * demand.share + (before.share if before else 0.0)
            if before and before.oldest_age_s > age_s:
                found[key] = replace(before, share=share)
            else:
                weight = pool.lanes.config.weight_of(demand.tenant)
                found[key] = SlotClaim(priority, demand.tenant, weight, share, names, age_s, demand.share)
        return tuple(found.values())
