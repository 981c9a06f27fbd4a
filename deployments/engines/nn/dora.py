"""DoRA: a LoRA whose rows have lengths of their own, W' = m (W + f BA) / |W + f BA|, without a copy of W.

The norms of all strengths f follow from three products of the rows of W and BA, which are computed once. Magnitudes
are by output, as PEFT's, or by input, as LyCORIS had them at first. Source: peft 0.21, `tuners/lora/dora.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from weights.operations.adapters import LoraPair

CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TILE_BYTES: Final = 8 * 2**20  # of wide rows of W
_products: weakref.WeakKeyDictionary[LoraPair, torch.Tensor] = weakref.WeakKeyDictionary()


def row_scales(layer: Any, pair: LoraPair, factor: float) -> torch.Tensor:
    """Return m / |W + f BA| of each output, or input (N,) of a pair that was fitted to this layer, in float32.

    The layer's weights are read the first time only. A row of zeros keeps its zeros.
    """
    assert pair.magnitude is not None
    ((own, cross, added),) = known_products(layer, pair)
    norms = (own + 2 * factor * cross + factor**2 * added).clamp(min=0).sqrt()
    scales = torch.where(norms > 0, pair.magnitude.double() / norms, 1.0)
    return scales.float()


def add_dora(layer: Any, output: torch.Tensor, delta: torch.Tensor, scales: torch.Tensor) -> None:
    """Turn the output of a layer into that with DoRA, by output; `delta` is f BA x. All have the features last, or
    those of a convolution second.
    """
    bias = layer.bias
    if isinstance(layer, CONVOLUTIONS):
        ones = (1,) * len(layer.kernel_size)
        scales, bias = scales.view(-1, *ones), None if bias is None else bias.view(-1, *ones)
    scales = scales.to(output.dtype)
    base = output if bias is None else output - bias.to(output.dtype)
    output += base * (scales - 1) + delta * scales


def scaled_inputs(layer: Any, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return x with its features times `scales` (N,)."""
    shape = (-1, *(1,) * len(layer.kernel_size)) if isinstance(layer, CONVOLUTIONS) else (-1,)
    return x * scales.view(shape).to(x.dtype)


def known_products(layer: nn.Module, pair: LoraPair) -> tuple[torch.Tensor, ...]:
    """Return the products of the rows of a DoRA, computed the first time; none of another pair."""
    if pair.magnitude is None:
        return ()
    if (products := _products.get(pair)) is None:
        products = _products[pair] = _row_products(layer, pair)
    return (products,)


def keep_products(pair: LoraPair, products: torch.Tensor) -> None:
    """Take these for the products of the rows of a DoRA."""
    _products[pair] = products


def _row_products(layer: Any, pair: LoraPair) -> torch.Tensor:
    """Return |W|^2, <W, BA> and |BA|^2 of each output or input, (3, N) in float64."""
    down, up = pair.down.float().flatten(1), pair.up.float().flatten(1)  # a convolution's `up` is 1 x 1
    num_inputs = pair.down.shape[1]
    assert pair.magnitude is not None
    found = torch.zeros(3, len(pair.magnitude), dtype=torch.float64, device=pair.magnitude.device)
    start = 0
    with torch.no_grad():
        for tile in _weight_tiles(layer):
            stop = start + len(tile)
            added = up[start:stop] @ down
            for place, (a, b) in enumerate(((tile, tile), (tile, added), (added, added))):
                product = a * b
                if pair.by_input:
                    found[place] += product.view(len(tile), num_inputs, -1).sum((0, 2), dtype=torch.float64)
                else:
                    found[place, start:stop] = product.sum(1, dtype=torch.float64)
            start = stop
    return found


def _weight_tiles(layer: Any) -> Iterator[torch.Tensor]:
    """Yield the rows of a layer's weights in order, some at a time, flat and in float32."""
    if hasattr(layer, "weight_tiles"):  # weights that are not wide
        yield from layer.weight_tiles()
        return
    rows = layer.weight.flatten(1)
    size = max(1, _TILE_BYTES // (4 * rows.shape[1]))
    for start in range(0, len(rows), size):
        yield rows[start : start + size].float()
