"""Tiles of a large image that several ranks decode: the bits of one rank's tiles."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.ranks import run_ranks

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
