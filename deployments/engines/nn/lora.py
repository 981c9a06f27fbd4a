"""LoRA and its kin in two forms that leave the base weights alone, which replicas share and other requests use next.

As a side path, y = base(x) + strength * scale * up(down(x)), through forward hooks: any adapters in one batch. Merged,
y = (W + strength * scale * up down) x with a private copy of each layer that it changes: the steps of the base, for
the memory of those layers, and a batch of its own. The two are equal up to rounding.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from deployments.engines.nn.batch_invariant import add_product, conv2d, is_batch_invariant, linear
from deployments.engines.nn.dora import CONVOLUTIONS, add_dora, keep_products, known_products, row_scales, scaled_inputs
from deployments.engines.nn.feature_maps import MappedPair
from deployments.engines.nn.few_rows import add_pair
from deployments.engines.nn.tensor_fields import form_of, tensors_of, with_tensors
from deployments.engines.records.protocol import EngineError
from weights.operations.adapters import LoraPair
from weights.platform.torch_seam import forward_hooks_of, keyword_hooks_of

Pairs = Mapping[str, LoraPair]
Hook = Callable[..., torch.Tensor]  # of a layer, its arguments, those by keyword if asked for, and its output


class FittedPairs(dict[nn.Module, LoraPair]):
    """The pairs of an adapter by the layers that they change. Nobody changes it, or its tensors."""

    @cached_property
    def form(self) -> str:
        """Return the identity of all but the tensors' values, for as long as the layers live."""
        described = [(id(layer), form_of(pair)) for layer, pair in self.items()]
        return hashlib.sha256(repr(described).encode()).hexdigest()

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of all pairs, those of a DoRA with the products of its rows; always the same objects."""
        return tuple(one for layer, pair in self.items() for one in (*tensors_of(pair), *known_products(layer, pair)))

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> FittedPairs:
        """Return the pairs with others in the place of their `tensors`, taken in that order."""
        given = list(islice(tensors, len(self.tensors)))
        if all(map(is_, given, self.tensors)):
            return self
        left, found = iter(given), FittedPairs()
        for layer, pair in self.items():
            found[layer] = own = with_tensors(pair, left)
            if pair.magnitude is not None:
                keep_products(own, next(left))
        return found


class AdaptedSpan(NamedTuple):
    """The adapters of the rows `start` to `stop` of a batch, each with its strength; of all rows by default."""

    uses: Sequence[tuple[FittedPairs, float]]
    start: int = 0
    stop: int = sys.maxsize

    def part(self, start: int, stop: int) -> AdaptedSpan | None:
        """Return the span as the rows `start` to `stop` have it, counted from there; None for one outside of them."""
        first, last = max(self.start, start), min(self.stop, stop)
        return AdaptedSpan(self.uses, first - start, last - start) if first < last else None

    @property
    def form(self) -> Hashable:
        """Return all but the values of `tensors`."""
        return self.start, self.stop, tuple((pairs.form, strength) for pairs, strength in self.uses)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of its adapters."""
        return (one for pairs, _ in self.uses for one in pairs.tensors)

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> AdaptedSpan:
        """Return the span with others in the place of its `tensors`, taken in that order."""
        return self._replace(uses=[(pairs.with_tensors(tensors), strength) for pairs, strength in self.uses])


