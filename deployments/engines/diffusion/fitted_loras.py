"""LoRAs fitted to one component of a pipeline: under its names of modules, in its dtype and on its device.

Files are in many layouts: `lora_names.py` maps names to a model's layers, `lora_kinds.py` computes what their tensors
add to a layer. Every tensor of a file has an effect, or a refusal or the log names it. The meaning of a name
depends on the model, so it is resolved with the model and not in the store.

At their registration LoRAs are fitted to a pipeline's modules without weights, and without values of their own.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
from torch import nn

from deployments.engines.building.build import build_blank
from deployments.engines.diffusion.adapted_parts import AdaptedParts
from deployments.engines.diffusion.lora_kinds import Parts, Product, product_of
from deployments.engines.diffusion.lora_names import DENOISER, LENGTHS, NamedLayer, component_of, layer_names, part_of
from deployments.engines.nn.feature_maps import FeatureMap, Gains, MappedPair, Turns
from deployments.engines.nn.lora import FittedPairs, MergedLayers, Pairs, check_targets, fit_pairs, is_norm, merge_pairs
from deployments.engines.nn.streamed_blocks import is_streamed
from deployments.engines.records.protocol import AdapterUse, DiffusionRequest, EngineError
from weights.formats.lora import LoraConfig
from weights.formats.source import AdapterBase, Checkpoint
from weights.formats.tensors import SourceTensor
from weights.formats.untrusted import shown
from weights.operations.adapters import LoraAdapter, LoraPair, parse_adapter
from weights.platform.torch_dtypes import TORCH_DTYPES
from weights.records.errors import AdapterError

_MAX_NAMES: Final = 5  # in a message
_Fitted = TypeVar("_Fitted")
logger = logging.getLogger(__name__)


class FittedLoras:
    """The pairs that LoRAs add to one component: the denoiser of a family, or one of its `lora_encoders`."""

    def __init__(self, family: AdaptedParts, component: str, module: nn.Module) -> None:
        self._family = family
        self._component = component
        self._module = module
        self._pairs: weakref.WeakKeyDictionary[LoraAdapter, FittedPairs] = weakref.WeakKeyDictionary()
        self._merged: weakref.WeakKeyDictionary[LoraAdapter, MergedLayers] = weakref.WeakKeyDictionary()
        self._merging = threading.Lock()

    def forms_of(
        self, request: DiffusionRequest, known: Mapping[str, object]
    ) -> tuple[tuple[tuple[FittedPairs, float], ...], MergedLayers | None]:
        """Return the pairs of a request's LoRAs with their strengths, and the merged one, for its state.

        Any thread may call it, so that a merged one is ready when the request starts. Raises EngineError for a LoRA
        that is not `known` or does not fit.
        """
        loras = check_adapters(request.adapters, known)
        # In a fixed order, so that requests with the same set share a forward.
        uses = sorted(request.adapters, key=lambda use: use.name)
        if not request.merges_adapter:
            return tuple((self.pairs_of(loras[use.name]), use.scale) for use in uses), None
        if len(uses) != 1:
            raise EngineError(f"one adapter alone can be merged, and {len(uses)} are asked for")
        merged = self._merge(loras[uses[0].name], uses[0].scale)
        return ((merged.beside, merged.strength),) if merged.beside else (), merged

    def pairs_of(self, adapter: LoraAdapter) -> FittedPairs:
        """Return the adapter's pairs with the layers that they change, none if it has none for this component.

        The same object for the same adapter. Raises EngineError when it does not fit, or changes a component that none
        of the family may change.
        """
        pairs = self._pairs.get(adapter)
        if pairs is None:
            pairs = self._fit(adapter, fit_pairs)
            self._pairs[adapter] = pairs
        return pairs

    def _merge(self, adapter: LoraAdapter, strength: float) -> MergedLayers:
        """Return the adapter merged into private copies of its layers, which are dropped with the adapter.

        The same object for the same adapter and strength, of which the last one is kept.
        """
        found = self._merged.get(adapter)
        if found is None or found.strength != strength:
            with self._merging:  # a request with a ready copy does not wait for another's
                found = self._merged.get(adapter)
                if found is None or found.strength != strength:
                    pairs = self.pairs_of(adapter)
                    is_readable = not is_streamed(self._module)  # blocks that come and go have no weights now
                    found = merge_pairs(pairs, strength) if is_readable else MergedLayers(strength, {}, pairs)
                    self._merged[adapter] = found
        return found

    def check(self, adapter: LoraAdapter) -> None:
        """Raise the errors of `pairs_of`, for tensors without values and a module without weights."""
        self._fit(adapter, check_targets)

    def _fit(self, adapter: LoraAdapter, fit: Callable[[nn.Module, Pairs], _Fitted]) -> _Fitted:
        family = self._family
        if adapter.raw:
            try:
                return fit(self._module, _read_raw(adapter, family, self._component, self._module))
            except EngineError as error:
                raise EngineError(f"{adapter.path}: {error}") from None
        aliases = _aliases(family)
        if foreign := sorted(adapter.components.keys() - aliases.keys()):
            raise EngineError(
                f"{adapter.path}: changes {', '.join(foreign)}; "
                f"of a {family.class_name}, {', '.join(_adaptable(family))} can be adapted"
            )
        named = [pairs for name, pairs in adapter.components.items() if aliases[name] == self._component]
        try:
            return fit(self._module, self._by_paths({path: pair for one in named for path, pair in one.items()}))
        except EngineError as error:
            raise EngineError(f"{adapter.path}: {error}") from None

    def _by_paths(self, pairs: Pairs) -> Pairs:
        """Return the pairs by the paths of the module: transformers 5 has no `text_model` in a CLIPTextModel.

        A file may have diffusers' layout, and the names of the model's own code.
        """
        paths = {path for path, _ in self._module.named_modules() if path}
        if pairs.keys() <= paths:
            return pairs
        found, known = dict[str, LoraPair](), layer_names(type(self._module).__name__, paths)
        for path, pair in pairs.items():
            if path in paths or path not in known:
                found[path] = pair
            else:
                found |= _placed(path, known[path], _product(path, pair), self._module, self._family)
        return found


def check_adapters(uses: Sequence[AdapterUse], known: Mapping[str, object]) -> dict[str, LoraAdapter]:
    """Return the LoRAs among `known` by name.

    Raises EngineError for an unknown LoRA, a repeated one, or a strength that is no number.
    """
    names = [use.name for use in uses]
    loras = {name: adapter for name, adapter in known.items() if isinstance(adapter, LoraAdapter)}
    for use in uses:
        if use.name not in loras:
            raise EngineError(f"unknown adapter {use.name!r} (known: {', '.join(sorted(loras)) or 'none'})")
        if not math.isfinite(use.scale):
            raise EngineError(f"adapter {use.name!r}: scale {use.scale!r}, expected a finite number")
        if names.count(use.name) > 1:
            raise EngineError(f"adapter {use.name!r} is named {names.count(use.name)} times, expected once")
    return loras


def _read_raw(adapter: LoraAdapter, family: AdaptedParts, component: str, module: nn.Module) -> Pairs:
    """Return the pairs that a file in another layout than diffusers' has for a component, by its module's paths.

    Raises EngineError for a tensor of an unknown kind, of a component that cannot be adapted, or that does not go
    with its others; and if none of the names is one of the module's. If some are not, the log names them.
    """
    layers = _layers_of(adapter, family, component)
    known = layer_names(type(module).__name__, [path for path, _ in module.named_modules() if path])
    there = {name: known[name] for name in layers if name in known}
    if layers and not there:
        count = f"({len(layers)} of {len(layers)})"
        raise EngineError(f"adapter targets {_listed(list(layers))} {count} are not in {type(module).__name__}")
    if absent := [name for name in layers if name not in known]:
        _warn(adapter, f"{len(absent)} of {len(layers)} modules are not in a {type(module).__name__}", absent)
    config = adapter.configs.get(component, LoraConfig())
    pairs: dict[str, LoraPair] = {}
    # diffusers' own names first, then other names of its layers: a file may have a layer fused and divided.
    for name in sorted(there, key=lambda name: (there[name].paths != (name,), len(there[name].paths))):
        if twice := [path for path in there[name].paths if path in pairs]:
            _warn(adapter, f"further tensors of {twice[0]} are under another name", [name])
            continue
        product = product_of(name, layers[name], config.alpha_of(name), use_rslora=config.use_rslora)
        pairs |= _placed(name, there[name], product, module, family)
    return pairs


def _layers_of(adapter: LoraAdapter, family: AdaptedParts, component: str) -> dict[str, Parts]:
    """Return the tensors of a component, by the layer's name and by their role in it. Raises EngineError."""
    aliases = _aliases(family)
    layers: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    for name, tensor in adapter.raw.items():
        whole, what = part_of(name, adapter.raw)
        of, layer = component_of(whole)
        if of not in aliases:
            expected = ", ".join(_adaptable(family))
            raise EngineError(f"tensor {name} is of {of}; of a {family.class_name}, {expected} can be adapted")
        if aliases[of] != component:
            continue
        parts = layers.setdefault(layer, {})
        if what in parts:
            raise EngineError(f"tensors {parts[what][0]} and {name} are both the {what} of a layer")
        parts[what] = name, tensor
    return dict(layers)


