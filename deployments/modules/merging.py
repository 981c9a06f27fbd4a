"""A LoRA merged into private copies of the layers that it changes: what these take of a replica's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from deployments.modules.built_modules import Part, PartName
from weights.dtypes import ITEM_BYTES
from weights.manifest import Component

# The two halves of a pair, as diffusers and kohya's trainer name them.
_HALVES: Final = ((".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight"))
_KOHYA: Final = "lora_unet_"  # its prefix of any denoiser


class Merging(NamedTuple):
    """The LoRA of a request that its configuration wants to be merged, and the component that it changes, by name."""

    adapter: str
    denoiser: str


def merged_parts(
    parts: Mapping[PartName, Part], merging: Merging, size_of: Callable[[int], int]
) -> dict[PartName, Part] | None:
    """Return the parts of a request with its LoRA merged, another module than the one beside it; None if it cannot be.

    Denoisers in float8 are small because memory is short: their LoRAs stay as they are.
    """
    name = PartName(merging.adapter, is_adapter=True)
    lora, denoiser = parts.get(name), parts.get(PartName(merging.denoiser))
    if lora is None or denoiser is None:
        return None
    dtypes = {ref.dtype for ref in denoiser.component.tensors.values()}
    if any(dtype.startswith("F8") for dtype in dtypes):
        return None
    item_bytes = max((ITEM_BYTES.get(dtype) or 0) for dtype in dtypes)
    sizes = _changed_elements(lora.component, merging.denoiser)
    merged_bytes = sum(size_of(count * item_bytes) for count in sizes)
    variant = lora.component.model_copy(
        update={"parts_hash": f"merged into {denoiser.component.module_key} as {merging.adapter}"}
    )
    footprint = {**lora.footprint, f"memory of {variant.module_key}": merged_bytes}
    merged = replace(
        lora, component=variant, footprint=footprint, working_bytes=lora.working_bytes + merged_bytes, is_variant=True
    )
    return {**parts, name: merged}


def _changed_elements(lora: Component, denoiser: str) -> list[int]:
    """Return the elements of each weight of the denoiser that a LoRA changes, as its own shapes tell."""
    found = []
    for name, ref in lora.tensors.items():
        for down, up in _HALVES:
            other = lora.tensors.get(name.removesuffix(down) + up)
            if name.endswith(down) and name.startswith((f"{denoiser}.", _KOHYA)) and other is not None:
                found.append(other.shape[0] * math.prod(ref.shape[1:]))
    return found
