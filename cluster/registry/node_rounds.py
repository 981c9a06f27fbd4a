"""The registry's rounds over Ray's nodes: keepers follow them, and nodes that join are checked.

With the last replica the control plane ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import Final

import ray

from cluster.process.ray_calls import end_control_plane, named_everywhere, node_addresses
from cluster.ray_seam.serve_control import serving_nodes
from cluster.records.actor_names import cluster_key, keeper_nodes
from cluster.registry.node_keepers import NodeKeepers
from cluster.registry.served_models import ServedModels
from cluster.registry.users import Users
from cluster.start.node_checks import NodeWatch, problems_by_node, wanted_of, why_no_haproxy
from configs.cluster import ClusterConfig

NODE_POLL_S: Final = 5.0

logger = logging.getLogger("atelier.registry")


class NodeRounds:
    """The rounds of one registry, over the nodes of its Ray. Lives on the registry's event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        keepers: NodeKeepers,
        models: ServedModels,
        users: Users,
        *,
        was_restarted: bool,
    ) -> None:
        self._config = config
        self._keepers = keepers
        self._models = models
        self._users = users
        self._was_restarted = was_restarted
        self._watch: NodeWatch | None = None
        self._looking: asyncio.Task[None] | None = None

    @property
    def problems(self) -> list[str]:
        """The problems of nodes that have joined."""
        by_node = self._watch.problems if self._watch else {}
        return [line for lines in by_node.values() for line in lines]

    async def follow(self) -> None:
        """Make a round every few seconds, as long as Ray runs."""
        # A private Ray has one node, which will have replicas: its keeper starts at the same time as they do.
        to_start = self._config.ray.address is None
        while ray.is_initialized():
            try:
                users = self._users.names  # Ray's answer may be older than new users
                alive, named = await asyncio.to_thread(lambda: (node_addresses(), named_everywhere()))
                hosts = alive if to_start and len(alive) == 1 else keeper_nodes(cluster_key(self._config), named)
                await self._keepers.follow(alive, hosts)
                to_start = False
                self.end_after_users(users - set(named))
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.ensure_future(self._look_at(alive))
            except Exception:  # Ray's own: the next round may do better
                logger.exception("the nodes could not be looked at")
            await asyncio.sleep(NODE_POLL_S)

    def end_after_users(self, ended: Collection[str]) -> None:
        """End the control plane, and this process, when the last of its replicas has ended.

        HAZARD: from the decision on, the event loop stands still: a replica that comes at this moment is not answered
        any more, but told by Ray that the registry has died, and starts another one.
        """
        have_ended = self._users.have_ended(ended)
        self._models.loads.follow_replicas(self._users.names)
        if have_ended and not self._keepers.may_have_holders:
            name = self._config.name
            logger.info("the last replica of cluster %s with this config has ended: its control plane ends", name)
            end_control_plane(self._config)

    async def _look_at(self, alive: Mapping[str, str]) -> None:
        """Look at joined nodes, beside all other work: a hanging one is waited for."""
        if self._watch is None:  # `up` has looked at those that are there
            self._watch = NodeWatch(() if self._was_restarted else alive)
        now_s = time.monotonic()
        due = self._watch.due(alive, now_s)
        try:
            found = await asyncio.to_thread(_node_problems, self._config, due) if due else {}
            for line in self._watch.note(alive, found, now_s):
                logger.warning("%s", line)
        except ray.exceptions.RayError as error:
            logger.warning("nodes that join could not be looked at: %s", str(error).partition("\n")[0])


def _node_problems(config: ClusterConfig, nodes: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the problems of nodes of this cluster, whose head tells whether it has HAProxy. Blocks."""
    needs_haproxy = config.http.proxy == "haproxy" and not why_no_haproxy()
    wanted = wanted_of(config, has_serve=False, needs_haproxy=needs_haproxy)
    return problems_by_node(nodes, wanted, serving_nodes)