def _adaptable(family: AdaptedParts) -> list[str]:
    return list(dict.fromkeys((family.denoiser_name, *family.lora_encoders)))


def _aliases(family: AdaptedParts) -> dict[str, str]:
    """Return the component of each name that files use for one."""
    aliases = {alias: name for name, own in family.lora_encoders.items() for alias in (name, *own)}
    return aliases | dict.fromkeys((DENOISER, family.denoiser_name), family.denoiser_name)


def _product(path: str, pair: LoraPair) -> Product:
    """Return a pair as the product of a file's layer."""
    lengths = pair.magnitude if pair.magnitude is None or not pair.by_input else pair.magnitude[None]
    return Product(pair.down, pair.up, pair.scale, lengths, pair.bias, {LENGTHS: path})


def _placed(
    name: str, layer: NamedLayer, product: Product, module: nn.Module, family: AdaptedParts
) -> dict[str, LoraPair]:
    """Return the rows of a file layer's product for each layer of the module that it covers. Raises EngineError."""
    if product.features is not None:
        return _mapped(name, layer, product, product.features, module)
    by_input = product.has_lengths_of_inputs
    if by_input and len(layer.paths) > 1:
        raise EngineError(
            f"{product.names['magnitude']} is by input, which is not supported for a {family.class_name}, whose layer "
            "it is a part of"
        )
    targets = {path: module.get_submodule(path) for path in layer.paths}
    if "difference" in product.names and not product.down.shape[1] and not all(map(is_norm, targets.values())):
        kinds = ", ".join(type(target).__name__ for target in targets.values())
        raise EngineError(f"{product.names['difference']} has one axis, and is of {kinds}")
    counts = {path: _num_outputs(target) for path, target in targets.items()}
    by_row = [product.up, None if by_input else product.lengths, product.bias]
    if layer.swaps_halves:
        by_row = [one if one is None else torch.cat(one.chunk(2)[::-1]) for one in by_row]
    if len(targets) > 1 and sum(counts.values()) != len(product.up):
        raise EngineError(
            f"adapter target {name!r}: matrices of (in, out) sizes {(product.down.shape[1], len(product.up))} do not "
            f"fit {', '.join(layer.paths)} of {sum(counts.values())} outputs together"
        )
    pairs, start = {}, 0
    for path, target in targets.items():
        stop = start + counts[path] if len(targets) > 1 else None
        up, lengths, bias = (one if one is None else one[start:stop] for one in by_row)
        assert up is not None
        lengths = product.lengths if by_input else lengths
        magnitude = None if lengths is None else lengths.flatten().float()
        pairs[path] = _shaped(LoraPair(product.down, up, product.scale, magnitude, by_input, bias), target)
        start = stop or 0
    return pairs


