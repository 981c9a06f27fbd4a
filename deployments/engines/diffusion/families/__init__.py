"""The known pipeline classes of diffusers: a file for each, or for siblings. A new one is a file and its line here.

Nothing here imports torch before it computes: the ingress reads the defaults, and has no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.families.flux import FLUX
from deployments.engines.diffusion.families.flux2 import FLUX_2, FLUX_2_KLEIN
from deployments.engines.diffusion.families.qwen_image import QWEN_IMAGE, QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_PLUS
from deployments.engines.diffusion.families.sdxl import STABLE_DIFFUSION_XL
from deployments.engines.diffusion.families.stable_diffusion import STABLE_DIFFUSION
from deployments.engines.diffusion.families.stable_diffusion_3 import STABLE_DIFFUSION_3
from deployments.engines.diffusion.families.z_image import Z_IMAGE
from deployments.engines.records.protocol import EngineError

FAMILIES: Final[Mapping[str, Family]] = {
    class_name: family
    for family in (
        FLUX,
        STABLE_DIFFUSION_XL,
        STABLE_DIFFUSION_3,
        STABLE_DIFFUSION,
        FLUX_2,
        FLUX_2_KLEIN,
        QWEN_IMAGE,
        QWEN_IMAGE_EDIT,
        QWEN_IMAGE_EDIT_PLUS,
        Z_IMAGE,
    )
    for class_name in (family.class_name, *family.other_class_names)
}
KNOWN_FAMILIES: Final = ", ".join(dict.fromkeys(family.class_name for family in FAMILIES.values()))  # for messages


# Classes that diffusers' own code runs, with the VAE of a family: its work alone can be asked for.
_VAES: Final[Mapping[str, Family]] = dict.fromkeys(
    ("FluxKontextPipeline", "FluxFillPipeline", "FluxControlPipeline"), FLUX
)


def has_vae_family(class_name: str) -> bool:
    """Return whether the work of the VAE alone can be asked for."""
    return class_name in _VAES or class_name in FAMILIES


def vae_family_of(class_name: str) -> Family:
    """Return the family whose VAE a pipeline class has. Raises EngineError."""
    return _VAES.get(class_name) or family_of(class_name)


def family_of(class_name: str) -> Family:
    """Return the family of a pipeline class. Raises EngineError with the known names."""
    if class_name not in FAMILIES:
        raise EngineError(f"unknown pipeline class {class_name!r} (known: {KNOWN_FAMILIES})")
    return FAMILIES[class_name]
