"""The keepers of all nodes that have replicas: started for the first of them, found again by name, asked all at once.

Nothing here is lost with the process: keepers are named after their node and say themselves what they hold. Pins and
a budget set at run time end with a keeper's process, so the keeper that follows is told of them again.

What is pinned is models. Which extents that means is looked up anew each round, so pins follow a model to its next
version and end with it, and what two of them share stays as long as one is pinned.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actor_names import NAMESPACE, keeper_name, keeper_node
from cluster.errors import KeeperFailed
from cluster.keeper.actor import keeper_class
from cluster.keeper.records import ResidentExtent
from cluster.peers.fetch_queue import Located, Question
from cluster.peers.peer_protocol import PeerAddress
from cluster.registry.residency_map import ExtentDirectory
from weights.residency.claims import LoadingClaims

ANSWER_TIMEOUT_S: Final = 10.0
IDLE_S: Final = 600.0  # a keeper whose node has had no replica for so long ends
FIRST_PAUSE_S: Final = 1.0  # before a keeper that could not start is started again; doubles each time
LONGEST_PAUSE_S: Final = 60.0
RELEASE_PAUSES_S: Final = (0.0, 0.05, 0.2, 0.5, 1.0)

logger = logging.getLogger("atelier.registry")


@dataclass(frozen=True, slots=True)
class _Life:
    """A keeper's process as last seen, and what it was told to pin."""

    generation: str
    budget_bytes: int
    pins: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class _Failure:
    """A keeper that could not start: how often in a row, and when it is tried again."""

    reason: str
    num_times: int
    again_s: float