def _mapped(
    name: str, layer: NamedLayer, product: Product, features: FeatureMap, module: nn.Module
) -> dict[str, LoraPair]:
    """Return a file layer's map of features for each layer of the module that it covers, with its rows."""
    targets: dict[str, Any] = {path: module.get_submodule(path) for path in layer.paths}
    first, *_ = product.names.values()
    if layer.swaps_halves or any(_num_outputs(target) == 0 for target in targets.values()):
        raise EngineError(f"{first}: such an adapter of {name!r}, a {type(module).__name__}'s, is not read")
    outputs = [_num_outputs(target) for target in targets.values()]
    pairs: dict[str, LoraPair] = {}
    for (path, target), count, stop in zip(targets.items(), outputs, itertools.accumulate(outputs), strict=True):
        inputs, kernel = _num_inputs(target), tuple(getattr(target, "kernel_size", ()))
        own = _of_layer(features, inputs)
        expected = inputs if own.of_inputs else sum(outputs)
        is_blank = isinstance(own, Gains) and own.weights.is_meta and own.size in (inputs, sum(outputs))
        if own.size != expected and not is_blank:
            raise EngineError(f"{first} is for {own.size} features, and {path} has {expected}")
        if isinstance(own, Turns) and own.of_inputs and math.prod(kernel) > 1:
            raise EngineError(f"{first} turns what a kernel of {kernel} sees, which is not read")
        if len(targets) > 1 and not own.of_inputs and not is_blank:
            try:
                own = own.rows(stop - count, stop)
            except EngineError as error:
                raise EngineError(f"{first}: {error}") from None
        if product.up.numel():
            up = product.up if len(targets) == 1 else product.up[stop - count : stop]
            pair = _shaped(LoraPair(product.down, up, product.scale), target)
        else:
            ones = (1,) * len(kernel)
            down = torch.empty(0, inputs, *kernel, device=product.up.device)
            pair = LoraPair(down, torch.empty(count, 0, *ones, device=product.up.device), product.scale)
        pairs[path] = MappedPair(pair.down, pair.up, pair.scale, features=own)
    return pairs


