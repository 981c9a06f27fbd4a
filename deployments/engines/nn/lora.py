"""LoRA and DoRA in two forms that leave the base weights alone, which replicas share and other requests use next.

As a side path, y = base(x) + strength * scale * up(down(x)), through forward hooks: any adapters in one batch. Merged,
y = (W + strength * scale * up down) x with a private copy of each layer that it changes: the steps of the base, for
the memory of those layers, and a batch of its own. The two are equal up to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from deployments.engines.nn.batch_invariant import conv2d, is_batch_invariant, linear
from deployments.engines.nn.dora import add_dora, product_without_bias, row_scales, scaled_inputs
from deployments.engines.protocol import EngineError
from weights.adapters import LoraPair

Pairs = Mapping[str, LoraPair]
FittedPairs = Sequence[tuple[nn.Module, LoraPair]]  # the layers that an adapter changes


class AdaptedSpan(NamedTuple):
    """The adapters of the rows `start` to `stop` of a batch, each with its strength; of all rows by default."""

    uses: Sequence[tuple[FittedPairs, float]]
    start: int = 0
    stop: int = sys.maxsize

    def part(self, start: int, stop: int) -> AdaptedSpan | None:
        """Return the span as the rows `start` to `stop` have it, counted from there; None for one outside of them."""
        first, last = max(self.start, start), min(self.stop, stop)
        return AdaptedSpan(self.uses, first - start, last - start) if first < last else None


@contextmanager
def applied_adapters(spans: Sequence[AdaptedSpan]) -> Iterator[None]:
    """Add to what layers compute within the block, for each span of the batch its own adapters.

    Equal to diffusers' `set_adapters` over PEFT, in the given order, for each span, but that a DoRA of strength 0 does
    nothing at all; a row's result does not depend on the others. The first axis of what goes through the layers is the
    batch. HAZARD: hooks belong to the layers, so one thread at a time may run them; no hook is left behind in any case.
    """
    by_layer: dict[nn.Module, list[_SidePath]] = {}
    for span in spans:
        for pairs, strength in span.uses:
            for layer, pair in pairs if strength else ():
                by_layer.setdefault(layer, []).append((span.start, span.stop, pair, pair.scale * strength))
    handles: list[Any] = []
    try:
        for layer, paths in by_layer.items():
            handles.append(layer.register_forward_hook(_adding(paths)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True, eq=False)
class MergedLayers:
    """One adapter at one strength, merged: `forwards` of the layers over private weights, for `replaced_forwards`.

    `beside` are the pairs of layers that cannot be merged, those in float8 say: they go on the side path.
    """

    strength: float
    forwards: Mapping[nn.Module, Callable[[torch.Tensor], torch.Tensor]]
    beside: FittedPairs


def merge_pairs(pairs: FittedPairs, strength: float) -> MergedLayers:
    """Merge an adapter into copies of the layers that it changes. Reads their weights, so any thread may."""
    forwards: dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]] = {}
    beside = []
    with torch.no_grad():
        for layer, pair in pairs:
            if is_batch_invariant(layer):
                forwards[layer] = _merged_forward(layer, pair, pair.scale * strength)
            else:
                beside.append((layer, pair))
    return MergedLayers(strength, forwards, tuple(beside))


def _merged_forward(layer: Any, pair: LoraPair, factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what the layer computes with its weight W + factor * up down, rounded once to the dtype of W."""
    own: torch.Tensor = layer.weight
    delta = pair.up.float().flatten(1) @ pair.down.float().flatten(1)  # a convolution's `up` is 1 x 1
    wide = torch.add(own.float(), delta.view(own.shape), alpha=factor)
    if pair.magnitude is not None:
        scales = row_scales(layer, pair, factor)
        wide *= scales.view(1, -1, *[1] * (own.ndim - 2)) if pair.by_input else scales.view(-1, *[1] * (own.ndim - 1))
    weight = wide.to(own.dtype)
    if isinstance(layer, nn.Conv2d):
        return lambda x: conv2d(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation)  # type: ignore[arg-type]
    return lambda x: linear(x, weight, layer.bias)


@dataclass(frozen=True, slots=True, eq=False)
class RowAdapter:
    """An adapter of some rows of a batch: pairs by module path, strength, and the numbers of the rows (N,).

    Its products have a multiple of `row_multiple` rows, where those of few rows round by their number.
    """

    pairs: Pairs
    strength: float
    rows: torch.Tensor
    row_multiple: int


