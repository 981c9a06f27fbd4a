"""Upscalers with random weights, and what they compute written out once more: tensor by tensor, without modules."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


def _conv(tensors: Tensors, name: str, num_in: int, num_out: int, gain: float = 1.0) -> None:
    scale = gain / (9 * num_in) ** 0.5
    tensors[f"{name}.weight"] = torch.randn(num_out, num_in, 3, 3) * scale
    tensors[f"{name}.bias"] = torch.randn(num_out) * 0.05


def rrdb(*, num_blocks: int = 2, width: int = 8, grown: int = 4, num_read: int = 3, ups: int = 2) -> Tensors:
    """An RRDBNet by Real-ESRGAN's names."""
    tensors: Tensors = {}
    _conv(tensors, "conv_first", num_read, width)
    for block in range(num_blocks):
        for dense in (1, 2, 3):
            for place in range(5):
                into = width if place == 4 else grown
                _conv(tensors, f"body.{block}.rdb{dense}.conv{place + 1}", width + place * grown, into)
    for name in ("conv_body", *(f"conv_up{place + 1}" for place in range(ups)), "conv_hr"):
        _conv(tensors, name, width, width)
    _conv(tensors, "conv_last", width, 3)
    tensors["conv_last.bias"] += 0.5
    return tensors


def compact(*, num_convs: int = 3, width: int = 8, scale: int = 4) -> Tensors:
    """An SRVGGNetCompact."""
    tensors: Tensors = {}
    sizes = [(3, width), *[(width, width)] * num_convs]
    for place, (num_in, num_out) in enumerate(sizes):
        _conv(tensors, f"body.{2 * place}", num_in, num_out)
        tensors[f"body.{2 * place + 1}.weight"] = torch.rand(width) * 0.5
    _conv(tensors, f"body.{2 * len(sizes)}", width, 3 * scale**2, gain=0.2)
    return tensors


def as_esrgan(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """By the names of ESRGAN's repository."""
    found = {}
    for name, tensor in tensors.items():
        old = name
        for mine, theirs in (("conv_body", "trunk_conv"), ("body.", "RRDB_trunk."), ("rdb", "RDB")):
            old = old.replace(mine, theirs)
        found[old.replace("conv_up", "upconv").replace("conv_hr", "HRconv")] = tensor
    return found


def as_list(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """By the places of layers in a list: a doubling, its convolution and its ReLU, for each of the two."""
    num_blocks = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("body."))
    ups = sum(name.startswith("conv_up") for name in tensors) // 2
    places = {"conv_first": "model.0", "conv_body": f"model.1.sub.{num_blocks}"}
    places |= {f"conv_up{place + 1}": f"model.{3 * place + 3}" for place in range(ups)}
    places |= {"conv_hr": f"model.{3 * ups + 2}", "conv_last": f"model.{3 * ups + 4}"}
    found = {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if layer.startswith("body."):
            _, block, dense, conv = layer.split(".")
            layer = f"model.1.sub.{block}.{dense.upper()}.{conv}.0"
        found[f"{places.get(layer, layer)}.{leaf}"] = tensor
    return found


def enlarged(tensors: Mapping[str, torch.Tensor], image_HWC: np.ndarray) -> np.ndarray:
    """Return a network's output for a whole image, by Real-ESRGAN's names: float64 from 0 to 255, not clamped."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}

    def conv(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    def leaky(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, x * 0.2)

    def doubled(x: torch.Tensor, times: int) -> torch.Tensor:
        return x.repeat_interleave(times, 2).repeat_interleave(times, 3)

    image = torch.from_numpy(image_HWC).double().permute(2, 0, 1)[None] / 255
    if "conv_first.weight" not in weights:
        last = max(int(name.split(".")[1]) for name in weights)
        x = image
        for place in range(0, last, 2):
            x = conv(f"body.{place}", x)
            x = torch.where(x > 0, x, x * weights[f"body.{place + 1}.weight"][:, None, None])
        x = conv(f"body.{last}", x)
        scale = round((x.shape[1] / 3) ** 0.5)
        b, _, h, w = x.shape
        shuffled = x.reshape(b, 3, scale, scale, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, 3, h * scale, w * scale)
        return (shuffled + doubled(image, scale))[0].permute(1, 2, 0).numpy() * 255
    shrink = round((weights["conv_first.weight"].shape[1] / 3) ** 0.5)
    b, _, h, w = image.shape
    blocks = image.reshape(b, 3, h // shrink, shrink, w // shrink, shrink).permute(0, 1, 3, 5, 2, 4)
    first = conv("conv_first", blocks.reshape(b, 3 * shrink**2, h // shrink, w // shrink))
    x = first
    for block in range(1 + max(int(name.split(".")[1]) for name in weights if name.startswith("body."))):
        begun = x
        for dense in (1, 2, 3):
            read = [x]
            for place in (1, 2, 3, 4):
                read.append(leaky(conv(f"body.{block}.rdb{dense}.conv{place}", torch.cat(read, 1))))
            x = x + 0.2 * conv(f"body.{block}.rdb{dense}.conv5", torch.cat(read, 1))
        x = begun + 0.2 * x
    x = first + conv("conv_body", x)
    for name in sorted({name.split(".")[0] for name in weights if name.startswith("conv_up")}):
        x = leaky(conv(name, doubled(x, 2)))
    return conv("conv_last", leaky(conv("conv_hr", x)))[0].permute(1, 2, 0).numpy() * 255
