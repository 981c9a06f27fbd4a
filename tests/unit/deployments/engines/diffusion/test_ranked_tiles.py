"""Tiles of a large image that several ranks decode: the bits of one rank's tiles."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from kit.ranks import run_ranks
from kit.tiny.classes import small

from deployments.engines.diffusion.image_codec import ImageCodec
from deployments.engines.diffusion.ranked_tiles import LeadingTiles, TilesFollower
from deployments.engines.ranks.following import RankChannel, follow
from deployments.engines.ranks.group import RankGroup
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.ranks.outcomes import RankFailed

SIDE = 48  # the VAE of the tests has a sample_size of 32: four tiles


def led(layout: RankLayout, vae: Any, lead: Callable[[ImageCodec, RankGroup], Any], *, breaks: bool = False) -> Any:
    """Return the result of `lead` with rank 0's codec, which has tiles for any image larger than one."""

    def rank_of(group: RankGroup) -> Any:
        own = copy.deepcopy(vae)
        if group.rank:
            if breaks:
                own.decoder.register_forward_pre_hook(broken)
            return follow(group, {"tiny": TilesFollower(group, own)})
        found = lead(ImageCodec(own, 1, LeadingTiles(RankChannel(group, "tiny"), own)), group)
        group.close()
        return found

    return run_ranks(layout, rank_of)[0]


def broken(*_: Any) -> None:
    raise ValueError("no kernel")


@pytest.mark.parametrize(
    "layout", [RankLayout(cfg=2), RankLayout(sequence=3), RankLayout(cfg=2, sequence=2), RankLayout(sequence=5)]
)
def test_a_picture_of_tiles_has_the_bits_of_one_rank(layout: RankLayout, sdxl: Any) -> None:
    vae, latents = sdxl.ours._codec.vae, torch.randn(2, 4, SIDE // 2, SIDE // 2)
    expected = ImageCodec(vae, 1).pixels(latents)

    def lead(codec: ImageCodec, group: RankGroup) -> Any:
        found = [codec.pixels(latents) for _ in range(2)]
        return found, group.sent_bytes["cfg"] + group.sent_bytes["sequence"]

    found, sent = led(layout, vae, lead)
    assert all(torch.equal(one, expected) for one in found)
    assert sent > 0


def hunyuan() -> Any:
    """Nine latents in tiles of five, every third one."""
    return small(diffusers.AutoencoderKLHunyuanVideo, latent_channels=4, block_out_channels=(8, 8, 8, 8))


def allegro() -> Any:
    """Cubes of two latents by two by two, each of which begins one further."""
    vae = diffusers.AutoencoderKLAllegro(block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=2)
    vae.enable_tiling()
    vae.kernel, vae.stride = (8, 16, 16), (4, 8, 8)
    return vae


@pytest.mark.drawn
@pytest.mark.parametrize("layout", [RankLayout(cfg=2), RankLayout(cfg=2, sequence=2)])
@pytest.mark.parametrize(("make", "shape"), [(hunyuan, (1, 4, 9, 2, 3)), (allegro, (1, 4, 4, 4, 4))])
def test_a_video_of_tiles_has_the_bits_of_one_rank(
    layout: RankLayout, make: Callable[[], Any], shape: tuple[int, ...]
) -> None:
    vae, latents = make().eval().requires_grad_(False), torch.randn(shape)
    expected = vae.decode(latents).sample

    def rank_of(group: RankGroup) -> Any:
        own = copy.deepcopy(vae)
        if group.rank:
            return follow(group, {"tiny": TilesFollower(group, own)})
        tiles = LeadingTiles(RankChannel(group, "tiny"), own)
        found, sent = tiles.run(own, lambda: own.decode(latents).sample), group.sent_bytes["cfg"]
        own.to(torch.float64)  # as no other rank has it
        wide = tiles.run(own, lambda: own.decode(latents.double()).sample)
        assert group.sent_bytes["cfg"] == sent > 0
        group.close()
        return found, wide

    found, wide = run_ranks(layout, rank_of)[0]
    assert torch.equal(found, expected)
    torch.testing.assert_close(wide.float(), expected, atol=1e-4, rtol=1e-4)


def test_what_has_no_tiles_is_rank_0s(sdxl: Any) -> None:
    """An image of one tile, and one that is encoded."""
    vae, latents = sdxl.ours._codec.vae, torch.randn(1, 4, 16, 16)
    image = torch.rand(1, 3, SIDE, SIDE) * 2 - 1
    expected = ImageCodec(vae, 1).pixels(latents), ImageCodec(vae, 1).posterior(image).mode()

    def lead(codec: ImageCodec, group: RankGroup) -> Any:
        return codec.pixels(latents), codec.posterior(image).mode(), dict(group.sent_bytes)

    *found, sent = led(RankLayout(cfg=2), vae, lead)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert sent == {}


@pytest.mark.parametrize("layout", [RankLayout(cfg=2), RankLayout(cfg=2, sequence=2)])
def test_an_error_of_another_rank_is_that_images(layout: RankLayout, sdxl: Any) -> None:
    def lead(codec: ImageCodec, group: RankGroup) -> None:
        for _ in range(2):  # the group goes on
            with pytest.raises(RankFailed, match="no kernel"):
                codec.pixels(torch.randn(1, 4, SIDE // 2, SIDE // 2))

    led(layout, sdxl.ours._codec.vae, lead, breaks=True)
