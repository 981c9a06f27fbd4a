"""What is resident where, and who holds it, as one picture. Pure: the keepers' answers in, JSON-able values out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any


def cluster_residency(
    stats: Mapping[str, Any], residents: Mapping[str, Any], extents_of: Mapping[str, Iterable[str]]
) -> dict[str, Any]:
    """`nodes`: each with its keeper's figures, or `unreachable` with the reason. `models`: by id and node, bytes
    and extents that are resident, whether all of those are pinned, who leases them, and how often they were used.

    `stats` and `residents` are answers by node, exceptions among them; `extents_of` has the extent ids of each model.
    Extents that models share count for each of them. Models without anything resident are left out. Looks once at
    each extent of a model, and once at each that is resident.
    """
    nodes = [_node(node_id, stats[node_id]) for node_id in sorted(stats)]
    users: dict[str, list[str]] = {}
    for model, ids in extents_of.items():
        for id_ in ids:
            users.setdefault(id_, []).append(model)
    found: dict[str, dict[str, list[Any]]] = {}  # extents by model and node
    for node_id, answer in sorted(residents.items()):
        for extent in () if isinstance(answer, BaseException) else answer:
            for model in users.get(extent.id, ()):
                found.setdefault(model, {}).setdefault(node_id, []).append(extent)
    models = {
        model: {node_id: _share(extents) for node_id, extents in by_node.items()} for model, by_node in found.items()
    }
    return {"nodes": nodes, "models": models}


def _share(extents: list[Any]) -> dict[str, Any]:
    """What a node has of a model."""
    return {
        "host_bytes": sum(extent.nbytes for extent in extents),
        "num_extents": len(extents),
        "pinned": all(extent.pinned for extent in extents),
        "holders": sorted({holder for extent in extents for holder in extent.holders}),
        "hits": sum(extent.hits for extent in extents),
    }


def _node(node_id: str, stats: Any) -> dict[str, Any]:
    if isinstance(stats, BaseException):
        return {"node_id": node_id, "unreachable": str(stats) or type(stats).__name__}
    return asdict(stats)
