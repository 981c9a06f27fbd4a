"""The VAE of a pipeline: pixels to latents, latents to pixels."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from diffusers import AutoencoderTiny
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from deployments.engines.costs.memory_limits import forget_frames, is_out_of_memory
from deployments.engines.diffusion.families.base import ImageSize
from deployments.engines.diffusion.ranked_tiles import LeadingTiles
from deployments.engines.graph.recording import planned_peak
from deployments.engines.records.protocol import EngineError

_RECORDED_SIDE: Final = 32  # latents of the decode that measures the memory of a pixel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Latents:
    """The latents of a small VAE, in place of a distribution: nothing is drawn from it."""

    parameters: torch.Tensor

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return self.parameters

    def mode(self) -> torch.Tensor:
        return self.parameters


Posterior: TypeAlias = DiagonalGaussianDistribution | _Latents


class ImageCodec:
    """A VAE. The given weights may not be changed, so a float32 copy is made at the first use if needed.

    A float16 VAE that its config calls unsafe in float16 (`force_upcast`, SDXL's own) runs in float32.

    An image whose decode would hold more than `max_bytes` of tensors is decoded in overlapping tiles, as by stock's
    `enable_tiling`, and so is one without memory for one piece. Tiles have the side that the VAE was trained on
    (`sample_size` of its config): an image up to that is one tile.
    """

    def __init__(self, vae: Any, max_bytes: float = math.inf, tiles: LeadingTiles | None = None) -> None:
        """Other ranks decode some `tiles`, if there are any."""
        self.vae = vae
        self._tiles = tiles
        self._max_bytes = max_bytes
        self._is_of_video = "temperal_downsample" in self.vae.config  # it takes an image as a video of one frame
        self.draws_latents = not isinstance(vae, AutoencoderTiny)  # it returns latents itself
        # Pixels per latent.
        self.scale_factor = 2 ** (
            len(vae.config.temperal_downsample) if self._is_of_video else len(vae.config.block_out_channels) - 1
        )
        self._processor = VaeImageProcessor(vae_scale_factor=self.scale_factor)
        self._upcast_vae: Any = None
        self._pixel_bytes: dict[torch.dtype, float] = {}
        # Read once: diffusers goes through all modules for either.
        self._dtype: torch.dtype = vae.dtype
        self.device: torch.device = vae.device

    def size(self, height: int, width: int) -> ImageSize:
        """Return the size of an image in pixels and latents."""
        return ImageSize(height, width, height // self.scale_factor, width // self.scale_factor)

    @property
    def is_blank(self) -> bool:
        """Return whether the VAE has no weights: it serves for sizes, and runs elsewhere."""
        return bool(next(self.vae.parameters()).is_meta)

    def encode(
        self, images_BCHW: torch.Tensor, generator: torch.Generator, *, upcasts: bool = False, may_change: bool = True
    ) -> torch.Tensor:
        """Encode images from -1 to 1, (B, 3, H, W): a sample of their latents (B, C, h, w), unscaled.

        The options are those of `posterior`.
        """
        posterior = self.posterior(images_BCHW, upcasts=upcasts, may_change=may_change)
        latents: torch.Tensor = posterior.sample(generator)
        return latents[:, :, 0] if self._is_of_video else latents

    def most_likely(
        self, images_BCHW: torch.Tensor, scale: Callable[[torch.Tensor, Any], torch.Tensor]
    ) -> torch.Tensor:
        """Return the most likely latents of images from -1 to 1, scaled by `scale` of them and the VAE."""
        latents: torch.Tensor = self.posterior(images_BCHW).mode()
        return scale(latents[:, :, 0] if self._is_of_video else latents, self.vae)

    def scaled(self, latents: torch.Tensor, scale: Callable[[torch.Tensor, Any], torch.Tensor]) -> torch.Tensor:
        """Return latents of a request scaled by `scale` of them and the VAE."""
        return scale(latents, self.vae)

    def posterior(self, images_BCHW: torch.Tensor, *, upcasts: bool = False, may_change: bool = True) -> Posterior:
        """Return the distribution of the images' latents, or its substitute: see `draws_latents`.

        `upcasts`: in float32 for any dtype of the VAE, if its config has `force_upcast`. `may_change`: an image without
        enough memory goes in tiles, which changes it a little.
        """
        vae = self._vae_for_float32() if upcasts and self.vae.config.get("force_upcast") else self._safe_vae()
        images = images_BCHW.to(self.device, self._dtype_of(vae))
        images = images.unsqueeze(2) if self._is_of_video else images
        with torch.no_grad():
            found = self._in_tiles_if_large(vae, vae.encode, images, images.shape[-2:], may_change)
        posterior: Posterior = found.latent_dist if self.draws_latents else _Latents(found.latents)
        return posterior

    def decode(
        self, latents_BCHW: torch.Tensor, *, may_change: bool = True, in_tiles: bool = False
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        """Decode unscaled latents: uint8 (B, H, W, 3), and bool (B,), whether the VAE's output was finite.

        `may_change` is as for `encode`. `in_tiles`: there is no room for an image in one piece.
        """
        image_BCHW = self.pixels(latents_BCHW, may_change=may_change, in_tiles=in_tiles)
        with torch.no_grad():
            is_finite_B: np.ndarray = image_BCHW.isfinite().flatten(1).all(1).cpu().numpy()
            image_BHWC: np.ndarray = self._processor.postprocess(image_BCHW, output_type="np")
        with np.errstate(invalid="ignore"):  # NaN has no uint8, and `is_finite_B` reports it
            return (image_BHWC * 255).round().astype(np.uint8), is_finite_B

    def pixels(self, latents_BCHW: torch.Tensor, *, may_change: bool = True, in_tiles: bool = False) -> torch.Tensor:
        """Decode unscaled latents: images from -1 to 1, (B, 3, H, W), on the device."""
        vae = self._safe_vae()
        latents = latents_BCHW.to(self.device, self._dtype_of(vae))
        height, width = (side * self.scale_factor for side in latents.shape[-2:])
        decode = partial(_decode_videos if self._is_of_video else _decode_images, vae)
        with torch.no_grad():
            images: torch.Tensor = self._in_tiles_if_large(vae, decode, latents, (height, width), may_change, in_tiles)
        return images

    def _in_tiles_if_large(
        self,
        vae: Any,
        run: Callable[[torch.Tensor], Any],
        batch: torch.Tensor,
        size: Sequence[int],
        may_change: bool,
        in_tiles: bool = False,
    ) -> Any:
        """Run the VAE's `run` on images of that height and width, in tiles if memory demands it."""
        is_large = (in_tiles and may_change) or self._is_large(vae, *size)
        try:
            if is_large:
                return self._in_tiles(vae, run, batch, may_change)
            with _tiling(vae, False):
                return run(batch)
        except Exception as error:
            if is_large or not may_change or len(batch) > 1 or not is_out_of_memory(error):
                raise
            forget_frames(error)  # they refer to the activations, whose memory the tiles need
        logger.warning("an image of %dx%d pixels does not fit in memory; it goes in tiles", size[1], size[0])
        return self._in_tiles(vae, run, batch, may_change)

    def _in_tiles(self, vae: Any, run: Callable[[torch.Tensor], Any], batch: torch.Tensor, may_change: bool) -> Any:
        tiles = self._tiles if may_change else None  # other ranks know nothing of this one's repeatable kernels
        with _tiling(vae, True):
            return run(batch) if tiles is None else tiles.run(vae, partial(run, batch))

    def _safe_vae(self) -> Any:
        is_safe = self._dtype != torch.float16 or not self.vae.config.get("force_upcast")
        return self.vae if is_safe else self._vae_for_float32()

    def _vae_for_float32(self) -> Any:
        if self._dtype == torch.float32:
            return self.vae
        if self._upcast_vae is None:
            self._upcast_vae = copy.deepcopy(self.vae).to(torch.float32)
        return self._upcast_vae

    def _dtype_of(self, vae: Any) -> torch.dtype:
        return self._dtype if vae is self.vae else torch.float32

    def _is_large(self, vae: Any, height: int, width: int) -> bool:
        """Return whether the decode of an image would exceed the limit: its memory is linear in the pixels.

        An encode holds less.
        """
        if math.isinf(self._max_bytes) or max(height, width) <= (vae.config.get("sample_size") or 0):
            return False  # one tile
        if (dtype := self._dtype_of(vae)) not in self._pixel_bytes:
            channels = vae.config.z_dim if self._is_of_video else vae.config.latent_channels
            decode, side = _decode_videos if self._is_of_video else _decode_images, _RECORDED_SIDE
            peak = planned_peak(vae, decode, (1, channels, side, side))
            self._pixel_bytes[dtype] = peak / (side * self.scale_factor) ** 2
        return height * width * self._pixel_bytes[dtype] > self._max_bytes


class RecordingCodec(ImageCodec):
    """A codec that records its results on the host: parameters of posteriors, and most likely latents."""

    def __init__(self, codec: ImageCodec) -> None:
        super().__init__(codec.vae)
        self._codec = codec
        self.noted: list[torch.Tensor] = []

    def posterior(self, images_BCHW: torch.Tensor, **options: Any) -> Posterior:
        found = self._codec.posterior(images_BCHW, **options)
        self.noted.append(found.parameters.cpu())
        return found

    def most_likely(
        self, images_BCHW: torch.Tensor, scale: Callable[[torch.Tensor, Any], torch.Tensor]
    ) -> torch.Tensor:
        found = self._codec.most_likely(images_BCHW, scale)
        self.noted.append(found.cpu())
        return found

    def scaled(self, latents: torch.Tensor, scale: Callable[[torch.Tensor, Any], torch.Tensor]) -> torch.Tensor:
        found = self._codec.scaled(latents, scale)
        self.noted.append(found.cpu())
        return found


class ReplayingCodec(ImageCodec):
    """A codec of a blank VAE that replays another's recorded results, in the same order."""

    def __init__(self, vae: Any, noted: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__(vae)
        self._noted = iter(noted)
        self._device = device

    def posterior(self, images_BCHW: torch.Tensor, **options: Any) -> Posterior:
        return DiagonalGaussianDistribution(self._next()) if self.draws_latents else _Latents(self._next())

    def most_likely(
        self, images_BCHW: torch.Tensor, scale: Callable[[torch.Tensor, Any], torch.Tensor]
    ) -> torch.Tensor:
        return self._next()

    def scaled(self, latents: torch.Tensor, scale: Callable[[torch.Tensor, Any], torch.Tensor]) -> torch.Tensor:
        return self._next()

    def _next(self) -> torch.Tensor:
        noted = next(self._noted, None)
        if noted is None:
            raise EngineError("the VAE is not here, and has not encoded the images of this request")
        return noted.to(self._device)


def _decode_images(vae: Any, latents_BCHW: torch.Tensor) -> torch.Tensor:
    images: torch.Tensor = vae.decode(latents_BCHW, return_dict=False)[0]
    return images


def _decode_videos(vae: Any, latents_BCHW: torch.Tensor) -> torch.Tensor:
    """Decode images as videos of one frame, one by one: convolutions over time choose kernels by the batch size."""
    return torch.cat([_decode_images(vae, one[None, :, None])[:, :, 0] for one in latents_BCHW])


@contextlib.contextmanager
def _tiling(vae: Any, is_on: bool) -> Iterator[None]:
    """Set stock's switch for one call: pipelines share the module."""
    before, vae.use_tiling = vae.use_tiling, is_on
    try:
        yield
    finally:
        vae.use_tiling = before


def unit_pixels(image: npt.NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Return an image, uint8 (H, W, 3), as float32 (1, 3, H, W) from 0 to 1."""
    pixels_HWC = torch.from_numpy(image.astype(np.float32) / 255.0)
    return pixels_HWC.permute(2, 0, 1).unsqueeze(0).to(device)
