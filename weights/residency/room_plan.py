"""Plans of what leaves a memory tier for what is to come in. They read the `Contents` and change nothing of it.

A plan costs the logarithm of what is here for each victim; one that fails where entries share parts looks at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from weights.residency.contents import Contents, Entry, Thing
from weights.residency.entry_table import EntryTable
from weights.residency.policy import value_of
from weights.residency.sizes import DistinctBytes, Size


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


def plan_room(table: Contents[Thing], wanted: Mapping[str, Size]) -> RoomPlan[Thing]:
    """Plan room for what is missing of `wanted`; what is here of it stays.

    The least valuable go first. Nothing goes that could stay: without any one of the victims the room would be too
    small.
    """
    missing = [size for key, size in wanted.items() if key not in table.entries]
    if not missing:
        return RoomPlan()
    used = DistinctBytes(table.used)
    for size in missing:
        used.add(size)
    return _plan(table, used, table.budget_bytes, wanted)


def plan_shrink(table: Contents[Thing], budget_bytes: int) -> RoomPlan[Thing]:
    """Plan what goes to keep no more than these bytes."""
    return _plan(table, DistinctBytes(table.used), budget_bytes, ())


def shrink(table: EntryTable[Thing], budget_bytes: int | None = None) -> None:
    """Evict and recall what is over the table's budget, or another one, as far as it may go."""
    target_bytes = table.budget_bytes if budget_bytes is None else budget_bytes
    plan = plan_shrink(table, target_bytes)
    if plan.missing_bytes and not table.elsewhere:
        plan = plan_shrink(table, target_bytes + plan.missing_bytes)
    elif plan.missing_bytes:
        left = DistinctBytes(table.used)
        with table.order.ascending(table.rates(), table.now_s()) as movable:
            for entry in movable:
                left.remove(entry.size)
        elsewhere = {place: max(nbytes, left.elsewhere[place]) for place, nbytes in table.elsewhere.items()}
        plan = _plan(table, DistinctBytes(table.used), max(target_bytes, left.total), (), elsewhere)
    table.evict(plan.evict)
    table.recall(plan.recall)


def plan_prefetch(table: Contents[Thing], wanted: Mapping[str, Size]) -> tuple[list[str], tuple[Entry[Thing], ...]]:
    """Return which of `wanted`, in that order, come in, and what goes for them.

    It fits beside everything that is worth as much or more; smaller ones after one that does not fit may still come
    in. What another prefetch brought for a use to come stays, or two of them could go on displacing each other; so
    does everything that is leased.
    """
    now_s, rates = table.now_s(), table.rates()
    used = DistinctBytes(table.used)
    take: list[str] = []
    ascending: list[Entry[Thing]] = []  # what may go; the first `num_victims` do
    num_victims = 0
    with table.order.ascending(rates, now_s) as candidates:
        movable = (one for one in candidates if not (one.is_leased or one.is_expected or one.key in wanted))
        for key, size in wanted.items():
            if key in table.entries:
                continue
            value = table.past.of(key).touch(now_s).value(now_s) * rates[None]
            used.add(size)
            end = num_victims
            while used.over(table.budget_bytes, table.elsewhere) > 0:
                if end == len(ascending):
                    if (least := next(movable, None)) is None:
                        break
                    ascending.append(least)
                if value_of(ascending[end], rates, now_s) >= value:
                    break
                used.remove(ascending[end].size)
                end += 1
            if used.over(table.budget_bytes, table.elsewhere) <= 0:
                take.append(key)
                num_victims = end
            else:
                used.remove(size)
                for victim in ascending[num_victims:end]:
                    used.add(victim.size)
    return take, _needed(ascending[:num_victims], used, table.budget_bytes, table.elsewhere)


def fits_beside_pins(table: Contents[Thing], *wanted: Mapping[str, Size]) -> bool:
    """Return whether the budget has room for all this and for what is pinned and here: else it never fits."""
    together = {key: size for some in wanted for key, size in some.items()}
    together |= {key: entry.size for key in table.pinned if (entry := table.entries.get(key)) is not None}
    distinct = DistinctBytes()
    for size in together.values():
        distinct.add(size)
    return distinct.over(table.budget_bytes, table.elsewhere) <= 0


def _plan(
    table: Contents[Thing],
    used: DistinctBytes,
    budget_bytes: int,
    spare: Collection[str],
    elsewhere: Mapping[str, int] | None = None,
) -> RoomPlan[Thing]:
    """Plan what goes of all but `spare` so that what is `used` fits; `elsewhere` are other budgets than the table's."""
    elsewhere = table.elsewhere if elsewhere is None else elsewhere
    lacking_bytes = used.over(budget_bytes, elsewhere)
    if lacking_bytes <= 0:
        return RoomPlan()
    if not used.has_parts:
        kept = (entry for key in spare if (entry := table.entries.get(key)) is not None)
        movable_bytes = table.movable_bytes - sum(entry.nbytes for entry in kept if entry.is_movable)
        if lacking_bytes > movable_bytes:
            return RoomPlan(missing_bytes=lacking_bytes - movable_bytes)
    victims: list[Entry[Thing]] = []
    with table.order.ascending(table.rates(), table.now_s()) as candidates:
        while used.over(budget_bytes, elsewhere) > 0 and (least := next(candidates, None)) is not None:
            if least.key not in spare:
                victims.append(least)
                used.remove(least.size)
    if (lacking_bytes := used.over(budget_bytes, elsewhere)) > 0:
        return RoomPlan(missing_bytes=lacking_bytes)
    needed = _needed(victims, used, budget_bytes, elsewhere)
    return RoomPlan(
        tuple(entry for entry in needed if not entry.is_leased),
        tuple(entry for entry in needed if entry.is_leased),
    )


def _needed(
    victims: Sequence[Entry[Thing]], used: DistinctBytes, budget_bytes: int, elsewhere: Mapping[str, int]
) -> tuple[Entry[Thing], ...]:
    """Return those of the victims that have to go. All are out of `used`, in order of value; the others come back."""
    needed: list[Entry[Thing]] = []
    for victim in reversed(victims):
        used.add(victim.size)
        if used.over(budget_bytes, elsewhere) > 0:
            used.remove(victim.size)
            needed.append(victim)
    return tuple(reversed(needed))
