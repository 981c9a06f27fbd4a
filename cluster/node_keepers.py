"""The keepers of all nodes: started with their node, found again by name, asked all at once.

Nothing here is lost with the process: keepers are named after their node and say themselves what they hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.extent_sources import ComingOffer, PeerOffer
from cluster.keeper import keeper_class
from cluster.loading_claims import LoadingClaims
from cluster.peer_protocol import PeerAddress
from cluster.residency_map import ExtentDirectory

NAMESPACE: Final = "atelier"
ANSWER_TIMEOUT_S: Final = 10.0

logger = logging.getLogger("atelier.registry")


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
        self._known: set[str] = set()  # nodes whose keeper has told everything it holds
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
        self._known &= set(alive)
        for node_id in alive:
            self.get(node_id)
        await asyncio.gather(*(self._learn(node_id) for node_id in alive if node_id not in self._known))

    async def _learn(self, node_id: str) -> None:
        """A keeper outlives this process: one that was there before has told another what it holds."""
        keeper = self._handles[node_id]
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                residents, stats = await asyncio.gather(keeper.residents.remote(), keeper.stats.remote())
        except Exception as error:  # it is starting, or dead: the next round asks again
            logger.info("keeper of node %s does not answer: %s", node_id, error)
            return
        self.report(node_id, stats.address, [extent.id for extent in residents], [], full=True)

    def report(
        self, node_id: str, address: str | None, added: Sequence[str], removed: Sequence[str], full: bool
    ) -> None:
        """What a keeper has got and given up; `full`: it has exactly `added`. `address` is host:port of its server."""
        if full:
            self._known.add(node_id)
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
