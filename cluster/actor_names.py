"""Names of the cluster's detached actors, by cluster and config: who starts anew finds nothing of an earlier life.

`role:cluster:hash of the config`, and a keeper's node after that. A colon is in no name of a cluster.
"""

from __future__ import annotations

import hashlib
from typing import Final

from configs.cluster import ClusterConfig

NAMESPACE: Final = "atelier"
ROLES: Final = ("registry", "keeper", "encodings")  # in the order in which they end: a registry starts keepers again
_HASH_CHARS: Final = 12


def cluster_key(config: ClusterConfig) -> str:
    """The cluster's name, and the hash of everything that its config says."""
    return f"{config.name}:{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:_HASH_CHARS]}"


def registry_name(config: ClusterConfig) -> str:
    return f"registry:{cluster_key(config)}"


def encodings_name(key: str) -> str:
    return f"encodings:{key}"


def keeper_name(key: str, node_id: str) -> str:
    return f"keeper:{key}:{node_id}"


def keeper_node(key: str, name: str) -> str | None:
    """The node of a keeper of that cluster; None for another actor's name."""
    node_id = name.removeprefix(keeper_name(key, ""))
    return node_id if node_id != name else None


def names_of_cluster(cluster: str, names: list[str]) -> list[str]:
    """Those of `names` that actors of the cluster of that name have, whatever its config; in the order of ending."""
    found = [(name.split(":"), name) for name in names]
    mine = [(ROLES.index(parts[0]), name) for parts, name in found if parts[0] in ROLES and parts[1:2] == [cluster]]
    return [name for _, name in sorted(mine)]
