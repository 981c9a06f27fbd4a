"""Tiles of an image that is enlarged: a pure plan, so that memory and turns are bounded, and the run of one."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deployments.engines.graph.recording import planned_peak
from deployments.engines.upscaling.networks import Upscaler
from weights.formats.upscaler import COMPACT, UpscalerNet, expected_shapes

# Margins as wide as the receptive field make tiles equal to the whole. An RRDBNet's is hundreds of pixels wide, and
# nearly all of what counts is near: its authors' program has margins of 10.
_WIDEST_EXACT: Final = 40
_MARGIN: Final = 16
_MAX_SIDE: Final = 512
_MIN_CORE: Final = 32
# Multiplications of one tile: its turn on the device, in which other requests wait.
_MAX_WORK: Final = 3e11
_GPU_FACTOR: Final = 16


class Span(NamedTuple):
    """Pixels of one axis: `start` to `stop` are read, and the result of `first` to `last` is kept."""

    start: int
    stop: int
    first: int
    last: int


class Tile(NamedTuple):
    """A part of an image."""

    rows: Span
    columns: Span


def plan_tiles(height: int, width: int, core: int, margin: int) -> list[Tile]:
    """Return tiles that keep each pixel of an image once, `core` pixels wide and high, and read `margin` more around.

    Where all begin at multiples of a number, `core` and `margin` are multiples of it.
    """
    rows, columns = (
        [
            Span(max(0, first - margin), min(side, first + core + margin), first, min(side, first + core))
            for first in range(0, side, core)
        ]
        for side in (height, width)
    )
    return [Tile(row, column) for row in rows for column in columns]


def margin_of(net: UpscalerNet) -> int:
    """Return the pixels around a tile that are read as well."""
    wanted = net.radius if net.radius <= _WIDEST_EXACT else _MARGIN
    return math.ceil(wanted / net.shrink) * net.shrink


def core_of(net: UpscalerNet, most_pixels: float, *, is_cpu: bool) -> int:
    """Return the side of what tiles keep, where a tile has at most so many pixels and turns are not too long."""
    most_work = _MAX_WORK * (1 if is_cpu else _GPU_FACTOR)
    side = min(_MAX_SIDE, math.sqrt(most_work / _work_of_pixel(net)), math.sqrt(most_pixels))
    core = max(_MIN_CORE, int(side) - 2 * margin_of(net))
    return core - core % net.shrink


def pixel_bytes(module: Upscaler) -> float:
    """Return what a pixel of a tile takes of the memory beside the weights: 0 where that cannot be recorded."""
    return planned_peak(module, lambda twin, tile: twin(tile).float(), (1, 3, _MIN_CORE, _MIN_CORE)) / _MIN_CORE**2


def _work_of_pixel(net: UpscalerNet) -> float:
    """Return the multiplications of one pixel."""
    work = 0.0
    for name, shape in expected_shapes(net).items():
        size = net.growth if name.startswith(("conv_hr", "conv_last")) else 1
        size = 2 ** int(name[7]) if name.startswith("conv_up") else size
        work += math.prod(shape) * size**2
    return work if net.kind == COMPACT else work / net.shrink**2


def padded(image_HWC: npt.NDArray[np.uint8], multiple: int) -> npt.NDArray[np.uint8]:
    """Return an image whose sides are multiples of a number, mirrored at its right and lower edge."""
    height, width = image_HWC.shape[:2]
    return np.pad(image_HWC, ((0, -height % multiple), (0, -width % multiple), (0, 0)), mode="reflect")


def enlarge_tile(
    module: Upscaler, image_HWC: npt.NDArray[np.uint8], tile: Tile, result_HWC: npt.NDArray[np.uint8]
) -> None:
    """Write what a network makes of a tile of the image into its place in the result."""
    rows, columns = tile
    parameter = next(module.parameters())
    pixels_HWC = torch.from_numpy(image_HWC[rows.start : rows.stop, columns.start : columns.stop].copy())
    pixels_BCHW = pixels_HWC.to(parameter.device).permute(2, 0, 1).unsqueeze(0).to(parameter.dtype) / 255
    with torch.no_grad():
        made_BCHW = module(pixels_BCHW).float().clamp(0, 1).mul(255).round().to(torch.uint8)
    made_HWC = made_BCHW[0].permute(1, 2, 0).cpu().numpy()
    scale = module.net.scale
    height, width = result_HWC.shape[:2]
    last_row, last_column = min(rows.last * scale, height), min(columns.last * scale, width)
    result_HWC[rows.first * scale : last_row, columns.first * scale : last_column] = made_HWC[
        (rows.first - rows.start) * scale : last_row - rows.start * scale,
        (columns.first - columns.start) * scale : last_column - columns.start * scale,
    ]
