"""Facts that tell pipelines of one class apart, by their configs: FLUX.1-schnell is a FluxPipeline as FLUX.1-dev."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from weights.errors import FormatError
from weights.formats.weight_files import read_json

_SWITCHES: Final = (  # file of the pipeline's folder, key
    ("transformer/config.json", "guidance_embeds"),
    ("scheduler/scheduler_config.json", "use_dynamic_shifting"),
    ("model_index.json", "is_distilled"),
)
_MAX_BLOCKS: Final = 16


def pipeline_variant(skeleton: Path) -> Mapping[str, bool | int]:
    """Return the switches of a pipeline's configs that choose its defaults, and `pixels_per_latent` of its VAE.

    What its configs do not have is left out.
    """
    found: dict[str, bool | int] = {}
    for file, key in _SWITCHES:
        try:
            value = read_json(skeleton / file).get(key)
        except FormatError:  # not there, or not sound: the pipeline itself will say what is wrong with it
            continue
        if isinstance(value, bool):
            found[key] = value
    with contextlib.suppress(FormatError):
        config = read_json(skeleton / "vae/config.json")
        blocks, halvings = config.get("block_out_channels"), config.get("temperal_downsample")
        if isinstance(blocks, list) and 0 < len(blocks) <= _MAX_BLOCKS:
            found["pixels_per_latent"] = 2 ** (len(blocks) - 1)
        elif isinstance(halvings, list) and len(halvings) < _MAX_BLOCKS:  # of a VAE of videos
            found["pixels_per_latent"] = 2 ** len(halvings)
    return found
