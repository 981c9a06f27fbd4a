"""Variants of one pipeline class, told apart by its configs: FLUX.1-schnell is a FluxPipeline, as FLUX.1-dev is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from weights.errors import FormatError
from weights.formats.weight_files import read_json

_SWITCHES: Final = (  # file of the pipeline's folder, key
    ("transformer/config.json", "guidance_embeds"),
    ("scheduler/scheduler_config.json", "use_dynamic_shifting"),
)


def pipeline_variant(skeleton: Path) -> Mapping[str, bool]:
    """Return the switches of a pipeline's configs that choose its defaults; those that its configs do not have, not."""
    found: dict[str, bool] = {}
    for file, key in _SWITCHES:
        try:
            value = read_json(skeleton / file).get(key)
        except FormatError:  # not there, or not sound: the pipeline itself will say what is wrong with it
            continue
        if isinstance(value, bool):
            found[key] = value
    return found