@dataclass(frozen=True, slots=True)
class Batch:
    """The number of rows of a forward, of which a layer may see several vectors along its first axis.

    Those of a row follow each other; where a forward `repeats` its rows, they follow in their order once more.
    """

    num_rows: int
    repeats: bool = False

    def part(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the part of a layer's features that belongs to the rows `start` to `stop`, as a view."""
        if not start and stop >= self.num_rows:
            return x
        each, rest = divmod(len(x), self.num_rows)
        if rest:
            raise ValueError(f"{len(x)} vectors of {self.num_rows} rows: not as many of each")
        if self.repeats and each > 1:
            return x.view(each, self.num_rows, *x.shape[1:])[:, start:stop]
        return x[each * start : each * min(stop, self.num_rows)]


def applied_adapters(
    spans: Sequence[AdaptedSpan], batch: Batch | None = None, *, by_keyword: bool = False
) -> AbstractContextManager[None]:
    """Add to what layers compute within the block, for each span of the batch its own adapters.

    Equal to diffusers' `set_adapters` over PEFT, in the given order, for each span, but that a DoRA of strength 0 does
    nothing at all; a row's result does not depend on the others. Without a `batch`, the first axis of what goes through
    each layer is the batch. Layers may be called `by_keyword`. HAZARD: hooks belong to the layers, so one thread at a
    time may run them; no hook is left behind in any case.
    """
    uses = [(span.start, span.stop, *use) for span in spans for use in span.uses if use[1]]

    def add(layer: nn.Module, args: tuple[torch.Tensor, ...], *others: Any) -> torch.Tensor:
        x, result = args[0] if args else next(iter(others[0].values())), _writable(layer, others[-1])
        here = batch or Batch(len(x))
        # What turns outputs turns those of the layer alone, whatever else is added to them.
        own = result.clone() if any(_turns_outputs(pairs.get(layer)) for _, _, pairs, _ in uses) else result
        for start, stop, pairs, strength in uses:
            if (pair := pairs.get(layer)) is not None:
                part, into = here.part(x, start, stop), here.part(result, start, stop)
                _add(layer, pair, pair.scale * strength, part, into)
                if isinstance(pair, MappedPair):
                    _add_mapped(layer, pair, strength, part, here.part(own, start, stop), into)
        return result

    return _hooked((layer for _, _, pairs, _ in uses for layer in pairs), add, by_keyword)


@contextmanager
def _hooked(layers: Iterable[nn.Module], hook: Hook, by_keyword: bool = False) -> Iterator[None]:
    """Call one hook behind the forward of each layer, some of which may come twice, within the block.

    It comes before all others: those of ranks make more of an output than the layer's own.
    It is put into their tables itself. A LoRA has hundreds of layers, each forward puts it on and takes it off, and
    torch's handles of that many hooks cost milliseconds, most of them of Python's search for circles among them.
    """
    layers = list(layers)
    tables = [forward_hooks_of(layer) for layer in layers]
    marks = [keyword_hooks_of(layer) for layer in layers] if by_keyword else []
    try:
        for mark in marks:
            mark[hook] = True
        for table in tables:
            table[hook] = hook
            table.move_to_end(hook, last=False)
        yield
    finally:
        for mark in marks:
            mark.pop(hook, None)
        for table in tables:
            table.pop(hook, None)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MergedLayers:
    """One adapter at one strength, merged: `forwards` of the layers over private weights, for `replaced_forwards`.

    `beside` are the pairs that are not merged, of layers in float8 say, or with a map of features: they go on the side
    path.
    """

    strength: float
    forwards: Mapping[nn.Module, Callable[[torch.Tensor], torch.Tensor]]
    beside: FittedPairs


def merge_pairs(pairs: FittedPairs, strength: float) -> MergedLayers:
    """Merge an adapter into copies of the layers that it changes. Reads their weights, so any thread may."""
    forwards: dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]] = {}
    beside = FittedPairs()
    with torch.no_grad():
        for layer, pair in pairs.items():
            if is_batch_invariant(layer) and not isinstance(pair, MappedPair):
                forwards[layer] = _merged_forward(layer, pair, pair.scale * strength)
            else:
                beside[layer] = pair
    return MergedLayers(strength, forwards, beside)


