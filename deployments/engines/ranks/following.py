"""The steps of a group: engines of rank 0 say them by a channel each, and the followers' loop hands them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deployments.engines.ranks.group import Plan, RankGroup, RankLost

TO = "to"  # the key of a plan that names its channel
Follower = Callable[[Plan], None]


@dataclass(frozen=True, slots=True)
class RankChannel:
    """A group as one engine has it: what it says goes to the followers of its name."""

    group: RankGroup
    name: str

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
