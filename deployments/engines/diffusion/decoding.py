"""The decoding of latents into images, in as few calls of the VAE as bounds and memory allow."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np
import torch

from deployments.engines.costs.memory_limits import MemoryLimits, run_in_parts
from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.image_codec import ImageCodec
from deployments.engines.diffusion.rows import BatchBounds, decode_kind, image_size
from deployments.engines.diffusion.state import DenoiseState
from deployments.engines.graph.workspace import Workspace
from deployments.engines.nn.batch_invariant import repeatable_kernels
from deployments.engines.records.protocol import ComputationFailed, DiffusionRequest, EngineError

VAE_FAILED: Final = "the latents are finite, but the image that the VAE made of them is not"


class LatentsDecoder:
    """Decodes the latents of a family. `memory` is the pipeline's, which its steps share."""

    def __init__(
        self, family: Family, codec: ImageCodec, bounds: BatchBounds, memory: MemoryLimits, workspace: Workspace
    ) -> None:
        self._family = family
        self._codec = codec
        self._bounds = bounds
        self._memory = memory
        self._workspace = workspace

    def room(self, height: int, width: int) -> tuple[Hashable, float]:
        """Return the kind of work of decoding images of that size, and the number that has room at once."""
        kind, bound = decode_kind(height, width), self._bounds.decode_rows(height * width)
        return kind, min(self._memory.allowed(kind), self._workspace.most_rows(kind, bound))

    def latent_images(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Return latents in the VAE's form."""
        images = self._family.latents.unpack(latents, self._codec.size(height, width))
        return self._family.latents.unscale(images, self._codec.vae)

    def handed_out(self, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Return latents in the denoiser's form as results have them: float32 (B, C, h, w), on the host."""
        images = self._family.latents.unpack(latents.float(), self._codec.size(*size))
        return self._family.latents.handed_out(images, self._codec.vae).cpu()

    def pixels(self, latents_1Chw: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Decode latents of a request, for an image of that height and width: (1, 3, H, W) from 0 to 1."""
        scaled = self._family.latents.taken_in(latents_1Chw, self._codec.vae)
        kind = decode_kind(*size)
        has_room = self._workspace.has_room(kind)
        with self._workspace.lend(kind, 1, 1):
            found = self._codec.pixels(self._family.latents.unscale(scaled, self._codec.vae), in_tiles=not has_room)
        return (found.float() / 2 + 0.5).clamp(0, 1)

    def decode_group(
        self, latents: Sequence[torch.Tensor], group: Sequence[DenoiseState]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Decode latents of these states of one `decode_key`."""
        may_change = not any(state.request.deterministic for state in group)
        return self.decode(torch.cat(list(latents)), image_size(group[0]), may_change, group[0].runs_alone)

    def decode(
        self, latents: torch.Tensor, size: tuple[int, int], may_change: bool, runs_alone: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Decode as `ImageCodec.decode` does, for images of that height and width."""
        height, width = size

        def decode(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
            images = self.latent_images(latents[start:stop], height, width)
            return self._codec.decode(images, may_change=may_change, in_tiles=not has_room)

        kind, bound = decode_kind(height, width), 1 if runs_alone else self._bounds.decode_rows(height * width)
        has_room = self._workspace.has_room(kind)
        with kernels(runs_alone), self._workspace.lend(kind, len(latents), bound) as most:
            parts = run_in_parts(decode, len(latents), most, self._memory, kind)
        images, is_finite = zip(*parts, strict=True)
        return np.concatenate(images), np.concatenate(is_finite)


class VaeAlone:
    """A VAE's work for requests that want nothing else, image by image. The denoiser may be blank."""

    def __init__(
        self, family: Family, codec: ImageCodec, denoiser_config: Mapping[str, Any], decoder: LatentsDecoder
    ) -> None:
        self._family = family
        self._codec = codec
        self._denoiser_config = denoiser_config
        self._decoder = decoder

    def encode(self, request: DiffusionRequest, place: int) -> np.ndarray:
        """Return the most likely latents of one of a request's pixels: float32 (C, h, w), as requests have them.

        Raises EngineError for pixels of a size that the VAE cannot encode.
        """
        pixels = _given("pixels", request.pixels)
        if pixels.shape[3] != 3 or any(side % self._codec.scale_factor for side in pixels.shape[1:3]):
            expected = f"3 channels and sides that are multiples of {self._codec.scale_factor}"
            raise EngineError(f"pixels: their shape is {pixels.shape}, expected {expected}")
        image = torch.tensor(pixels[place], device=self._codec.device).permute(2, 0, 1)[None] * 2 - 1
        latents = self._codec.most_likely(image, self._family.latents.scale).float()
        found: np.ndarray = self._family.latents.handed_out(latents, self._codec.vae)[0].cpu().numpy()
        return found

    def decode(self, request: DiffusionRequest, place: int) -> np.ndarray:
        """Return the pixels of one of a request's latents: float32 (H, W, 3) from 0 to 1.

        Raises EngineError for latents that are not the VAE's, and ComputationFailed.
        """
        latents, size = _given("latents", request.latents), self._codec.size(request.height, request.width)
        expected = (len(latents), *self._family.latents.noise_shape(self._denoiser_config, size))
        if latents.shape != expected:
            raise EngineError(f"latents: their shape is {latents.shape}, expected {expected} for images of this size")
        image = self._decoder.pixels(torch.tensor(latents[place : place + 1], device=self._codec.device), size[:2])
        if not image.isfinite().all():
            raise ComputationFailed(VAE_FAILED)
        pixels: np.ndarray = image[0].permute(1, 2, 0).cpu().numpy()
        return pixels


def _given(name: str, array: np.ndarray | None) -> np.ndarray:
    """Return an array of a request. Raises EngineError if it has none."""
    if array is None:
        raise EngineError(f"{name}: the request has none for the VAE")
    return array


def kernels(are_repeatable: bool) -> AbstractContextManager[None]:
    """Run the block with kernels that give the same bits in any batch, if that is wanted."""
    return repeatable_kernels() if are_repeatable else nullcontext()