def _merged_forward(layer: Any, pair: LoraPair, factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward of the layer with the weight W + factor * up down, rounded once to the dtype of W."""
    own: torch.Tensor = layer.weight
    delta = pair.up.float().flatten(1) @ pair.down.float().flatten(1)  # a convolution's `up` is 1 x 1
    wide = torch.add(own.float(), delta.view(own.shape), alpha=factor)
    if pair.magnitude is not None:
        scales = row_scales(layer, pair, factor)
        wide *= scales.view(1, -1, *[1] * (own.ndim - 2)) if pair.by_input else scales.view(-1, *[1] * (own.ndim - 1))
    weight, added = wide.to(own.dtype), None if pair.bias is None else pair.bias.to(own.dtype) * factor

    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = layer.bias if added is None else added if layer.bias is None else layer.bias + added
        if isinstance(layer, nn.Conv2d):
            return conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation)  # type: ignore[arg-type]
        return linear(x, weight, bias)

    return forward


@dataclass(frozen=True, slots=True, eq=False)
class RowAdapter:
    """An adapter of some rows of a batch: pairs by module path, strength, and the numbers of the rows (N,).

    Its products have a multiple of `row_multiple` rows, where those of few rows round by their number.
    """

    pairs: Pairs
    strength: float
    rows: torch.Tensor
    row_multiple: int


class AdaptedRows:
    """Adds adapters to the rows (T, in) of what the linear layers of a module compute, each to its own.

    They have passed `check_targets`. A row's result does not depend on the others. A module that gives those below it
    only some rows of the batch, in an order of its own, says in `routed_rows` which.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers: dict[str, nn.Module] = {}  # as they were asked for: each step asks for all of an adapter's
        self._above: dict[nn.Module, tuple[str, Any]] = {}  # of these the path, and what routes rows to them

    def adding(self, uses: Sequence[RowAdapter]) -> AbstractContextManager[None]:
        """Add within the block. HAZARD: as `applied_adapters`."""

        def add(layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            path, router = self._above[layer]
            routed = None if router is None else router.routed_rows
            output = _writable(layer, output)
            own_rows = output.flatten(0, -2)  # the batch of a layer of transformers has two axes
            for use in uses:
                if (pair := use.pairs.get(path)) is not None:
                    _add_to_rows(layer, pair, use, routed, args[0].flatten(0, -2), own_rows)
            return own_rows.view(output.shape)

        return _hooked((self._layer(path) for use in uses for path in use.pairs), add)

    def _layer(self, path: str) -> nn.Module:
        if (found := self._layers.get(path)) is None:
            found = self._layers[path] = self._module.get_submodule(path)
            self._above[found] = path, _router_above(self._module, path)
        return found


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
    return FittedPairs({targets[path]: pair.to(like.device, like.dtype) for path, pair in pairs.items()})


def _check_fit(path: str, target: nn.Module, pair: LoraPair) -> None:
    found: tuple[Any, ...]
    if is_norm(target) and not pair.down.shape[1]:
        _check_norm(path, target, pair)
        return
    if isinstance(target, CONVOLUTIONS) and target.groups == 1:
        ones = (1,) * len(target.kernel_size)
        wanted, found = 2 + len(ones), (target.in_channels, *target.kernel_size, target.out_channels, *ones)
    elif hasattr(target, "in_features") and hasattr(target, "out_features"):
        wanted, found = 2, (target.in_features, target.out_features)
    else:
        raise EngineError(f"adapter target {path!r} is a {_class_name(target)}, expected a linear or convolution layer")
    given = (*pair.down.shape[1:], pair.up.shape[0], *pair.up.shape[2:])
    if pair.down.ndim != wanted or given != found:
        raise EngineError(
            f"adapter target {path!r}: matrices of (in, out) sizes {given} do not fit a {_class_name(target)} of "
            f"{found}"
        )


def _class_name(layer: nn.Module) -> str:
    """Return the name of a layer's class in its library: those put in its place begin with an underscore."""
    return next(class_.__name__ for class_ in type(layer).__mro__ if not class_.__name__.startswith("_"))


def is_norm(layer: nn.Module) -> bool:
    """Return whether it is a norm with a weight, whose output is that weight's, element by element."""
    is_known = isinstance(layer, nn.LayerNorm | nn.GroupNorm) or type(layer).__name__.endswith("RMSNorm")
    return is_known and isinstance(getattr(layer, "weight", None), torch.Tensor)


def _check_norm(path: str, norm: Any, pair: LoraPair) -> None:
    size = norm.weight.numel()
    if pair.up.shape != (size, 1) or (pair.bias is not None and getattr(norm, "bias", None) is None):
        what = "no bias" if len(pair.up) == size else f"{size} elements"
        raise EngineError(
            f"adapter target {path!r}: {len(pair.up)} elements do not fit a {_class_name(norm)} of {what}"
        )


def _norm_delta(norm: Any, x: torch.Tensor, pair: LoraPair, factor: float) -> torch.Tensor:
    """Return the change of a norm's output by changed weight and bias; it is linear in both."""
    weight = pair.up[:, 0].float() * factor
    bias = None if pair.bias is None else pair.bias.float() * factor
    if isinstance(norm, nn.GroupNorm):
        return F.group_norm(x.float(), norm.num_groups, weight, bias, norm.eps)
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x.float(), norm.normalized_shape, weight.view(norm.normalized_shape), bias, norm.eps)
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))  # as diffusers and transformers call it
    found = F.rms_norm(x.float(), (len(weight),), weight, torch.finfo(x.dtype).eps if eps is None else eps)
    return found if bias is None else found + bias


def _add(layer: nn.Module, pair: LoraPair, factor: float, x: torch.Tensor, result: torch.Tensor) -> None:
    """Add to what a layer made of x, in place, what a pair's matrices add."""
    if not pair.rank:
        return
    if not pair.down.shape[1]:
        result += _norm_delta(layer, x, pair, factor).to(result.dtype)
        return
    if pair.magnitude is None and not isinstance(layer, CONVOLUTIONS) and x.dtype == result.dtype:
        down, up = pair.down.to(x.dtype), pair.up.to(x.dtype)
        if not add_pair(result, x, down, up, factor):
            add_product(result, linear(x, down), up, factor)
        if pair.bias is not None:
            result += pair.bias.to(x.dtype) * factor
        return
    if pair.magnitude is None:
        result += _delta(layer, x, pair, factor)
        return
    scales = row_scales(layer, pair, factor)
    if pair.by_input:
        result += _product_without_bias(layer, scaled_inputs(layer, x, scales - 1))
        result += _delta(layer, scaled_inputs(layer, x, scales), pair, factor)
    else:
        add_dora(layer, result, _delta(layer, x, pair, factor), scales)


