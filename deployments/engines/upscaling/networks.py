"""RRDBNet and SRVGGNetCompact as modules around tensors that already exist. Written after the papers' descriptions:
ESRGAN (arXiv 1809.00219, section 3.1) and Real-ESRGAN (arXiv 2107.10833, section 3.3).

Images are (B, 3, H, W) from 0 to 1, in RGB.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from deployments.engines.protocol import EngineError
from weights.errors import WeightsError
from weights.formats.upscaler import COMPACT, UpscalerNet, read_upscaler
from weights.loading.modules import materialize

_SLOPE: Final = 0.2  # of leaky ReLUs
_RESIDUAL: Final = 0.2  # of what a block adds


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
