"""The VAE of a pipeline: pixels to latents, latents to pixels."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers.image_processor import VaeImageProcessor


class ImageCodec:
    """A VAE. The given weights may not be changed, so a float32 copy is made at the first use where one is needed.

    A float16 VAE that its config calls unsafe in float16 (`force_upcast`, SDXL's own) runs in float32.
    """

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.scale_factor = 2 ** (len(self.vae.config.block_out_channels) - 1)  # pixels per latent
        self._processor = VaeImageProcessor(vae_scale_factor=self.scale_factor)
        self._upcast_vae: Any = None

    def encode(self, images_BCHW: torch.Tensor, generator: torch.Generator, *, upcasts: bool = False) -> torch.Tensor:
        """Encode images from -1 to 1, (B, 3, H, W): a sample of their latents (B, C, h, w), unscaled.

        `upcasts`: in float32 whatever the VAE's dtype, if its config has `force_upcast`.
        """
        vae = self._vae_for_float32() if upcasts and self.vae.config.get("force_upcast") else self._safe_vae()
        with torch.no_grad():
            latents: torch.Tensor = vae.encode(images_BCHW.to(vae.device, vae.dtype)).latent_dist.sample(generator)
        return latents

    def decode(self, latents_BCHW: torch.Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        """Decode unscaled latents: uint8 (B, H, W, 3), and bool (B,), whether all that the VAE gave was finite."""
        vae = self._safe_vae()
        with torch.no_grad():
            image_BCHW = vae.decode(latents_BCHW.to(vae.device, vae.dtype), return_dict=False)[0]
            is_finite_B: np.ndarray = image_BCHW.isfinite().flatten(1).all(1).cpu().numpy()
            image_BHWC: np.ndarray = self._processor.postprocess(image_BCHW, output_type="np")
        with np.errstate(invalid="ignore"):  # NaN as uint8 is nothing, and `is_finite_B` tells
            return (image_BHWC * 255).round().astype(np.uint8), is_finite_B

    def _safe_vae(self) -> Any:
        is_safe = self.vae.dtype != torch.float16 or not self.vae.config.get("force_upcast")
        return self.vae if is_safe else self._vae_for_float32()

    def _vae_for_float32(self) -> Any:
        if self.vae.dtype == torch.float32:
            return self.vae
        if self._upcast_vae is None:
            self._upcast_vae = copy.deepcopy(self.vae).to(torch.float32)
        return self._upcast_vae


def unit_pixels(image: npt.NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Return an image, uint8 (H, W, 3), as float32 (1, 3, H, W) from 0 to 1."""
    pixels_HWC = torch.from_numpy(image.astype(np.float32) / 255.0)
    return pixels_HWC.permute(2, 0, 1).unsqueeze(0).to(device)
