"""Networks that enlarge images, and the tiles in which they do: a pure plan, so that memory and turns are bounded.

RRDBNet and SRVGGNetCompact are modules around tensors that already exist. Written after the papers' descriptions:
ESRGAN (arXiv 1809.00219, section 3.1) and Real-ESRGAN (arXiv 2107.10833, section 3.3).

Images of networks are (B, 3, H, W) from 0 to 1, in RGB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from deployments.engines.graph.recording import planned_peak
from deployments.engines.records.protocol import EngineError
from weights.formats.upscaler import COMPACT, UpscalerNet, expected_shapes, read_upscaler
from weights.loading.modules import materialize
from weights.records.errors import WeightsError

_SLOPE: Final = 0.2  # of leaky ReLUs
_RESIDUAL: Final = 0.2  # of what a block adds
# Margins as wide as the receptive field make tiles equal to the whole. An RRDBNet's is hundreds of pixels wide, and
# nearly all of what counts is near: its authors' program has margins of 10.
_WIDEST_EXACT: Final = 40
_MARGIN: Final = 16
_MAX_SIDE: Final = 512
_MIN_CORE: Final = 32
# Multiplications of one tile: its turn on the device, in which other requests wait.
_MAX_WORK: Final = 3e11
_GPU_FACTOR: Final = 16


class Upscaler(nn.Module):
    """A network that enlarges images, and its structure."""

    def __init__(self, net: UpscalerNet) -> None:
        super().__init__()
        self.net = net


def build_upscaler(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Upscaler:
    """Build the network that tensors of these names and shapes have, in eval mode. Raises EngineError."""
    try:
        net = read_upscaler(folder, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        module = materialize(lambda: (_Compact if net.kind == COMPACT else _RRDBNet)(net), tensors)
    except WeightsError as error:
        raise EngineError(str(error)) from None
    assert isinstance(module, Upscaler)
    return module.eval()


class _DenseBlock(nn.Module):
    """Five layers, each of which reads the block's input and what all layers before it gave."""

    def __init__(self, width: int, num_grown: int) -> None:
        super().__init__()
        self.conv1 = _conv(width, num_grown)
        self.conv2 = _conv(width + num_grown, num_grown)
        self.conv3 = _conv(width + 2 * num_grown, num_grown)
        self.conv4 = _conv(width + 3 * num_grown, num_grown)
        self.conv5 = _conv(width + 4 * num_grown, width)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        read = x_BCHW
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            read = torch.cat((read, _leaky(layer(read))), 1)
        return torch.add(x_BCHW, self.conv5(read), alpha=_RESIDUAL)


class _Block(nn.Module):
    """A residual in residual: three dense blocks, and what they change added in part."""

    def __init__(self, width: int, num_grown: int) -> None:
        super().__init__()
        self.rdb1 = _DenseBlock(width, num_grown)
        self.rdb2 = _DenseBlock(width, num_grown)
        self.rdb3 = _DenseBlock(width, num_grown)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return torch.add(x_BCHW, self.rdb3(self.rdb2(self.rdb1(x_BCHW))), alpha=_RESIDUAL)


class _RRDBNet(Upscaler):
    """Blocks of residuals at the size of the image (or smaller by `shrink`), then a doubling for each `conv_up`."""

    def __init__(self, net: UpscalerNet) -> None:
        super().__init__(net)
        width = net.num_features
        self.conv_first = _conv(3 * net.shrink**2, width)
        self.body = nn.Sequential(*(_Block(width, net.num_grown) for _ in range(net.num_blocks)))
        self.conv_body = _conv(width, width)
        self.ups = [f"conv_up{place}" for place in range(1, net.growth.bit_length())]
        for name in self.ups:
            self.add_module(name, _conv(width, width))
        self.conv_hr = _conv(width, width)
        self.conv_last = _conv(width, 3)

    def forward(self, image_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = self.conv_first(F.pixel_unshuffle(image_BCHW, self.net.shrink))
        x_BCHW = x_BCHW + self.conv_body(self.body(x_BCHW))
        for name in self.ups:
            x_BCHW = _leaky(self.get_submodule(name)(F.interpolate(x_BCHW, scale_factor=2, mode="nearest")))
        enlarged: torch.Tensor = self.conv_last(_leaky(self.conv_hr(x_BCHW)))
        return enlarged


class _Compact(Upscaler):
    """Plain layers at the size of the image, the last of which gives every pixel's block; added to the pixel itself."""

    def __init__(self, net: UpscalerNet) -> None:
        super().__init__(net)
        width = net.num_features
        layers: list[nn.Module] = [_conv(3, width), nn.PReLU(width)]
        for _ in range(net.num_blocks):
            layers += (_conv(width, width), nn.PReLU(width))
        self.body = nn.Sequential(*layers, _conv(width, 3 * net.growth**2))

    def forward(self, image_BCHW: torch.Tensor) -> torch.Tensor:
        added_BCHW = F.pixel_shuffle(self.body(image_BCHW), self.net.growth)
        return added_BCHW + F.interpolate(image_BCHW, scale_factor=self.net.growth, mode="nearest")


def _conv(num_in: int, num_out: int) -> nn.Conv2d:
    return nn.Conv2d(num_in, num_out, 3, padding=1)


def _leaky(x_BCHW: torch.Tensor) -> torch.Tensor:
    return F.leaky_relu(x_BCHW, _SLOPE)


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
    """Return the bytes per pixel of a tile, beside the weights: 0 where that cannot be recorded."""
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
    """Write the network's output for a tile of the image into its place in the result."""
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
