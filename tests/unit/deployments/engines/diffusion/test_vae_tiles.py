"""Large images go through the VAE in tiles: those of stock's `enable_tiling`, in memory that is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deployments.engines.diffusion.image_codec import ImageCodec
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.diffusion.rows import BatchBounds

SIDE = 48  # the VAE of the tests has a sample_size of 32: four tiles


def tiled(pair: Any, max_vae_bytes: int = 1) -> DenoisePipeline:
    modules = {pair.denoiser_name: pair.ours.denoiser, "vae": pair.ours._codec.vae}
    return DenoisePipeline(pair.ours.family, pair.folder, modules, bounds=BatchBounds(max_vae_bytes=max_vae_bytes))


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
    """8 channels, float32: 4 * 8 * 4 bytes for each pixel."""
    sizes: list[tuple[int, ...]] = []
    vae = sdxl.ours._codec.vae
    hook = vae.decoder.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape[-2:])))
    try:
        for most, expected in [(SIDE * SIDE * 128, [(24, 24)]), (SIDE * SIDE * 128 - 1, [(16, 16), (16, 12)])]:
            sizes.clear()
            ImageCodec(vae, most).decode(torch.randn(1, 4, SIDE // 2, SIDE // 2))
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