def _turns_outputs(pair: LoraPair | None) -> bool:
    return isinstance(pair, MappedPair) and pair.features is not None and not pair.features.of_inputs


def _add_mapped(
    layer: Any, pair: MappedPair, strength: float, x: torch.Tensor, own: torch.Tensor, result: torch.Tensor
) -> None:
    """Add to what a layer made of x, in place, what a map of features adds; `own` is what the layer itself made."""
    assert pair.features is not None
    is_convolution = isinstance(layer, CONVOLUTIONS)
    axis = 1 if is_convolution else -1
    if pair.features.of_inputs:
        mapped = pair.features.delta(x.movedim(axis, -1), strength * pair.scale).movedim(-1, axis)
        result += _product_without_bias(layer, mapped)
        return
    if layer.bias is not None:
        own = own - layer.bias.to(own.dtype).view(-1, *[1] * len(layer.kernel_size) if is_convolution else ())
    result += pair.features.delta(own.movedim(axis, -1), strength * pair.scale).movedim(-1, axis).to(result.dtype)


def _writable(layer: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Return a layer's output in memory that nothing else reads.

    The layer's own forward returns fresh memory. HAZARD: a replacement of it may return the same memory again
    in the next forward, or one row's memory for many rows.
    """
    return output.clone() if "forward" in vars(layer) else output


def _delta(layer: nn.Module, x: torch.Tensor, pair: LoraPair, factor: float) -> torch.Tensor:
    """Return up(down(x)), scaled between the two, where it has the fewest elements, with the pair's bias."""
    down, up = pair.down.to(x.dtype), pair.up.to(x.dtype)  # a layer may compute in another type than it is stored in
    bias = None if pair.bias is None else pair.bias.to(x.dtype) * factor
    if isinstance(layer, nn.Conv2d):
        padding = layer.padding
        assert not isinstance(padding, str)  # diffusers gives numbers
        return conv2d(conv2d(x, down, None, layer.stride, padding, layer.dilation) * factor, up, bias)
    if isinstance(layer, nn.Conv1d | nn.Conv3d):
        convolve: Any = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv3d
        inner = convolve(x, down, None, layer.stride, layer.padding, layer.dilation) * factor
        found: torch.Tensor = convolve(inner, up, bias)
        return found
    return linear(linear(x, down) * factor, up, bias)


def _router_above(module: nn.Module, path: str) -> Any:
    """Return the module on the way to `path` that has `routed_rows`, or None."""
    parts = path.split(".")
    above = (module.get_submodule(".".join(parts[:size])) for size in range(1, len(parts)))
    return next((one for one in above if hasattr(one, "routed_rows")), None)


def _add_to_rows(
    layer: nn.Module,
    pair: LoraPair,
    use: RowAdapter,
    routed: torch.Tensor | None,
    x_TC: torch.Tensor,
    own_TN: torch.Tensor,
) -> None:
    """Add to what a layer made of x, in place, what a pair adds to the rows of `use`; `routed` are those of x."""
    rows = use.rows if routed is None else torch.isin(routed, use.rows).nonzero()[:, 0]
    x = x_TC[rows]
    padded = F.pad(x, (0, 0, 0, -len(x) % use.row_multiple))
    delta = linear(linear(padded, pair.down), pair.up)[: len(x)] * (pair.scale * use.strength)
    if pair.magnitude is None:
        own_TN.index_add_(0, rows, delta)
        return
    own = own_TN[rows]  # a copy
    add_dora(layer, own, delta, row_scales(layer, pair, pair.scale * use.strength))
    own_TN[rows] = own


def _product_without_bias(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the product of x and the layer's own weights, whatever replaces its forward now."""
    if not is_batch_invariant(layer):
        output: torch.Tensor = type(layer).forward(layer, x)
        ones = (1,) * len(layer.kernel_size) if isinstance(layer, CONVOLUTIONS) else ()
        return output if layer.bias is None else output - layer.bias.view(-1, *ones)
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)  # diffusers gives numbers
        return conv2d(x, layer.weight, None, layer.stride, layer.padding, layer.dilation)
    return linear(x, layer.weight)
