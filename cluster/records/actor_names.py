"""Names of the cluster's detached actors: `role:cluster:hash`, followed by the node for a keeper.

The hash is of what the control plane cannot change while it runs. It keeps a cluster that starts with another store or
Ray from finding the actors of an earlier life, and lets those of this one stay when a model or a worker's setting
changes. The name of a cluster has no colon.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Final

from configs.changes import BEYOND, Concern, values_of
from configs.cluster import ClusterConfig

NAMESPACE: Final = "atelier"
_ROLES: Final = (
    "controller",
    "registry",
    "keeper",
)  # in the order of ending them: a controller would start the registry again, and that one keepers
_HASH_CHARS: Final = 12


def cluster_key(config: ClusterConfig) -> str:
    """Return the cluster's name and the hash of what no running control plane takes, joined by a colon."""
    return f"{config.name}:{hash_of(config, *BEYOND)}"


def hash_of(config: ClusterConfig, *concerns: Concern) -> str:
    """Return a short hash of the values that concern one of these, the same in every process."""
    values = json.dumps(values_of(config, *concerns), sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:_HASH_CHARS]


def registry_name(config: ClusterConfig) -> str:
    """Return the name of the cluster's registry."""
    return registry_of(cluster_key(config))


def registry_of(key: str) -> str:
    """Return the name of the registry of the cluster with that `cluster_key`."""
    return f"registry:{key}"


def controller_name(config: ClusterConfig) -> str:
    """Return the name of the actor that decides which model is on which worker."""
    return f"controller:{cluster_key(config)}"


def keeper_name(key: str, node_id: str) -> str:
    """Return the name of the node's keeper in the cluster with that `cluster_key`."""
    return f"keeper:{key}:{node_id}"


def keeper_nodes(key: str, names: Iterable[str]) -> list[str]:
    """Return the nodes of the keepers of the cluster with that `cluster_key`, among the names of actors."""
    start = keeper_name(key, "")
    return [name.removeprefix(start) for name in names if name.startswith(start)]


def names_of_cluster(cluster: str, names: Iterable[str]) -> list[str]:
    """Return the names of the cluster's actors, whatever its config, in the order of ending them."""
    found = [(name.split(":"), name) for name in names]
    mine = [(_ROLES.index(parts[0]), name) for parts, name in found if parts[0] in _ROLES and parts[1:2] == [cluster]]
    return [name for _, name in sorted(mine)]


def clusters_of(names: Iterable[str]) -> list[str]:
    """Return the clusters that have actors of these names, sorted."""
    return sorted({parts[1] for name in names if len(parts := name.split(":")) > 2 and parts[0] in _ROLES})


def names_beside_registry(config: ClusterConfig, names: Iterable[str]) -> list[str]:
    """Return the names of the other actors of the registry's own key, in the order of ending them."""
    key = cluster_key(config).split(":")
    found = names_of_cluster(config.name, names)
    return [name for name in found if name.split(":")[1:3] == key and name != registry_name(config)]
