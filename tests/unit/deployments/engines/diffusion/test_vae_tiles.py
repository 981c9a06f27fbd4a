"""Large images go through the VAE in tiles: those of stock's `enable_tiling`, in memory that is bounded."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from deployments.engines.diffusion.image_codec import ImageCodec
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.diffusion.rows import BatchBounds, decode_kind
from deployments.engines.graph.footprint import Footprint
from deployments.engines.graph.recording import Recorder, record
from deployments.engines.graph.workspace import Workspace
from weights.platform.torch_seam import is_fake

SIDE = 48  # the VAE of the tests has a sample_size of 32: four tiles


def tiled(pair: Any, max_vae_bytes: int = 1) -> DenoisePipeline:
    modules = {pair.denoiser_name: pair.ours.denoiser, "vae": pair.ours._codec.vae}
    return DenoisePipeline(pair.ours.family, pair.folder, modules, bounds=BatchBounds(max_vae_bytes=max_vae_bytes))


@pytest.mark.drawn
def test_images_equal_stock_with_tiling(pair, make_request):
    request, conditioning = make_request(width=SIDE, height=SIDE, num_images=2), pair.conditioning()
    ours = tiled(pair)
    images = ours.generate(request, conditioning)
    pair.stock.vae.enable_tiling()
    try:
        stock = pair.stock_images(request, conditioning)
    finally:
        pair.stock.vae.disable_tiling()
    assert np.abs(images.astype(int) - stock.astype(int)).max() <= 1
    whole = pair.ours.generate(request, conditioning)  # the same module, by another pipeline's bounds
    assert np.abs(images.astype(int) - whole.astype(int)).max() > 2
    assert np.abs(whole.astype(int) - pair.stock_images(request, conditioning).astype(int)).max() <= 1


def test_an_encoded_image_equals_stock_with_tiling(sdxl):
    image = torch.rand(1, 3, SIDE, SIDE) * 2 - 1
    vae = sdxl.stock.vae
    vae.enable_tiling()
    try:
        stock = vae.encode(image).latent_dist.sample(torch.Generator().manual_seed(1))
    finally:
        vae.disable_tiling()
    found, whole = (
        ImageCodec(sdxl.ours._codec.vae, most).encode(image, torch.Generator().manual_seed(1)) for most in (1, 10**9)
    )
    assert torch.allclose(found, stock, atol=1e-5)
    assert not torch.allclose(whole, stock, atol=1e-3)


def test_bytes_choose(sdxl):
    """They are those that the tensors of a decode take, of which a hundredth is for another shape."""
    sizes: list[tuple[int, ...]] = []
    vae, latents = sdxl.ours._codec.vae, torch.randn(1, 4, SIDE // 2, SIDE // 2)
    recorder = Recorder(latents.device)
    peak = record(lambda: ImageCodec(vae).pixels(latents), recorder, {}).eager_peak()
    hook = vae.decoder.register_forward_pre_hook(
        lambda _, inputs: None if is_fake(inputs[0]) else sizes.append(tuple(inputs[0].shape[-2:]))
    )
    try:
        for most, expected in [(peak * 1.01, [(24, 24)]), (peak * 0.99, [(16, 16), (16, 12)])]:
            sizes.clear()
            ImageCodec(vae, most).decode(latents)
            assert sizes[:2] == expected
    finally:
        hook.remove()
    assert not vae.use_tiling


@pytest.mark.parametrize("num_images", [1, 2])
def test_an_image_that_finds_no_memory_goes_in_tiles(sdxl, num_images):
    """A batch is halved by the pipeline before that, and what fits in one piece is not touched."""
    vae, latents = sdxl.ours._codec.vae, torch.randn(num_images, 4, SIDE // 2, SIDE // 2)

    def refuse(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[-1] > 16:
            raise MemoryError("no room for a whole image")

    expected, _ = ImageCodec(vae, 1).decode(latents)
    hook = vae.decoder.register_forward_pre_hook(refuse)
    try:
        if num_images > 1:
            with pytest.raises(MemoryError):
                ImageCodec(vae).decode(latents)
        else:
            assert np.array_equal(ImageCodec(vae).decode(latents)[0], expected)
    finally:
        hook.remove()


def test_an_image_that_has_no_room_goes_in_tiles_at_once(sdxl, make_request):
    """Unless it is to be the same bit for bit."""

    class NoRoom:
        def room_bytes(self) -> float:
            return 1.0

        def lend(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    modules = {sdxl.denoiser_name: sdxl.ours.denoiser, "vae": sdxl.ours._codec.vae}
    workspace = Workspace(NoRoom(), {decode_kind(SIDE, SIDE): Footprint(((1, 100), (2, 200)))})
    pipeline = DenoisePipeline(sdxl.ours.family, sdxl.folder, modules, workspace=workspace)
    latents = torch.randn(1, 4, SIDE // 2, SIDE // 2)
    sizes: list[int] = []
    hook = modules["vae"].decoder.register_forward_pre_hook(
        lambda _, inputs: None if is_fake(inputs[0]) else sizes.append(inputs[0].shape[-1])
    )
    try:
        for deterministic, widest in ((False, 16), (True, SIDE // 2)):
            sizes.clear()
            pipeline.decode_latents(make_request(width=SIDE, height=SIDE, deterministic=deterministic), latents)
            assert max(sizes) == widest
    finally:
        hook.remove()
