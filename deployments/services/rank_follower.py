"""RankFollower: a rank of a worker's replica beside rank 0. It builds what rank 0 orders, and computes what it says.

Rank 0 decides what is here, and when it goes: a follower has no queue, no budget of its own to keep and no models to
prepare. It attaches weights from its own node's keeper.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch

from cluster.registry.directory import Entry
from configs.cluster import ClusterConfig, WorkerConfig
from configs.ranks import RanksConfig
from deployments.engines.ranks.following import Follower, follow
from deployments.engines.ranks.group import Plan, RankGroup
from deployments.engines.ranks.links import Meeting
from deployments.modules.budget import ModuleBudget
from deployments.modules.builder import BuildOrder
from deployments.modules.device_tier import open_tier
from deployments.modules.ranked_building import FollowingBuilder, layout_of
from deployments.replicas.step_loop import DeviceThread
from deployments.services.model_replica import ModelReplica
from weights.records.manifest import Component, ExtentRef, ModelKind


def address_of(ranks: RanksConfig) -> str:
    """Return the address at which this rank listens to the others."""
    return "127.0.0.1" if ranks.strategy == "STRICT_PACK" else str(ray.util.get_node_ip_address())


def join_group(settings: WorkerConfig, rank: int, meeting: Meeting, listener: socket.socket | None = None) -> RankGroup:
    """Meet the other ranks of a replica. Blocks. Raises RankLost when they do not come."""
    ranks, bound_s = settings.ranks, settings.ranks.timeout_s
    store = meeting.open(rank, ranks.size, bound_s, listener)
    return RankGroup.join(
        layout_of(ranks),
        rank,
        store,
        bound_s=bound_s,
        device=torch.device(settings.torch_device),
        address=address_of(ranks),
    )


def described_rank(group: RankGroup, weights_bytes: int) -> dict[str, Any]:
    """Return where this rank is, the weights of its parts of what all ranks compute, and what it has sent to others."""
    return {
        "rank": group.rank,
        "process": os.getpid(),
        "node": ray.get_runtime_context().get_node_id(),
        "weights_bytes": weights_bytes,
        "sent_bytes": sum(group.sent_bytes.values()),
    }


def _do_nothing(plan: Plan) -> None:
    """Compute nothing: the part is not built yet."""


@dataclass(frozen=True, slots=True)
class _BuiltPart:
    """A part that this rank has built, and what it holds for that, under a name of its own."""

    component: Component
    extents: tuple[ExtentRef, ...]
    holder: str
    follower: Follower = _do_nothing


class RankFollower(ModelReplica):
    """One rank. `open` and `join` come first, then `follow`, which returns when rank 0 ends the group."""

    _kinds: ClassVar[Collection[ModelKind]] = ()
    _section: ClassVar[str] = "worker"

    async def open(self, config: ClusterConfig, settings: WorkerConfig, name: str) -> None:
        """Connect to this node's keeper as `name`. Raises WeightsError for a device that is not there."""
        self._settings = settings
        self._device = DeviceThread()
        self._built: dict[int, asyncio.Task[_BuiltPart]] = {}
        self._ready: dict[str, Follower] = {}  # by the names that rank 0 says; read by the device thread
        provider = await self._connect(config, name, settings, settings.num_threads, keeps=False)
        budget = ModuleBudget.of(settings, self._section)
        self._tier = open_tier(budget.device, provider, budget.nbytes)
        provider.start_beating()

    async def join(self, rank: int, meeting: Meeting) -> None:
        """Meet the other ranks. Raises RankLost."""
        self._group = await asyncio.to_thread(join_group, self._settings, rank, meeting)
        self._parts = FollowingBuilder(self._settings, self._group)

    async def follow(self) -> None:
        """Compute what rank 0 says, until it ends the group. Raises RankLost, and the error of a step."""
        await self._device.run_work(follow, self._group, self._ready)

    async def build(self, number: int, order: BuildOrder) -> None:
        """Build this rank's part of a component, by that number. Raises what kept it from that."""
        self._built[number] = asyncio.ensure_future(self._build(number, order))
        part = await asyncio.shield(self._built[number])
        if number in self._built:  # rank 0 may have given it up
            self._ready[str(number)] = part.follower

    async def release(self, number: int) -> None:
        """Let go of a part; of one that is being built, when it is."""
        building = self._built.pop(number, None)
        if building is None:
            return
        await asyncio.wait([building])
        self._ready.pop(str(number), None)
        if building.exception() is None:
            self._tier.release([building.result()])

    async def _build(self, number: int, order: BuildOrder) -> _BuiltPart:
        folder = self._models / order.skeleton
        if not await asyncio.to_thread(folder.is_dir):  # of a node without the store's folder
            await self._fetch_manifest(order.model, order.version)
        return await asyncio.to_thread(self._place_and_build, number, order, folder)

    def _place_and_build(self, number: int, order: BuildOrder, folder: Path) -> _BuiltPart:
        """Place this rank's tensors on its device, and build around them. Blocks."""
        component = self._parts.own_part(order.component, folder)
        holder = f"{component.name}#{number}"
        placed = self._tier.place_component(
            component, order.extents, holder, None, order.working_bytes, order.workspace_bytes
        )
        part = _BuiltPart(component, order.extents, holder)
        try:
            follower = self._parts.build_part(order, folder, placed.tensors)
        except BaseException:
            self._tier.release([part])
            raise
        return replace(part, follower=follower)

    def release_recalled(self, extents: Collection[str], is_overdue: bool) -> None:
        """Let go of nothing: rank 0 is asked as well, and releases it on all ranks."""

    def invalidate(self, extents: Collection[str]) -> None:
        """Read these extents anew from now on: rank 0 learns of the damage as well, and builds on all ranks anew."""
        self._tier.invalidate(extents)

    def _note_layers(self, entry: Entry | None) -> None:
        """Follow no config: rank 0 does."""

    async def describe(self) -> dict[str, Any]:
        """Return this rank's process and node, the weights of its parts, and what it has sent to the others."""
        built = [task for task in self._built.values() if task.done() and not task.cancelled() and not task.exception()]
        nbytes = sum(task.result().component.nbytes for task in built)
        return described_rank(self._group, nbytes)
