"""The picture of an arena: which buffer lies where, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.plots.svg import Boxes, size, svg_of


def arena_plot(record: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Draw `atelier inspect graph`: where each buffer lies in the planned memory, and from which operation to which."""
    boxes = [
        (
            float(node["node"]),
            float(made["until"] - node["node"] + 1),
            float(made["offset"]),
            float(made["bytes"]),
            layer,
        )
        for node in nodes
        for made in node["makes"]
        for layer in [node["layer"] or record["part"]]
    ]
    what = f"{record['model']}, {record['part']}: {record['rows']} rows of {record['width']}x{record['height']} pixels"
    note = f"planned {size(record['plan_bytes'])}, as it runs {size(record['eager_bytes'])}"
    panel = Boxes("Buffers in their memory, by layer", "operation", "place", boxes, size)
    return svg_of(what, [panel], f"{note}; weights {size(record['weights_bytes'])} beside")
