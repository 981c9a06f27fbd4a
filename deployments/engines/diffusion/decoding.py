"""Latents to images, as the stock pipelines decode them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor


class ImageDecoder:
    """A VAE's decoding half.

    A float16 VAE that its config calls unsafe in float16 (`force_upcast`, SDXL's own) decodes in float32,
    with a private copy made at the first use, because the given weights may not be changed.
    """

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.scale_factor = 2 ** (len(self.vae.config.block_out_channels) - 1)  # pixels per latent
        self._processor = VaeImageProcessor(vae_scale_factor=self.scale_factor)
        self._upcast_vae: Any = None

    def decode(self, latents_BCHW: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Decode unscaled latents: uint8 (B, H, W, 3), and bool (B,), whether all that the VAE gave was finite."""
        vae = self._safe_vae()
        with torch.no_grad():
            image_BCHW = vae.decode(latents_BCHW.to(vae.device, vae.dtype), return_dict=False)[0]
            is_finite_B: np.ndarray = image_BCHW.isfinite().flatten(1).all(1).cpu().numpy()
            image_BHWC: np.ndarray = self._processor.postprocess(image_BCHW, output_type="np")
        with np.errstate(invalid="ignore"):  # NaN as uint8 is nothing, and `is_finite_B` tells
            return (image_BHWC * 255).round().astype(np.uint8), is_finite_B

    def _safe_vae(self) -> Any:
        if self.vae.dtype != torch.float16 or not self.vae.config.get("force_upcast"):
            return self.vae
        if self._upcast_vae is None:
            self._upcast_vae = copy.deepcopy(self.vae).to(torch.float32)
        return self._upcast_vae
