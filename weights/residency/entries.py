"""The book of one memory tier: its entries and leases, and the room that is made for more.

A tier is an adapter: it moves the bytes and keeps what it made of them in `Entry.thing`. The book decides and counts.
Not thread-safe; callbacks must be quick and must not call the book.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic

from weights.residency.leases import Entry, Leases, Thing
from weights.residency.policy import value_of
from weights.residency.sizes import DistinctBytes
from weights.residency.sizes import Size as Size
from weights.residency.sizes import bytes_of as bytes_of

MAX_NAMED: Final = 5  # holders in a refusal


@dataclass(frozen=True, slots=True)
class RoomPlan(Generic[Thing]):
    """A plan of what goes for room.

    `evict` is free to go, in order of value; `recall` goes once its holders have given it back. `missing_bytes` >
    0: there is no room even then, and both are empty.
    """

    evict: tuple[Entry[Thing], ...] = ()
    recall: tuple[Entry[Thing], ...] = ()
    missing_bytes: int = 0

    @property
    def lacking_bytes(self) -> int:
        """Bytes that nobody can give; if there are none, those that holders have to give back."""
        return self.missing_bytes or sum(entry.nbytes for entry in self.recall)


class Book(Leases[Thing]):
    """Entries under a byte budget. What has a firm lease, is pinned or is coming is never evicted."""

    def plan_room(self, wanted: Mapping[str, Size]) -> RoomPlan[Thing]:
        """Plan room for what is missing of `wanted`; what is here of it stays.

        The least valuable go first. Nothing goes that could stay: without any one of the victims the room would be
        too small. Costs the logarithm of what is here for each victim; a plan that fails where entries share parts
        looks at all of them.
        """
        missing = [size for key, size in wanted.items() if key not in self.entries]
        for size in missing:
            self._used.add(size)
        try:
            return self._plan_room(wanted) if missing else RoomPlan()
        finally:
            for size in missing:
                self._used.remove(size)

    def plan_shrink(self) -> RoomPlan[Thing]:
        """Plan what goes for the budget itself."""
        return self._plan_room(())

    def shrink(self) -> None:
        """Evict and recall what is over the budget, as far as it may go."""
        plan = self.plan_shrink()
        if plan.missing_bytes:
            budget_bytes = self.budget_bytes
            self.budget_bytes += plan.missing_bytes
            try:
                plan = self.plan_shrink()
            finally:
                self.budget_bytes = budget_bytes
        self.evict(plan.evict)
        self.recall(plan.recall)

    def plan_prefetch(self, wanted: Mapping[str, Size]) -> tuple[list[str], tuple[Entry[Thing], ...]]:
        """Return which of `wanted`, in that order, come in, and what goes for them.

        It fits beside everything that is worth as much or more; smaller ones after one that does not fit may still
        come in. What another prefetch brought for a use to come stays, or two of them could go on displacing each
        other; so does everything that is leased.
        """
        now_s, rates = self._clock(), self._order.rates(self._bytes_of_origin)
        take: list[str] = []
        looked_at: list[Entry[Thing]] = []
        ascending: list[Entry[Thing]] = []  # what may go; the first `num_victims` do
        num_victims = 0
        try:
            for key, size in wanted.items():
                if key in self.entries:
                    continue
                value = self._past.get(key, self._never_used).touch(now_s).value(now_s) * rates[None]
                self._used.add(size)
                end = num_victims
                while self._used.total > self.budget_bytes:
                    if end == len(ascending):
                        if (least := self._order.take_least(rates, now_s)) is None:
                            break
                        looked_at.append(least)
                        if least.is_leased or least.is_expected or least.key in wanted:
                            continue
                        ascending.append(least)
                    if value_of(ascending[end], rates, now_s) >= value:
                        break
                    self._used.remove(ascending[end].size)
                    end += 1
                if self._used.total <= self.budget_bytes:
                    take.append(key)
                    num_victims = end
                else:
                    self._used.remove(size)
                    for victim in ascending[num_victims:end]:
                        self._used.add(victim.size)
            victims = ascending[:num_victims]
            evict = self._spare_the_valuable(victims)
            for key in take:
                self._used.remove(wanted[key])
            for victim in evict:
                self._used.add(victim.size)
            return take, evict
        finally:
            self._order.add_all(looked_at)

    def bytes_beside_pins(self, *wanted: Mapping[str, Size]) -> int:
        """Return the bytes of all this and of what is pinned and here: more than the budget never fits."""
        together = {key: size for some in wanted for key, size in some.items()}
        together |= {key: entry.size for key in self._pinned if (entry := self.entries.get(key)) is not None}
        distinct = DistinctBytes()
        for size in together.values():
            distinct.add(size)
        return distinct.total

    def describe_holders(self) -> str:
        """Say who has the room: the leases, the greatest first, what is pinned, and what is coming for nobody yet."""
        holders = [f"{holder} ({nbytes} bytes)" for holder, nbytes in self._leased_by.most_common(MAX_NAMED)]
        if len(self._leased_by) > MAX_NAMED:
            holders[-1] += f" and {len(self._leased_by) - MAX_NAMED} more"
        text = f"leased by: {', '.join(holders) or 'nobody'}"
        pinned_bytes = sum(entry.nbytes for key in self._pinned if (entry := self.entries.get(key)) is not None)
        coming_bytes = sum(entry.nbytes for entry in self._coming if entry.is_current and not entry.is_leased)
        for label, nbytes in (("pinned", pinned_bytes), ("prefetches under way", coming_bytes)):
            if nbytes:
                text += f"; {label}: {nbytes} bytes"
        return text

    def _plan_room(self, spare: Collection[str]) -> RoomPlan[Thing]:
        """Plan what goes of all but `spare` for what is counted as used now. Leaves the books as they were."""
        lacking_bytes = self._used.total - self.budget_bytes
        if lacking_bytes <= 0:
            return RoomPlan()
        if not self._num_divided:
            kept = (entry for key in spare if (entry := self.entries.get(key)) is not None)
            may_go_bytes = self._movable_bytes - sum(entry.nbytes for entry in kept if entry.is_movable)
            if lacking_bytes > may_go_bytes:
                return RoomPlan(missing_bytes=lacking_bytes - may_go_bytes)
        return self._choose_victims(spare)

    def _choose_victims(self, spare: Collection[str]) -> RoomPlan[Thing]:
        now_s, rates = self._clock(), self._order.rates(self._bytes_of_origin)
        looked_at: list[Entry[Thing]] = []
        victims: list[Entry[Thing]] = []
        try:
            while self._used.total > self.budget_bytes:
                if (least := self._order.take_least(rates, now_s)) is None:
                    break
                looked_at.append(least)
                if least.key not in spare:
                    victims.append(least)
                    self._used.remove(least.size)
            missing_bytes = self._used.total - self.budget_bytes
            if missing_bytes > 0:
                for victim in victims:
                    self._used.add(victim.size)
                return RoomPlan(missing_bytes=missing_bytes)
            needed = self._spare_the_valuable(victims)
            for victim in needed:
                self._used.add(victim.size)
        finally:
            self._order.add_all(looked_at)
        return RoomPlan(
            tuple(entry for entry in needed if not entry.is_leased),
            tuple(entry for entry in needed if entry.is_leased),
        )

    def _spare_the_valuable(self, victims: Sequence[Entry[Thing]]) -> tuple[Entry[Thing], ...]:
        """Count in again, of victims in order of value, all counted out, those that need not go; return the others."""
        needed: list[Entry[Thing]] = []
        for victim in reversed(victims):
            self._used.add(victim.size)
            if self._used.total > self.budget_bytes:
                self._used.remove(victim.size)
                needed.append(victim)
        return tuple(reversed(needed))
