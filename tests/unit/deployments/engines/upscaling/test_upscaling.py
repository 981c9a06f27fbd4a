"""Upscaling networks and their tiles, beside the same computation written out, over the whole image."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.seeding import seeded_random, seeded_rng
from unit.deployments.engines.upscaler_files import Tensors, compact, enlarged, rrdb

from deployments.engines.records.protocol import EngineError
from deployments.engines.upscaling import (
    Tile,
    Upscaler,
    build_upscaler,
    core_of,
    enlarge_tile,
    margin_of,
    padded,
    plan_tiles,
)
from weights.formats.upscaler import COMPACT, RRDB, UpscalerNet

REAL = UpscalerNet(RRDB, 64, 23, 4, 1, 32)  # RealESRGAN_x4plus


def image_of(height: int, width: int) -> np.ndarray:
    return seeded_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)


def in_tiles(module: Upscaler, image: np.ndarray, core: int, margin: int) -> np.ndarray:
    whole, scale = padded(image, module.net.shrink), module.net.scale
    result = np.empty((image.shape[0] * scale, image.shape[1] * scale, 3), np.uint8)
    for tile in plan_tiles(*whole.shape[:2], core, margin):
        enlarge_tile(module, whole, tile, result)
    return result


def rounded(made: np.ndarray) -> np.ndarray:
    return made.clip(0, 255).round().astype(int)


NETS: list[Tensors] = [
    rrdb(), rrdb(ups=1), rrdb(ups=3, num_blocks=1), rrdb(num_read=12), rrdb(num_read=48), compact(), compact(scale=2),
]  # fmt: skip


@pytest.mark.parametrize("tensors", NETS)
def test_a_network_is_the_same_written_out(tensors: Tensors) -> None:
    module, image = build_upscaler(Path("x"), tensors), image_of(12, 20)
    found = in_tiles(module, image, core=64, margin=0)
    assert np.abs(found - rounded(enlarged(tensors, image))).max() <= 1  # where the two sums round to either side


@pytest.mark.parametrize("tensors", [compact(num_convs=4), rrdb(num_blocks=1), rrdb(num_blocks=1, num_read=12)])
def test_tiles_with_their_whole_receptive_field_are_the_whole(tensors: Tensors) -> None:
    module, image = build_upscaler(Path("x"), tensors), image_of(75, 58)
    shrink, radius = module.net.shrink, module.net.radius
    found = in_tiles(module, image, core=20, margin=-(-radius // shrink) * shrink)
    made = enlarged(tensors, padded(image, shrink))[: found.shape[0], : found.shape[1]]
    assert np.abs(found - rounded(made)).max() <= 1
    narrow = in_tiles(module, image, core=20, margin=0)
    assert np.abs(narrow.astype(int) - found).max() > 1  # so that the margin is what made them equal


def test_an_odd_image_is_mirrored_and_cut_again() -> None:
    tensors = rrdb(num_read=48)
    module, image = build_upscaler(Path("x"), tensors), image_of(11, 13)
    mirrored = np.pad(image, ((0, 1), (0, 3), (0, 0)), mode="reflect")
    assert np.abs(in_tiles(module, image, 32, 0) - rounded(enlarged(tensors, mirrored))[:11, :13]).max() <= 1
    assert in_tiles(module, image[:1, :1], 32, 0).shape == (1, 1, 3)


def test_every_pixel_is_kept_once_and_reads_its_margin() -> None:
    draw = seeded_random()
    for _ in range(100):
        height, width, core, margin = (draw.randint(1, most) for most in (90, 90, 40, 20))
        kept = np.zeros((height, width), int)
        for rows, columns in plan_tiles(height, width, core, margin):
            kept[rows.first : rows.last, columns.first : columns.last] += 1
            for span, side in ((rows, height), (columns, width)):
                assert span.start == max(0, span.first - margin)
                assert span.stop == min(side, span.first + core + margin)
        assert (kept == 1).all()


def test_memory_and_turns_bound_a_tile() -> None:
    tight, wide = (core_of(REAL, most, is_cpu=False) for most in (100**2, 1e6))
    assert tight + 2 * margin_of(REAL) <= 100
    assert tight < wide
    assert core_of(REAL, 1e6, is_cpu=True) < wide
    shrunk = UpscalerNet(RRDB, 64, 23, 4, 2, 32)
    for net, most in itertools.product((REAL, shrunk, UpscalerNet(COMPACT, 64, 32, 4)), (1.0, 1e9)):
        assert core_of(net, most, is_cpu=True) % net.shrink == margin_of(net) % net.shrink == 0
    assert margin_of(UpscalerNet(COMPACT, 64, 32, 4)) == 34  # its receptive field: equal to the whole


def test_a_tile_is_bounded_by_what_it_keeps() -> None:
    """Views: nothing of the image beside the tile is read, and nothing of the result beside it is written."""
    module, image = build_upscaler(Path("x"), compact()), image_of(40, 40)
    tile: Tile = plan_tiles(40, 40, 16, 8)[4]
    result = np.zeros((160, 160, 3), np.uint8)
    enlarge_tile(module, image, tile, result)
    kept = result[64:128, 64:128].copy()
    assert kept.any()
    result[64:128, 64:128] = 0
    assert not result.any()
    far = image.copy()
    far[:8] = 255 - far[:8]
    enlarge_tile(module, far, tile, result)
    assert np.array_equal(result[64:128, 64:128], kept)


def test_tensors_that_are_no_network_are_refused() -> None:
    tensors = rrdb()
    del tensors["conv_hr.weight"]
    with pytest.raises(EngineError, match=r"'conv_hr\.weight' is missing"):
        build_upscaler(Path("x"), tensors)


def test_no_weight_is_copied() -> None:
    tensors = compact()
    module = build_upscaler(Path("x"), tensors)
    assert {one.data_ptr() for one in module.parameters()} == {one.data_ptr() for one in tensors.values()}
    assert not any(one.requires_grad for one in module.parameters())
    assert all(isinstance(one, torch.nn.Parameter) for one in module.parameters())
