"""The ranks of a worker's replica: rank 0 is the replica itself, and each other rank is an actor that follows it.

Orders to build and release go to the followers as calls of Ray; the steps of what was built, and its tensors, by the
ranks' own group. The ranks live and die together: where one is lost, the replica's process ends. Ray ends its actors
with it, Serve starts another replica, and whoever waited for an answer is served elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.process.ray_calls import call_actor, get
from configs.cluster import ClusterConfig, WorkerConfig
from deployments.engines.ranks.group import RankGroup, RankLost
from deployments.engines.ranks.layout import adjacent_places
from deployments.engines.ranks.links import listening
from deployments.modules.builder import BuildOrder
from deployments.replicas.replica_end import ReplicaEnd
from deployments.services.rank_follower import RankFollower, address_of, described_rank, join_group

START_S: Final = 180.0  # for a follower's process and its imports
BUILD_S: Final = 600.0  # for weights that come over a slow network; a follower that is lost is noticed at once
PING_S: Final = 10.0


class WorkerRanks:
    """Rank 0's view of the others. When one is lost, it ends the replica by `end`.

    Builds and releases may come from any thread; a group's steps from one.
    """

    def __init__(self, group: RankGroup, followers: Sequence[Any], end: ReplicaEnd) -> None:
        """`followers` are the actors of ranks 1 and on."""
        self.group = group
        self._followers = tuple(followers)
        self._end = end
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._watching: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def building(self, order: BuildOrder) -> Iterator[int]:
        """Have the followers build their parts during the body, and give the number by which steps name them.

        Raises what a follower raises; then, or if the body fails, nobody keeps a part.
        """
        with self._lock:
            number = next(self._numbers)
            calls = self._calls(lambda actor: call_actor(actor, RankFollower.build, number, order))
        try:
            yield number
            self._await_all(calls, BUILD_S)
        except BaseException:
            self.release(number)
            raise

    def release(self, number: int) -> None:
        """Have the followers let go of what they built by this number. Nobody waits for it: calls keep their order."""
        with self._lock:
            self._calls(lambda actor: call_actor(actor, RankFollower.release, number))

    def watch(self) -> None:
        """Have the followers follow, and end the replica when one of them stops. On the event loop."""
        for number, actor in enumerate(self._followers, 1):
            self._watching.append(asyncio.ensure_future(self._watch(number, actor)))

    async def check(self) -> None:
        """Raise TimeoutError when a follower does not answer, and Ray's error when it is gone."""
        async with asyncio.timeout(PING_S):
            await asyncio.gather(*(call_actor(actor, RankFollower.describe) for actor in self._followers))

    async def describe(self, weights_bytes: int) -> dict[str, Any]:
        """Return a description of the ranks as JSON-able values; of one that does not answer, its number alone.

        `weights_bytes` are those of rank 0's parts of what all ranks compute.
        """
        found = [self._describe(number, actor) for number, actor in enumerate(self._followers, 1)]
        layout = self.group.layout
        own = described_rank(self.group, weights_bytes)
        return {
            "cfg": layout.cfg,
            "sequence": layout.sequence,
            "tensor": layout.tensor,
            "processes": [own, *await asyncio.gather(*found)],
        }

    async def _describe(self, number: int, actor: Any) -> dict[str, Any]:
        try:
            async with asyncio.timeout(PING_S):
                found: dict[str, Any] = await call_actor(actor, RankFollower.describe)
                return found
        except (TimeoutError, ray.exceptions.RayError):
            return {"rank": number}

    async def _watch(self, number: int, actor: Any) -> None:
        try:
            await call_actor(actor, RankFollower.follow)
            reason = "it has ended"
        except asyncio.CancelledError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0] or repr(error)
        self._end.now(f"rank {number} is lost: {reason}")

    def _calls(self, call: Callable[[Any], Any]) -> list[Any]:
        return [call(actor) for actor in self._followers]

    def _await_all(self, calls: Sequence[Any], timeout_s: float) -> None:
        for rank, ref in enumerate(calls, 1):
            try:
                get(ref, timeout_s)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                reason = str(error).partition("\n")[0]
                self._end.now(f"rank {rank} is lost: {reason}")
                raise RankLost(f"rank {rank} is lost: {reason}", [rank]) from None


async def start_ranks(config: ClusterConfig, settings: WorkerConfig, name: str, end: ReplicaEnd) -> WorkerRanks:
    """Start the followers of this replica, each in its place of the replica's placement group, and meet them.

    Raises RankLost or TimeoutError when they do not come, and what keeps a follower from its node's weights.
    """
    group = ray.util.get_current_placement_group()
    places = await asyncio.to_thread(_places_of, group)
    actors = {rank: _start_follower(settings, group, places[rank]) for rank in range(1, settings.ranks.size)}
    async with asyncio.timeout(START_S):
        opening = (
            call_actor(actor, RankFollower.open, config, settings, f"{name}, rank {rank}")
            for rank, actor in actors.items()
        )
        await asyncio.gather(*opening)
    meeting, listener = listening(address_of(settings.ranks))
    coming = [call_actor(actor, RankFollower.join, rank, meeting) for rank, actor in actors.items()]
    joining = asyncio.ensure_future(asyncio.to_thread(join_group, settings, 0, meeting, listener))
    await asyncio.gather(joining, *coming)
    ranks = WorkerRanks(joining.result(), [*actors.values()], end)
    ranks.watch()
    return ranks


def _places_of(group: Any) -> list[int]:
    """Return the bundle of each rank: Ray puts bundles on nodes in any order. Blocks."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return adjacent_places([nodes[bundle] for bundle in range(len(nodes))])


def _start_follower(settings: WorkerConfig, group: Any, bundle: int) -> Any:
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    actor = ray.remote(RankFollower).options(
        num_cpus=settings.num_cpus, num_gpus=settings.num_gpus, scheduling_strategy=place
    )
    return actor.remote()
