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
    Extents that models share count for each of them. Models without anything resident are left out.
    """
    nodes = [_node(node_id, stats[node_id]) for node_id in sorted(stats)]
    models: dict[str, dict[str, Any]] = {}
    for node_id, answer in sorted(residents.items()):
        if isinstance(answer, BaseException) or not answer:
            continue
        held = {extent.id: extent for extent in answer}
        for model, ids in extents_of.items():
            if found := [held[id_] for id_ in ids if id_ in held]:
                models.setdefault(model, {})[node_id] = {
                    "host_bytes": sum(extent.nbytes for extent in found),
                    "num_extents": len(found),
                    "pinned": all(extent.pinned for extent in found),
                    "holders": sorted({holder for extent in found for holder in extent.holders}),
                    "hits": sum(extent.hits for extent in found),
                }
    return {"nodes": nodes, "models": models}


def _node(node_id: str, stats: Any) -> dict[str, Any]:
    if isinstance(stats, BaseException):
        return {"node_id": node_id, "unreachable": str(stats) or type(stats).__name__}
    return asdict(stats)