class NodeKeepers:
    """Lives on one event loop. `key` is the cluster's, `options` are the keepers' own beside packs, budget, registry.

    Without `budget_bytes`, each keeper takes its share of its own node's object store. `extents_of` has the extent ids
    of the served version of each model.
    """

    def __init__(
        self,
        packs: str,
        budget_bytes: int | None,
        registry: str,
        options: Mapping[str, Any] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        *,
        key: str = "",
        extents_of: Callable[[], Mapping[str, Sequence[str]]] = dict,
    ) -> None:
        self._packs = packs
        self._budget_bytes = budget_bytes
        self._registry = registry
        self._options = options
        self._clock = clock
        self._key = key
        self._failures: dict[str, _Failure] = {}
        self._needed_s: dict[str, float] = {}  # by node: when there was last a replica
        self._claims = LoadingClaims(clock)
        self._handles: dict[str, Any] = {}
        self._lives: dict[str, _Life] = {}
        self._extents_of = extents_of
        self._pinned: set[str] = set()  # models
        self._refreshing: dict[str, asyncio.Lock] = {}
        self._residency = ExtentDirectory(self._claims, clock, random.Random())

    def handles(self) -> Mapping[str, Any]:
        return self._handles

    def get(self, node_id: str) -> Any:
        """The keeper of a node, started when there is none; it stays as long as the node has replicas.

        Raises KeeperFailed while one that could not start may not be tried again.
        """
        self._needed_s[node_id] = self._clock()
        if node_id not in self._handles:
            failure = self._failures.get(node_id)
            if failure and self._clock() < failure.again_s:
                raise KeeperFailed(failure.reason)
            self._handles[node_id] = self._start(node_id)
        return self._handles[node_id]

    async def follow(self, alive: Collection[str], running: Collection[str] = ()) -> None:
        """Know what the keepers of these nodes hold; what other nodes had is gone.

        `running` are nodes with a keeper that this process may not have started. One that could not start is started
        again when its time has come; one whose node has had no replica for a while ends.
        """
        for node_id in (self._handles.keys() | self._failures.keys()) - set(alive):
            self._end(node_id)  # Ray would look for its node for ever
        due = [node_id for node_id, failure in self._failures.items() if self._clock() >= failure.again_s]
        for node_id in {*due, *(set(running) - self._failures.keys())} & set(alive) - self._handles.keys():
            self.get(node_id)
        await asyncio.gather(*map(self._look_at, list(self._handles)))
        for node_id in [found for found in self._handles if self._clock() - self._needed_s[found] >= IDLE_S]:
            logger.info("no replica on node %s any more: its keeper ends", node_id)
            self._end(node_id)

    async def pin(self, model: str, pinned: bool) -> dict[str, Any]:
        """On every node, those that join or restart later included. What went wrong by node, None for nothing."""
        if pinned:
            self._pinned.add(model)
        else:
            self._pinned.discard(model)
        nodes = list(self._handles)
        answers = await asyncio.gather(*map(self._refresh, nodes), return_exceptions=True)
        return dict(zip(nodes, answers, strict=True))

    async def drop(self, ids: Sequence[str]) -> list[str]:
        """On every node. Who still holds some of them a moment later: a replica's release may be on its way."""
        left: list[ResidentExtent] = []
        for pause_s in RELEASE_PAUSES_S:
            await asyncio.sleep(pause_s)
            await self.ask("drop", list(ids))
            nodes = (await self.ask("residents", list(ids))).values()
            left = [extent for found in nodes if not isinstance(found, BaseException) for extent in found]
            if not left:
                break
        pinned = ["a pin"] if any(extent.pinned for extent in left) else []
        return sorted({holder for extent in left for holder in extent.holders}) + pinned

    async def _look_at(self, node_id: str) -> None:
        try:
            await self._refresh(node_id)
        except ray.exceptions.ActorDiedError as error:
            self._failed(node_id, error)
        except Exception as error:  # it is starting, or Ray restarts it: the next round asks again
            logger.info("keeper of node %s does not answer: %s", node_id, error)

    def _failed(self, node_id: str, error: ray.exceptions.ActorDiedError) -> None:
        """Ray does not restart an actor whose constructor has failed; another one takes its place later."""
        before = self._failures.get(node_id)
        num_times = before.num_times + 1 if before else 1
        pause_s = min(FIRST_PAUSE_S * 2 ** (num_times - 1), LONGEST_PAUSE_S)
        reason = f"the keeper of node {node_id} cannot start: {_last_line(error)}"
        logger.warning("%s; tried again in %.0f s", reason, pause_s)
        self._handles.pop(node_id, None)
        self._forget(node_id)
        self._failures[node_id] = _Failure(reason, num_times, self._clock() + pause_s)

    def _end(self, node_id: str) -> None:
        keeper = self._handles.pop(node_id, None)
        if keeper is not None:
            ray.kill(keeper)
        self._failures.pop(node_id, None)
        self._needed_s.pop(node_id, None)
        self._refreshing.pop(node_id, None)
        self._lives.pop(node_id, None)
        self._forget(node_id)

    def _forget(self, node_id: str) -> None:
        self._residency.forget(node_id)

    async def _refresh(self, node_id: str) -> None:
        """Know the keeper's life, and have it know what is pinned. One at a time: a keeper that was told two things at
        once may do the older one last. Raises when it does not answer."""
        async with self._refreshing.setdefault(node_id, asyncio.Lock()), asyncio.timeout(ANSWER_TIMEOUT_S):
            keeper = self._handles[node_id]
            stats, last = await keeper.stats.remote(), self._lives.get(node_id)
            self._failures.pop(node_id, None)
            if stats.num_holders:
                self._needed_s[node_id] = self._clock()
            life = _Life(stats.generation, stats.budget_bytes, last.pins if last else {})
            if last is None or last.generation != life.generation:
                life = await self._meet(node_id, life, last, stats.address)
            self._lives[node_id] = life
            if (pins := self._pins(life)) != life.pins:
                await keeper.pin.remote(pins)
                self._lives[node_id] = replace(life, pins=pins)

    async def _meet(self, node_id: str, life: _Life, last: _Life | None, address: str | None) -> _Life:
        """A keeper outlives this process: one that is new here has perhaps told another what it holds and pins."""
        keeper = self._handles[node_id]
        if last:
            self._claims.forget(node_id)  # what it was loading died with it
            if last.budget_bytes != life.budget_bytes:
                await keeper.set_budget.remote(last.budget_bytes)
        residents, pins = await asyncio.gather(keeper.residents.remote(), keeper.pins.remote())
        if last is None:
            self._pinned.update(pins)
        self.report(node_id, address, [extent.id for extent in residents], [], full=True)
        return _Life(life.generation, last.budget_bytes if last else life.budget_bytes, pins)

    def _pins(self, life: _Life) -> dict[str, Sequence[str]]:
        """Extents by pinned model. When this process is new it has not looked at all models yet: a keeper that knows
        one knows its extents as well."""
        extents_of = self._extents_of()
        found = {model: extents_of.get(model, life.pins.get(model, ())) for model in self._pinned}
        return {model: tuple(ids) for model, ids in found.items() if ids}

    def report(
        self,
        node_id: str,
        address: str | None,
        added: Sequence[str],
        removed: Sequence[str],
        full: bool,
        load: int = 0,
    ) -> None:
        """What a keeper has got and given up; `full`: it has exactly `added`. `address` is host:port of its server."""
        self._residency.report(node_id, _parsed(address), added, removed, full=full, load=load)

    def locate(self, node_id: str, question: Question, load: int = 0) -> Located:
        """See `ExtentDirectory.locate`."""
        return self._residency.locate(node_id, question, load)

    def renew_claims(self, node_id: str, ids: Sequence[str]) -> None:
        """The node is still reading them from storage."""
        self._claims.renew(ids, node_id)

    def nodes(self) -> list[str]:
        """Those that have keepers or should have, sorted."""
        return sorted(self._handles.keys() | self._failures.keys())

    async def ask(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float = ANSWER_TIMEOUT_S,
        nodes: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """What each keeper answers, by node; an exception for one that does not, or cannot start.

        Only those of `nodes` are asked, when that is given.
        """
        asked = self.nodes() if nodes is None else nodes
        handles = {node: self._handles[node] for node in asked if node in self._handles}
        failures = {
            node: KeeperFailed(self._failures[node].reason)
            for node in asked
            if node in self._failures and node not in handles
        }

        async def call(keeper: Any) -> Any:
            async with asyncio.timeout(timeout_s):
                return await getattr(keeper, method).remote(*arguments)

        answers = await asyncio.gather(*map(call, handles.values()), return_exceptions=True)
        return dict(zip(handles, answers, strict=True)) | failures

    def _start(self, node_id: str) -> Any:
        actor = keeper_class().options(
            name=keeper_name(self._key, node_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        registry = (self._registry, NAMESPACE)
        return actor.remote(self._packs, self._budget_bytes, node_id, registry=registry, **self._options)


def alive_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def nodes_with_keeper(key: str) -> list[str]:
    """Of the cluster of that key, whoever started them."""
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [node_id for name in names if (node_id := keeper_node(key, name)) is not None]


def _last_line(error: ray.exceptions.ActorDiedError) -> str:
    """Of a traceback, what was raised."""
    return [line.strip() for line in str(error).splitlines() if line.strip()][-1]


def _parsed(address: str | None) -> PeerAddress | None:
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    return PeerAddress(host.strip("[]"), int(port))
