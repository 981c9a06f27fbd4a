"""The keepers of all nodes that have replicas: started with the first replica, found by name, called all at once.

Nothing here is lost with the process: keepers are named after their nodes and report what they hold. Pins and a budget
set at run time end with a keeper's process, so they are sent to its successor again.

Pins are of models. Their extents are looked up anew in each round, so a pin follows its model to the next version and
ends with it, and an extent of two models stays while one of them is pinned.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.keeper.actor import KeeperSettings, NodeKeeper, keeper_class
from cluster.keeper.records import ResidentExtent
from cluster.peers.protocol import PeerAddress, ResidencyReport
from cluster.records.actor_names import NAMESPACE, keeper_name, registry_of
from cluster.records.errors import KeeperFailed
from cluster.registry.extent_locations import ResidencyMap
from cluster.start.node_checks import running_code
from weights.records.manifest import ExtentRef

ANSWER_TIMEOUT_S: Final = 10.0
IDLE_S: Final = 60.0  # a keeper whose node has had no replica for this long ends: Ray removes no node that has one
FIRST_PAUSE_S: Final = 1.0  # before a keeper that could not start is started again; doubles each time
LONGEST_PAUSE_S: Final = 60.0
RELEASE_PAUSES_S: Final = (0.0, 0.05, 0.2, 0.5, 1.0)

logger = logging.getLogger("atelier.registry")

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Life:
    """The process of a keeper as last seen, and the extents that it was asked to pin, by model."""

    generation: str
    budget_bytes: int
    pins: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class _FailedStart:
    """A keeper that could not start `num_times` in a row, and when it is started again."""

    reason: str
    num_times: int
    again_s: float


class KnownModels(Protocol):
    """The models that there are."""

    @property
    def by_model(self) -> Mapping[str, Sequence[str]]:
        """The extent ids of the served version of each model."""
        ...

    def is_known(self, model: str) -> bool:
        """Return whether there is a model of that id, served or not yet."""
        ...


class NodeKeepers:
    """The keepers of a cluster, by node. Lives on one event loop.

    `key` is the cluster's (`cluster_key`). Without `budget_bytes`, each keeper takes its
    share of its own node's object store. What a keeper still pins for models that are not known ends.
    `draining_nodes`, which may block, returns the nodes that end as soon as nothing runs on them.
    `residency` is the map of what the keepers hold.
    """

    def __init__(
        self,
        packs: str,
        budget_bytes: int | None,
        key: str,
        settings: KeeperSettings,
        clock: Callable[[], float] = time.monotonic,
        *,
        models: KnownModels | None = None,
        draining_nodes: Callable[[], Collection[str]] = set,
    ) -> None:
        self._packs = packs
        self._budget_bytes = budget_bytes
        self._settings = settings
        self._clock = clock
        self._key = key
        self._failures: dict[str, _FailedStart] = {}
        self._needed_s: dict[str, float] = {}  # by node: when there was last a replica
        self._handles: dict[str, Any] = {}
        self._lives: dict[str, _Life] = {}
        self._models = models
        self._draining_nodes = draining_nodes
        self._silent: set[str] = set()  # nodes
        self._holding: set[str] = set()  # nodes whose keeper has given leases
        self._readers: set[str] = set()  # nodes that have the store's folder
        self._pinned: set[str] = set()  # models
        self._refreshing: dict[str, asyncio.Lock] = {}
        self.residency = ResidencyMap(clock, random.Random())

    def keeper(self, node_id: str) -> Any:
        """Return the keeper's handle, started if need be; the keeper stays as long as its node has replicas.

        Raises KeeperFailed while one that could not start may not be tried again.
        """
        self._needed_s[node_id] = self._clock()
        return self._begin(node_id)

    @property
    def may_have_holders(self) -> bool:
        """Return whether a keeper has replicas with leases, or does not answer."""
        return bool(self._holding or self._silent)

    def _begin(self, node_id: str) -> Any:
        if node_id not in self._handles:
            failure = self._failures.get(node_id)
            if failure and self._clock() < failure.again_s:
                raise KeeperFailed(failure.reason)
            self._handles[node_id] = self._start(node_id)
        return self._handles[node_id]

    async def follow(self, alive: Collection[str], running: Collection[str] = ()) -> None:
        """Look at the keepers of the nodes that are `alive`, and forget those of other nodes.

        `running` are nodes with a keeper that this process may not have started. A keeper that could not start is
        started again when its time has come; one whose node has had no replica for `IDLE_S` ends, and at once where
        the node drains, which waits for it.
        """
        for node_id in (self._handles.keys() | self._failures.keys()) - set(alive):
            self._end(node_id)  # Ray would look for its node for ever
        due = [node_id for node_id, failure in self._failures.items() if self._clock() >= failure.again_s]
        for node_id in {*due, *(set(running) - self._failures.keys())} & set(alive) - self._handles.keys():
            self._needed_s.setdefault(node_id, self._clock())
            self._begin(node_id)
        await asyncio.gather(*map(self._look_at, list(self._handles)))
        if unneeded := self._handles.keys() - self._holding:
            draining = set(await asyncio.to_thread(self._draining_nodes)) - self._silent
            for node_id in unneeded:
                if node_id in draining or self._clock() - self._needed_s[node_id] >= IDLE_S:
                    logger.info("no replica on node %s any more: its keeper ends", node_id)
                    self._end(node_id)

    async def set_pinned(self, model: str, pinned: bool) -> dict[str, Any]:
        """Pin or unpin a model on every node, including those that join later. Return exceptions or None by node."""
        if pinned:
            self._pinned.add(model)
        else:
            self._pinned.discard(model)
        nodes = list(self._handles)
        answers = await asyncio.gather(*map(self._refresh, nodes), return_exceptions=True)
        return dict(zip(nodes, answers, strict=True))

    def read_for_others(self, extents: Iterable[ExtentRef], own_node: str) -> None:
        """Let nodes with the store's folder read these for nodes without it. Does not wait.

        `own_node` is the registry's, which writes the store: it gets a keeper when no other node can read. Each extent
        has one reader as long as readers stay the same. What a reader has no room for, it does not read.
        """
        readers = sorted(self._readers & self._handles.keys())
        if not readers:
            self.keeper(own_node)
            readers = [own_node]
        by_reader: dict[str, list[ExtentRef]] = {}
        for extent in extents:
            reader = max(readers, key=lambda node_id: zlib.crc32(f"{extent.id} {node_id}".encode()))
            by_reader.setdefault(reader, []).append(extent)
        for reader, found in by_reader.items():
            self._handles[reader].prefetch.remote(found)

    async def drop(self, ids: Sequence[str]) -> list[str]:
        """Drop extents on every node. Return the remaining holders a moment later: a release may be under way."""
        left: list[ResidentExtent] = []
        for pause_s in RELEASE_PAUSES_S:
            await asyncio.sleep(pause_s)
            await self.call_keepers(NodeKeeper.drop, list(ids))
            nodes = (await self.call_keepers(NodeKeeper.residents, list(ids))).values()
            left = [extent for found in nodes if not isinstance(found, BaseException) for extent in found]
            if not left:
                break
        pinned = ["a pin"] if any(extent.pinned for extent in left) else []
        return sorted({holder for extent in left for holder in extent.holders}) + pinned

    async def _look_at(self, node_id: str) -> None:
        try:
            await self._refresh(node_id)
            self._silent.discard(node_id)
        except ray.exceptions.ActorDiedError as error:
            self._failed(node_id, error)
        except Exception as error:  # it is starting, or Ray restarts it: the next round asks again
            logger.info("keeper of node %s does not answer: %s", node_id, error)
            self._silent.add(node_id)

    def _failed(self, node_id: str, error: ray.exceptions.ActorDiedError) -> None:
        """Plan another start: Ray does not restart an actor whose constructor has failed."""
        before = self._failures.get(node_id)
        num_times = before.num_times + 1 if before else 1
        pause_s = min(FIRST_PAUSE_S * 2 ** (num_times - 1), LONGEST_PAUSE_S)
        reason = f"the keeper of node {node_id} cannot start: {_last_line(error)}"
        logger.warning("%s; tried again in %.0f s", reason, pause_s)
        self._forget(node_id)
        self._failures[node_id] = _FailedStart(reason, num_times, self._clock() + pause_s)

    def _end(self, node_id: str) -> None:
        if (keeper := self._forget(node_id)) is not None:
            ray.kill(keeper)
        for known in (self._failures, self._needed_s, self._refreshing, self._lives):
            known.pop(node_id, None)

    def _forget(self, node_id: str) -> Any:
        """Forget a dead keeper and its reports. Return its handle, None without one."""
        for nodes in (self._silent, self._holding, self._readers):
            nodes.discard(node_id)
        self.residency.forget(node_id)
        return self._handles.pop(node_id, None)

    async def _refresh(self, node_id: str) -> None:
        """Look at the keeper's process, and tell it of new pins. Raises when it does not answer.

        One call at a time per keeper: of two pin calls at once, the older might be carried out last.
        """
        async with self._refreshing.setdefault(node_id, asyncio.Lock()), asyncio.timeout(ANSWER_TIMEOUT_S):
            keeper = self._handles[node_id]
            stats, last = await keeper.stats.remote(), self._lives.get(node_id)
            self._failures.pop(node_id, None)
            self._holding.discard(node_id)
            if stats.num_holders:
                self._needed_s[node_id] = self._clock()
                self._holding.add(node_id)
            (self._readers.add if stats.has_storage else self._readers.discard)(node_id)
            life = _Life(stats.generation, stats.budget_bytes, last.pins if last else {})
            if last is None or last.generation != life.generation:
                life = await self._meet(node_id, life, last, stats.address)
            self._lives[node_id] = life
            if (pins := self._pins(life)) != life.pins:
                await keeper.set_pins.remote(pins)
                self._lives[node_id] = replace(life, pins=pins)

    async def _meet(self, node_id: str, life: _Life, last: _Life | None, address: str | None) -> _Life:
        """Take in a new process of a keeper. It may have outlived a registry, or follow a dead keeper."""
        keeper = self._handles[node_id]
        if last:
            self.residency.end_claims(node_id)  # its loads died with it
            if last.budget_bytes != life.budget_bytes:
                await keeper.set_budget.remote(last.budget_bytes)
        residents, pins = await asyncio.gather(keeper.residents.remote(), keeper.pins.remote())
        if last is None:
            self._pinned.update(model for model in pins if self._models is None or self._models.is_known(model))
        here = PeerAddress.parse(address) if address else None
        # Of a keeper that was not known, this only adds: it has reported more itself meanwhile, and while nodes start,
        # what is forgotten here is read from storage once more.
        report = ResidencyReport(here, [extent.id for extent in residents], is_full=last is not None)
        self.residency.report_residency(node_id, report)
        return _Life(life.generation, last.budget_bytes if last else life.budget_bytes, pins)

    def _pins(self, life: _Life) -> dict[str, Sequence[str]]:
        """Return extents by pinned model.

        For a model that this process has not looked at yet, the keeper knows them.
        """
        extents_of = self._models.by_model if self._models else {}
        found = {model: extents_of.get(model, life.pins.get(model, ())) for model in self._pinned}
        return {model: tuple(ids) for model, ids in found.items() if ids}

    def nodes(self) -> list[str]:
        """Return the nodes that have keepers or should have, sorted."""
        return sorted(self._handles.keys() | self._failures.keys())

    async def call_keepers(
        self,
        method: Callable[..., R],
        *arguments: Any,
        timeout_s: float = ANSWER_TIMEOUT_S,
        nodes: Collection[str] | None = None,
    ) -> dict[str, R | BaseException]:
        """Call a method of NodeKeeper on all nodes, or on those of `nodes`, and return the answers by node.

        The answer is an exception for a keeper that does not answer within `timeout_s`, or cannot start.
        """
        asked = self.nodes() if nodes is None else nodes
        handles = {node: self._handles[node] for node in asked if node in self._handles}
        failures: dict[str, R | BaseException] = {
            node: KeeperFailed(self._failures[node].reason)
            for node in asked
            if node in self._failures and node not in handles
        }

        async def call(keeper: Any) -> R:
            async with asyncio.timeout(timeout_s):
                answer: R = await getattr(keeper, method.__name__).remote(*arguments)
                return answer

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
        is_elsewhere = node_id != ray.get_runtime_context().get_node_id()
        settings = replace(self._settings, code=running_code()) if is_elsewhere else self._settings
        registry = registry_of(self._key), NAMESPACE
        return actor.remote(self._packs, self._budget_bytes, node_id, settings, registry=registry)


def _last_line(error: ray.exceptions.ActorDiedError) -> str:
    """Return the last line of a traceback: the exception."""
    return [line.strip() for line in str(error).splitlines() if line.strip()][-1]