@contextmanager
def adapted_rows(module: nn.Module, uses: Sequence[RowAdapter]) -> Iterator[None]:
    """Add adapters to the rows (T, in) of what the linear layers of `module` compute within the block, each to its own.

    They have passed `check_targets`. A row's result does not depend on the others. A module that gives those below it
    only some rows of the batch, in an order of its own, says in `routed_rows` which. HAZARD: as `applied_adapters`.
    """
    by_path: dict[str, list[RowAdapter]] = {}
    for use in uses:
        for path in use.pairs:
            by_path.setdefault(path, []).append(use)
    handles: list[Any] = []
    try:
        for path, own in by_path.items():
            target = module.get_submodule(path)
            handles.append(target.register_forward_hook(_rows_side_path(path, own, _router_above(module, path))))
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_targets(module: nn.Module, pairs: Pairs) -> dict[str, nn.Module]:
    """Return the submodules that `pairs` name. Raises EngineError naming what is not there or does not fit."""
    known = dict(module.named_modules())
    absent = [path for path in pairs if path not in known]
    if absent:
        shown = ", ".join(repr(path) for path in absent[:5]) + (", …" if len(absent) > 5 else "")
        raise EngineError(f"adapter targets {shown} ({len(absent)} of {len(pairs)}) are not in {type(module).__name__}")
    for path, pair in pairs.items():
        _check_fit(path, known[path], pair)
    return {path: known[path] for path in pairs}


def fit_pairs(module: nn.Module, pairs: Pairs) -> FittedPairs:
    """Return the layers that `pairs` name, each with its pair in the module's dtype and place.

    Raises EngineError as `check_targets` does.
    """
    targets = check_targets(module, pairs)
    like = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
    return tuple((targets[path], pair.to(like.device, like.dtype)) for path, pair in pairs.items())


def _check_fit(path: str, target: nn.Module, pair: LoraPair) -> None:
    found: tuple[Any, ...]
    if isinstance(target, nn.Conv2d) and target.groups == 1:
        wanted, found = 4, (target.in_channels, *target.kernel_size, target.out_channels, 1, 1)
    elif hasattr(target, "in_features") and hasattr(target, "out_features"):
        wanted, found = 2, (target.in_features, target.out_features)
    else:
        raise EngineError(f"adapter target {path!r} is a {type(target).__name__}, expected a linear or Conv2d layer")
    given = (*pair.down.shape[1:], pair.up.shape[0], *pair.up.shape[2:])
    if pair.down.ndim != wanted or given != found:
        raise EngineError(
            f"adapter target {path!r}: matrices of (in, out) sizes {given} do not fit a {type(target).__name__} of "
            f"{found}"
        )


_SidePath = tuple[int, int, LoraPair, float]  # rows from, to, and what is added to them, times so much


def _adding(paths: Sequence[_SidePath]) -> Callable[[nn.Module, Any, torch.Tensor], None]:
    def add(layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        for start, stop, pair, factor in paths:
            x, own = args[0], output
            if start or stop < len(x):
                x, own = x[start:stop], output[start:stop]
            if pair.magnitude is None:
                own += _delta(layer, x, pair, factor)
                continue
            scales = row_scales(layer, pair, factor)
            if pair.by_input:
                own += product_without_bias(layer, scaled_inputs(layer, x, scales - 1))
                own += _delta(layer, scaled_inputs(layer, x, scales), pair, factor)
            else:
                add_dora(layer, own, _delta(layer, x, pair, factor), scales)

    return add


def _delta(layer: nn.Module, x: torch.Tensor, pair: LoraPair, factor: float) -> torch.Tensor:
    """Return up(down(x)), scaled between the two, where it has the fewest elements."""
    down, up = pair.down.to(x.dtype), pair.up.to(x.dtype)  # a layer may compute in another type than it is stored in
    if isinstance(layer, nn.Conv2d):
        padding = layer.padding
        assert not isinstance(padding, str)  # diffusers gives numbers
        return conv2d(conv2d(x, down, None, layer.stride, padding, layer.dilation) * factor, up)
    return linear(linear(x, down) * factor, up)


def _router_above(module: nn.Module, path: str) -> Any:
    """Return the module on the way to `path` that has `routed_rows`, or None."""
    parts = path.split(".")
    above = (module.get_submodule(".".join(parts[:size])) for size in range(1, len(parts)))
    return next((one for one in above if hasattr(one, "routed_rows")), None)


def _rows_side_path(
    path: str, uses: Sequence[RowAdapter], router: Any
) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
    def add(target: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        routed = None if router is None else router.routed_rows
        own_rows = output.flatten(0, -2)  # the batch of a layer of transformers has two axes
        for use in uses:
            rows = use.rows if routed is None else torch.isin(routed, use.rows).nonzero()[:, 0]
            pair, x = use.pairs[path], args[0].flatten(0, -2)[rows]
            padded = F.pad(x, (0, 0, 0, -len(x) % use.row_multiple))
            delta = linear(linear(padded, pair.down), pair.up)[: len(x)] * (pair.scale * use.strength)
            if pair.magnitude is None:
                own_rows.index_add_(0, rows, delta)
                continue
            own = own_rows[rows]  # a copy
            add_dora(target, own, delta, row_scales(target, pair, pair.scale * use.strength))
            own_rows[rows] = own
        return own_rows.view(output.shape)

    return add