def _of_layer(features: FeatureMap, inputs: int) -> FeatureMap:
    """Return a map for a layer with so many inputs: one block of turns may serve all of them."""
    if isinstance(features, Turns) and features.of_inputs and features.stages.shape[1] == 1:
        return features.changed(lambda one: one.expand(-1, inputs // one.shape[-1], -1, -1))
    return features


def _num_outputs(layer: nn.Module) -> int:
    return int(getattr(layer, "out_features", 0) or getattr(layer, "out_channels", 0))


def _num_inputs(layer: nn.Module) -> int:
    return int(getattr(layer, "in_features", 0) or getattr(layer, "in_channels", 0))


def _shaped(pair: LoraPair, target: nn.Module) -> LoraPair:
    """Return a pair with the axes of its target: a matrix may be written as a kernel of one place, and the reverse."""
    down, up, scale = pair.down, pair.up, pair.scale
    if not down.shape[1]:  # a bias alone
        down = down.new_zeros(1, _num_inputs(target))
    kernel = tuple(getattr(target, "kernel_size", ()))
    if kernel and down.ndim == 2:
        ones = (1,) * len(kernel)
        places = ones if pair.down.shape[1] else kernel
        down, up = down.view(*down.shape, *ones).expand(-1, -1, *places), up.view(*up.shape, *ones)
    elif not kernel and math.prod(down.shape[2:]) == 1:
        down, up = down.flatten(1), up.flatten(1)
    if pair.bias is not None:  # the bias has no scale
        up, scale = up * scale, 1.0
    return replace(pair, down=down, up=up, scale=scale)


def _warn(adapter: LoraAdapter, what: str, names: Sequence[str]) -> None:
    logger.warning(f"{adapter.path}: {what} and have no effect ({_listed(names)})")


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return ", ".join(map(shown, names[:_MAX_NAMES])) + (f" and {rest} more" if rest > 0 else "")


def check_lora(adapter: Checkpoint, base: AdapterBase, family: AdaptedParts) -> None:
    """Raise AdapterError for a misfit that would refuse its first request: a layer is absent or of another size."""
    (component,) = adapter.components
    lora = parse_adapter(adapter.path, _blank_tensors(component.tensors), component.metadata)
    try:
        for name in _adaptable(family):
            layers = _layers_of(lora, family, name)
            if layers and name not in base.components:
                raise EngineError(f"changes {name}.{min(layers)}, and {base.model!r} has no {name}")
            if layers or (lora.components and name in base.components):
                _fit(lora, family, name, base)
    except EngineError as error:
        said = str(error).removeprefix(f"{adapter.path}: ")
        expected = f"expected a LoRA for {base.model!r}, a {base.class_name}"
        raise AdapterError(f"{adapter.path}: {said}; {expected}") from None


def _fit(lora: LoraAdapter, family: AdaptedParts, name: str, base: AdapterBase) -> None:
    part = base.components[name]
    FittedLoras(family, name, build_blank(part.library, part.class_name, base.folder / name)).check(lora)


def _blank_tensors(tensors: Mapping[str, SourceTensor]) -> dict[str, torch.Tensor]:
    """Return tensors of these names, types and shapes without values; single numbers, which are read, are 1."""
    return {
        name: torch.ones(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        if math.prod(tensor.shape) == 1 and len(tensor.shape) < 2
        else torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")
        for name, tensor in tensors.items()
    }
