"""The end of a control plane that was superseded, by its own registry: see `superseding.py`, which decides it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import ray

from cluster.actor_names import NAMESPACE, names_beside_registry, other_registries, registry_name
from cluster.ending import end_actors, named_actors
from cluster.registry.superseding import ASK_S, Use, is_superseded
from configs.cluster import ClusterConfig

logger = logging.getLogger("atelier.registry")


async def leave_when_superseded(config: ClusterConfig, own_use: Callable[[], Use]) -> None:
    """End the control plane of this process's registry, and the process, if another one of the cluster replaces it.

    HAZARD: from the decision on, the event loop stands still: a replica that comes at this moment is not answered any
    more, but told by Ray that the registry has died, and starts another one.
    """
    if not own_use().has_ended:  # nearly always: Ray need not be asked for its actors then
        return
    others = await _other_uses(config)
    if not is_superseded(own_use(), others):
        return
    logger.info("another config of cluster %s is served: this registry, its keepers and controller end", config.name)
    end_actors(partial(names_beside_registry, config))  # the others first: nobody else knows of them
    end_actors(lambda names: [name for name in names if name == registry_name(config)])


async def _other_uses(config: ClusterConfig) -> list[Use]:
    """Return the uses of the control planes that the cluster has for other configs, of those that answer."""
    names = other_registries(config, await asyncio.to_thread(named_actors))
    found = await asyncio.gather(*map(_ask_use, names))
    return [use for use in found if use is not None]


async def _ask_use(name: str) -> Use | None:
    with contextlib.suppress(Exception):  # it is gone, or of an Atelier that does not tell
        registry: Any = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
        async with asyncio.timeout(ASK_S):
            use: Use = await registry.use.remote()
            return use
    return None
