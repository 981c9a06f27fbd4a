"""Replicas that no node has room for, in words: what each takes, what the nodes have, what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_MAX_NODES: Final = 4  # that are described
_KEYS: Final = {"CPU": "num_cpus", "GPU": "num_gpus"}


def unplaced_line(
    name: str, num_unplaced: int, demand: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> str:
    """Return a line on replicas of deployment `name`, each of which takes `demand` of a node's resources.

    `nodes` are the resources of each node, whoever uses them now.
    """
    lacking = sorted(_lacking(demand, nodes))
    keys = [f"{name}.{_KEYS.get(resource, 'placement')}" for resource in lacking] or [f"{name}.num_replicas"]
    why = "no node has as much" if lacking else "all of it is taken"
    replicas = "1 replica finds" if num_unplaced == 1 else f"{num_unplaced} replicas find"
    return (
        f"{name}: {replicas} no place: each takes {_shown(demand, demand)}, {why} ({_nodes(demand, nodes)}). "
        f"Lower {' or '.join(dict.fromkeys(keys))}, or add a node"
    )


def _lacking(demand: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield the resources of which no single node has enough."""
    for resource, amount in demand.items():
        if all(node.get(resource, 0.0) < amount for node in nodes):
            yield resource


def _nodes(demand: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    shown = ", ".join(f"{_shown(demand, node)}" for node in nodes[:_MAX_NODES])
    further = f" and {len(nodes) - _MAX_NODES} more" if len(nodes) > _MAX_NODES else ""
    return f"{len(nodes)} node{'s have' if len(nodes) != 1 else ' has'} {shown or 'nothing'}{further}"


def _shown(demand: Mapping[str, float], amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amounts.get(resource, 0.0):g} {resource}" for resource in demand) or "nothing"
