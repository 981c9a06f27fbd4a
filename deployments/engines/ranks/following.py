"""The steps of a group: engines of rank 0 say them by a channel each, and the followers' loop hands them on."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.engines.ranks.group import Plan, RankGroup, RankLost

TO = "to"  # the key of a plan that names its channel
Follower = Callable[[Plan], None]


@dataclass(slots=True)
class KeptThings:
    """The things of rank 0 that followers keep as well, by numbers: as long as rank 0 has each of them."""

    _things: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    _next: Iterator[int] = field(default_factory=itertools.count)

    def number_of(self, thing: Any) -> tuple[int, bool]:
        """Return the number of a thing, and whether it is new: then the followers get the thing with it."""
        for number, known in self._things.items():
            if known() is thing:
                return number, False
        number = next(self._next)
        self._things[number] = weakref.ref(thing)
        return number, True

    def gone(self) -> list[int]:
        """Return the numbers of things that are no more, for the followers to let go of; once."""
        found = [number for number, known in self._things.items() if known() is None]
        for number in found:
            del self._things[number]
        return found


@dataclass(frozen=True, slots=True)
class RankChannel:
    """A group as its engines have it: what they say goes to the followers of its name, which keep some of it."""

    group: RankGroup
    name: str
    kept: KeptThings = field(default_factory=KeptThings, compare=False)

    def say(self, plan: Plan) -> None:
        """Tell the followers of a step. Of rank 0."""
        self.group.say({TO: self.name, **plan})

    def broken(self, error: Exception) -> RankLost:
        """End the group, whose other ranks wait within a step that failed here, and return what to raise."""
        self.group.leave()
        return RankLost(f"rank {self.group.rank} failed in a step: {error}", [self.group.rank])


def follow(group: RankGroup, followers: Mapping[str, Follower]) -> None:
    """Run what rank 0 says, until it ends the group. `followers` are by name, and may come and go between plans.

    Raises:
        RankLost: a rank is gone, or this one failed: the group has ended.
    """
    while (plan := group.hear()) is not None:
        try:
            followers[plan[TO]](plan)
        except RankLost:
            raise
        except Exception as error:
            raise RankChannel(group, plan.get(TO, "")).broken(error) from error
