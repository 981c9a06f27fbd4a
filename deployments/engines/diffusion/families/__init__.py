"""The known pipeline classes of diffusers: a file for each, or for siblings. A new one is a file and its line here.

Nothing here imports torch before it computes: the ingress reads the defaults, and has no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.families.flux import Flux
from deployments.engines.diffusion.families.flux2 import Flux2, Flux2Klein
from deployments.engines.diffusion.families.qwen_image import QwenImage, QwenImageEdit, QwenImageEditPlus
from deployments.engines.diffusion.families.sdxl import StableDiffusionXL
from deployments.engines.diffusion.families.stable_diffusion import StableDiffusion
from deployments.engines.diffusion.families.stable_diffusion_3 import StableDiffusion3
from deployments.engines.diffusion.families.z_image import ZImage
from deployments.engines.records.protocol import EngineError

FAMILIES: Final[Mapping[str, Family]] = {
    class_name: family
    for family in (
        Flux(),
        StableDiffusionXL(),
        StableDiffusion3(),
        StableDiffusion(),
        Flux2(),
        Flux2Klein(),
        QwenImage(),
        QwenImageEdit(),
        QwenImageEditPlus(),
        ZImage(),
    )
    for class_name in (family.class_name, *family.other_class_names)
}
KNOWN_FAMILIES: Final = ", ".join(dict.fromkeys(family.class_name for family in FAMILIES.values()))  # for messages


def family_of(class_name: str) -> Family:
    """Return the family of a pipeline class. Raises EngineError with the known names."""
    if class_name not in FAMILIES:
        raise EngineError(f"unknown pipeline class {class_name!r} (known: {KNOWN_FAMILIES})")
    return FAMILIES[class_name]
