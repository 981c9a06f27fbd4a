"""The decoding of latents into images, in as few calls of the VAE as bounds and memory allow."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from deployments.engines.costs.memory_limits import MemoryLimits, run_in_parts
from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.image_codec import ImageCodec
from deployments.engines.diffusion.rows import BatchBounds, decode_kind, image_size
from deployments.engines.diffusion.state import DenoiseState
from deployments.engines.graph.workspace import Workspace
from deployments.engines.nn.batch_invariant import repeatable_kernels


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


def kernels(are_repeatable: bool) -> AbstractContextManager[None]:
    """Run the block with kernels that give the same bits in any batch, if that is wanted."""
    return repeatable_kernels() if are_repeatable else nullcontext()
