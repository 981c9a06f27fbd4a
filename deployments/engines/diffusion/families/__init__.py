"""The pipeline classes of diffusers that are known, one file each. A new family is a file and its line here.

Nothing here imports torch before it computes: the ingress reads the defaults, and has no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.families.flux import Flux
from deployments.engines.diffusion.families.sdxl import StableDiffusionXL
from deployments.engines.diffusion.families.stable_diffusion import StableDiffusion
from deployments.engines.protocol import EngineError

FAMILIES: Final[Mapping[str, Family]] = {
    family.class_name: family
    for family in (
        Flux(),
        StableDiffusionXL(),
        StableDiffusion(),
    )
}


def family_of(class_name: str) -> Family:
    """Return the family of a pipeline class. Raises EngineError with the known names."""
    if class_name not in FAMILIES:
        raise EngineError(f"unknown pipeline class {class_name!r} (known: {', '.join(FAMILIES)})")
    return FAMILIES[class_name]
