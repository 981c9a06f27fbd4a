"""Pipeline class name -> the loop that runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from deployments.engines.diffusion.flux import FluxDenoise
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.diffusion.rows import DEFAULT_BOUNDS, BatchBounds
from deployments.engines.diffusion.sdxl import SDXLDenoise
from deployments.engines.protocol import EngineError

FAMILIES: Mapping[str, type[DenoisePipeline]] = {
    "FluxPipeline": FluxDenoise,
    "StableDiffusionXLPipeline": SDXLDenoise,
}


def create_pipeline(
    class_name: str,
    folder: Path,
    modules: Mapping[str, nn.Module],
    *,
    device: str | torch.device = "cpu",
    bounds: BatchBounds = DEFAULT_BOUNDS,
) -> DenoisePipeline:
    """The denoise loop for a folder in diffusers' layout. `modules` has the denoiser ("transformer" or
    "unet") and "vae", on `device`; text encoders live elsewhere. Raises EngineError for a class that no
    family knows.
    """
    if class_name not in FAMILIES:
        raise EngineError(f"{folder}: unknown pipeline class {class_name!r} (known: {', '.join(FAMILIES)})")
    return FAMILIES[class_name](folder, modules, device, bounds)


def settings_hash(folder: Path) -> str:
    """Identity of what a pipeline reads beside its modules: model_index.json and the solver's config.

    Raises EngineError for a folder that has none.
    """
    digest = hashlib.sha256()
    for file in (folder / "model_index.json", folder / "scheduler" / "scheduler_config.json"):
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            raise EngineError(f"{file}: {error.strerror or error}") from None
    return digest.hexdigest()
