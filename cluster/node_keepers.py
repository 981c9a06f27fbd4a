"""The keepers of all nodes: started with their node, found again by name, asked all at once.

Nothing here is lost with the process: keepers are named after their node and say themselves what they hold. Pins and
a budget set at run time end with a keeper's process, so the keeper that follows is told of them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.keeper import keeper_class
from cluster.keeper_records import ResidentExtent
from cluster.keeping.loading_claims import LoadingClaims
from cluster.peers.extent_sources import ComingOffer, PeerOffer
from cluster.peers.peer_protocol import PeerAddress
from cluster.residency_map import ExtentDirectory

NAMESPACE: Final = "atelier"
ANSWER_TIMEOUT_S: Final = 10.0
RELEASE_PAUSES_S: Final = (0.0, 0.05, 0.2, 0.5, 1.0)

logger = logging.getLogger("atelier.registry")


@dataclass(frozen=True, slots=True)
class _Life:
    """A keeper's process as last seen."""

    generation: str
    budget_bytes: int


class NodeKeepers:
    """Lives on one event loop. `options` are the keepers' own beside packs, budget and registry."""

    def __init__(
        self,
        packs: str,
        budget_bytes: int,
        registry: str,
        options: Mapping[str, Any] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._packs = packs
        self._budget_bytes = budget_bytes
        self._registry = registry
        self._options = options
        self._claims = LoadingClaims(clock)
        self._handles: dict[str, Any] = {}
        self._lives: dict[str, _Life] = {}
        self._pinned: set[str] = set()
        self._residency = ExtentDirectory()

    def handles(self) -> Mapping[str, Any]:
        return self._handles

    def get(self, node_id: str) -> Any:
        """The keeper of a node, started when there is none."""
        if node_id not in self._handles:
            self._handles[node_id] = self._start(node_id)
        return self._handles[node_id]

    async def follow(self, alive: Sequence[str]) -> None:
        """Have a keeper on each of these nodes, and know what it holds; what other nodes had is gone."""
        for node_id in set(self._handles) - set(alive):
            ray.kill(self._handles.pop(node_id))  # Ray would look for its node for ever
            self._residency.forget(node_id)
            self._claims.forget(node_id)
            self._lives.pop(node_id, None)
        for node_id in alive:
            self.get(node_id)
        await asyncio.gather(*map(self._look_at, alive))

    async def pin(self, ids: Sequence[str], pinned: bool) -> dict[str, Any]:
        """On every node, those that join or restart later included. Answers as of `ask`."""
        if pinned:
            self._pinned.update(ids)
        else:
            self._pinned.difference_update(ids)
        return await self.ask("pin" if pinned else "unpin", list(ids))

    async def drop(self, ids: Sequence[str]) -> list[str]:
        """On every node. Who still holds some of them a moment later: a replica's release may be on its way."""
        wanted = set(ids)
        left: list[ResidentExtent] = []
        for pause_s in RELEASE_PAUSES_S:
            await asyncio.sleep(pause_s)
            await self.ask("drop", list(ids))
            nodes = [found for found in (await self.ask("residents")).values() if not isinstance(found, BaseException)]
            left = [extent for residents in nodes for extent in residents if extent.id in wanted]
            if not left:
                break
        pinned = ["a pin"] if any(extent.pinned for extent in left) else []
        return sorted({holder for extent in left for holder in extent.holders}) + pinned

    async def _look_at(self, node_id: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                stats = await self._handles[node_id].stats.remote()
                life, last = _Life(stats.generation, stats.budget_bytes), self._lives.get(node_id)
                if last is None or last.generation != life.generation:
                    life = await self._meet(node_id, life, last, stats.address)
                self._lives[node_id] = life
        except Exception as error:  # it is starting, or dead: the next round asks again
            logger.info("keeper of node %s does not answer: %s", node_id, error)

    async def _meet(self, node_id: str, life: _Life, last: _Life | None, address: str | None) -> _Life:
        """A keeper outlives this process: one that is new here has perhaps told another what it holds and pins."""
        keeper = self._handles[node_id]
        if last:
            self._claims.forget(node_id)  # what it was loading died with it
            if last.budget_bytes != life.budget_bytes:
                await keeper.set_budget.remote(last.budget_bytes)
        residents = await keeper.residents.remote()
        self._pinned.update(extent.id for extent in residents if extent.pinned)
        if self._pinned:
            await keeper.pin.remote(sorted(self._pinned))
        self.report(node_id, address, [extent.id for extent in residents], [], full=True)
        return _Life(life.generation, last.budget_bytes if last else life.budget_bytes)

    def report(
        self, node_id: str, address: str | None, added: Sequence[str], removed: Sequence[str], full: bool
    ) -> None:
        """What a keeper has got and given up; `full`: it has exactly `added`. `address` is host:port of its server."""
        self._residency.report(node_id, _parsed(address), added, removed, full=full)
        self._claims.settle(node_id, [*added, *removed])

    def locate(self, ids: Sequence[str], node_id: str) -> Mapping[str, Sequence[PeerOffer | ComingOffer]]:
        """Who else has each extent or is getting it. What nobody has is `node_id`'s to get from now on."""
        offers: dict[str, Sequence[PeerOffer | ComingOffer]] = dict(self._residency.locate(ids, node_id))
        getting = self._claims.claim([id_ for id_ in ids if id_ not in offers], node_id)
        for id_, other in getting.items():
            if (address := self._residency.address(other)) is not None:
                offers[id_] = [ComingOffer(address, other, gbps=None, left_s=0.0)]
        return offers

    async def ask(self, method: str, *arguments: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """What each keeper answers, by node; an exception for one that does not."""
        handles = dict(self._handles)

        async def call(keeper: Any) -> Any:
            async with asyncio.timeout(timeout_s):
                return await getattr(keeper, method).remote(*arguments)

        answers = await asyncio.gather(*map(call, handles.values()), return_exceptions=True)
        return dict(zip(handles, answers, strict=True))

    def close(self) -> None:
        """End all keepers, those of an earlier life of this process too."""
        for node_id in alive_nodes():
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(f"keeper-{node_id}", namespace=NAMESPACE))
        self._handles.clear()

    def _start(self, node_id: str) -> Any:
        actor = keeper_class().options(
            name=f"keeper-{node_id}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        registry = (self._registry, NAMESPACE)
        return actor.remote(self._packs, self._budget_bytes, node_id, registry=registry, **self._options)


def alive_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _parsed(address: str | None) -> PeerAddress | None:
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    return PeerAddress(host.strip("[]"), int(port))
