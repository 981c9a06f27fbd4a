"""LoRAs fitted to one component of a pipeline: their modules named as it names them, in its dtype and place.

Files of kohya's trainer (`lora_unet_…`, `lora_te_…`, `.alpha`), of ComfyUI, of XLabs, and of diffusers before PEFT are
renamed as the stock loaders do it. Which module a name means depends on the model, so it is found out beside the model
and not in the store. The renaming is that of diffusers 0.42, `loaders/lora_conversion_utils.py`, behind
`lora_state_dict` of the pipelines.

At their registration LoRAs are fitted to a pipeline's modules without weights, and without values of their own. Which
module a name of kohya's, ComfyUI's or XLabs' layout means is known to the converters of diffusers alone, so the LoRA
goes through them as a request's does: with its layers' sizes, and matrices of rank 1 that are all ones.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from deployments.engines.build import build_blank
from deployments.engines.diffusion.families.base import Family
from deployments.engines.library_seam import peft_name
from deployments.engines.nn.lora import FittedPairs, MergedLayers, Pairs, fit_pairs, merge_pairs
from deployments.engines.nn.streamed_blocks import is_streamed
from deployments.engines.protocol import AdapterUse, DiffusionRequest, EngineError
from weights.adapters import LoraAdapter, parse_adapter, parse_named
from weights.errors import AdapterError
from weights.formats.checkpoint import Checkpoint
from weights.formats.lora import is_kohya
from weights.formats.pipeline_parts import AdapterBase
from weights.formats.tensors import SourceTensor
from weights.torch_dtypes import TORCH_DTYPES

_DORA_SCALE: Final = ".dora_scale"
_MAX_REASON_CHARS: Final = 300
logger = logging.getLogger(__name__)


class FittedLoras:
    """The pairs that LoRAs add to one component: the denoiser of a family, or one of its `lora_encoders`."""

    def __init__(self, family: Family, component: str, module: nn.Module) -> None:
        self._family = family
        self._component = component
        self._module = module
        self._pairs: weakref.WeakKeyDictionary[LoraAdapter, FittedPairs] = weakref.WeakKeyDictionary()
        self._merged: weakref.WeakKeyDictionary[LoraAdapter, MergedLayers] = weakref.WeakKeyDictionary()
        self._merging = threading.Lock()

    def forms_of(
        self, request: DiffusionRequest, known: Mapping[str, object]
    ) -> tuple[tuple[tuple[FittedPairs, float], ...], MergedLayers | None]:
        """Return the pairs of a request's LoRAs with their strengths, and the one that it merges; both fill a state.

        Any thread may call it, so that a merged one is ready when the request starts. Raises EngineError for what is
        not among `known` or does not fit.
        """
        loras = _check_adapters(request.adapters, known)
        # In one order, so that requests with the same set share a forward.
        uses = sorted(request.adapters, key=lambda use: use.name)
        if not request.merges_adapter:
            return tuple((self.pairs_of(loras[use.name]), use.scale) for use in uses), None
        if len(uses) != 1:
            raise EngineError(f"one adapter alone can be merged, and {len(uses)} are asked for")
        merged = self._merge(loras[uses[0].name], uses[0].scale)
        return ((merged.beside, merged.strength),) if merged.beside else (), merged

    def pairs_of(self, adapter: LoraAdapter) -> FittedPairs:
        """Return the adapter's pairs with the layers that they change, none if it leaves this component alone.

        The same object for the same adapter. Raises EngineError when it does not fit, or changes a component that none
        of the family may change.
        """
        pairs = self._pairs.get(adapter)
        if pairs is None:
            pairs = self._fit(adapter)
            self._pairs[adapter] = pairs
        return pairs

    def _merge(self, adapter: LoraAdapter, strength: float) -> MergedLayers:
        """Return the adapter merged into private copies of the layers that it changes. They go with the adapter.

        The same object for the same adapter and strength, of which the last one is kept.
        """
        found = self._merged.get(adapter)
        if found is None or found.strength != strength:
            with self._merging:  # whoever finds its own ready does not wait for another's
                found = self._merged.get(adapter)
                if found is None or found.strength != strength:
                    pairs = self.pairs_of(adapter)
                    is_readable = not is_streamed(self._module)  # blocks that come and go have no weights now
                    found = merge_pairs(pairs, strength) if is_readable else MergedLayers(strength, {}, pairs)
                    self._merged[adapter] = found
        return found

    def _fit(self, adapter: LoraAdapter) -> FittedPairs:
        family, of_text = self._family, self._component != self._family.denoiser_name
        is_converted = bool(adapter.raw)
        if is_converted:
            config = None if of_text else self._module.config
            adapter = _convert(adapter, family, of_text=of_text, denoiser_config=config)
        adaptable = (family.denoiser_name, *family.lora_encoders)
        if foreign := sorted(set(adapter.components) - set(adaptable)):
            raise EngineError(
                f"{adapter.path}: changes {', '.join(foreign)}; "
                f"of a {family.class_name}, {', '.join(adaptable)} can be adapted"
            )
        pairs = self._named(adapter.components.get(self._component, {}))
        if is_converted:
            pairs = _without_absent(adapter.path, pairs, self._module)
        try:
            return fit_pairs(self._module, pairs)
        except EngineError as error:
            raise EngineError(f"{adapter.path}: {error}") from None

    def _named(self, pairs: Pairs) -> Pairs:
        """Return the pairs by the paths of the module: transformers 5 has no `text_model` in a CLIPTextModel."""
        if self._component == self._family.denoiser_name or hasattr(self._module, "text_model"):
            return pairs
        return {path.removeprefix("text_model."): pair for path, pair in pairs.items()}


def _check_adapters(uses: Sequence[AdapterUse], known: Mapping[str, object]) -> dict[str, LoraAdapter]:
    """Return the LoRAs among `known` by name.

    Raises EngineError for a use of one that is not there, twice of one, or of a strength that is no number.
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


def _without_absent(path: Path, pairs: Pairs, module: nn.Module) -> Pairs:
    """Leave out pairs for modules that are not there, as stock does for a file with some more; all, if none is."""
    known = {name for name, _ in module.named_modules()}
    there = {name: pair for name, pair in pairs.items() if name in known}
    absent = [name for name in pairs if name not in known]
    if not there or not absent:
        return pairs
    logger.warning(
        f"{path}: {len(absent)} of {len(pairs)} modules are not in a {type(module).__name__} and have no effect "
        f"({absent[0]!r} first)"
    )
    return there


def _convert(adapter: LoraAdapter, family: Family, *, of_text: bool, denoiser_config: Any = None) -> LoraAdapter:
    """Return what the adapter changes in text encoders, or else in the denoiser, with modules named as diffusers does.

    A UNet's names depend on `denoiser_config`. The adapter's tensors are not written. Raises EngineError naming the
    file, for one of another family or kind.
    """
    if family.lora_loader is None and any(map(is_kohya, adapter.raw)):
        raise EngineError(f"{adapter.path}: {family.class_name} takes LoRAs in the layout of diffusers, not of kohya")
    others = "lora_unet_" if of_text else "lora_te"
    # HAZARD: stock scales the matrices of Flux's text encoder in place.
    own = {
        name: tensor if name.startswith("lora_unet_") else tensor.clone()
        for name, tensor in adapter.raw.items()
        if not name.startswith(others)
    }
    if not own:
        return LoraAdapter(adapter.path, {})
    try:
        tensors = _named_by_stock(own, family, denoiser_config)
        tensors |= _magnitudes(own, family, denoiser_config)
    except EngineError as error:
        raise EngineError(f"{adapter.path}: {error}") from None
    except Exception as error:  # the converters know the layouts of their models, and fail in their own ways
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON_CHARS]}"  # it may list all names
        raise EngineError(f"{adapter.path}: is no LoRA for a {family.class_name} that can be read: {why}") from error
    try:
        return parse_named(adapter.path, tensors, {})
    except AdapterError as error:
        raise EngineError(str(error)) from None


def _named_by_stock(own: Mapping[str, torch.Tensor], family: Family, denoiser_config: Any) -> dict[str, torch.Tensor]:
    """Return tensors by the names that diffusers saves them with, as the family's loader renames them."""
    state, alphas = dict(own), {}
    if family.lora_loader is not None:
        from diffusers import loaders  # which nobody else needs, and which take their time

        loader: Any = getattr(loaders, family.lora_loader)
        options = {"unet_config": denoiser_config} if family.denoiser_name == "unet" else {"return_alphas": True}
        found = loader.lora_state_dict(state, **options)
        state, alphas = (
            found[:2] if isinstance(found, tuple) else (found, {})
        )  # those of newer models are multiplied in
    names = {peft_name(name): name for name in state if "lora" in name}  # stock looks at no others
    alpha_of = {_module_of(name.removesuffix(".alpha")): alpha for name, alpha in (alphas or {}).items()}
    tensors = {new: state[old] for new, old in names.items()}
    for new, old in names.items():
        module, is_down, _ = new.rpartition(".lora_A.weight")
        if is_down and (alpha := alpha_of.get(_module_of(old))) is not None:
            tensors[f"{module}.alpha"] = torch.as_tensor(alpha)
    return tensors


def _magnitudes(own: Mapping[str, torch.Tensor], family: Family, denoiser_config: Any) -> dict[str, torch.Tensor]:
    """Return the magnitudes of a kohya DoRA, which stock drops, by the names that diffusers saves them with.

    Each takes the place of its module's matrix in a LoRA of rank 1, so that the loader renames, and divides, it alike.
    Raises EngineError for what no layer can have.
    """
    found: dict[str, torch.Tensor] = {}
    by_axis: dict[bool, dict[str, torch.Tensor]] = {False: {}, True: {}}
    for name, scale in own.items():
        module, is_scale, _ = name.rpartition(_DORA_SCALE)
        if not is_scale:
            continue
        down, up = own[f"{module}.lora_down.weight"][:1], own[f"{module}.lora_up.weight"][:, :1]
        by_input = scale.shape[0] == 1 != len(up)
        if scale.numel() != (down.shape[1] if by_input else len(up)) or not scale.is_floating_point():
            raise EngineError(f"{name} has the shape {tuple(scale.shape)}, which no layer of its LoRA has")
        if by_input and family.denoiser_name != "unet":  # stock divides its layers by outputs, and norms of inputs not
            raise EngineError(f"{name} is by input, which is not supported for a {family.class_name}")
        part = by_axis[by_input]
        row = scale.reshape(1, -1, *[1] * (down.ndim - 2)).expand(1, -1, *down.shape[2:])
        part[f"{module}.lora_down.weight"] = row if by_input else down
        part[f"{module}.lora_up.weight"] = up if by_input else scale.reshape(up.shape)
        part[f"{module}.alpha"] = torch.tensor(1.0)
    for by_input, part in by_axis.items():
        half = "lora_A.weight" if by_input else "lora_B.weight"
        for name, tensor in (_named_by_stock(part, family, denoiser_config) if part else {}).items():
            if name.endswith(half):
                row = tensor[:1].flatten(2)[..., 0] if by_input and tensor.ndim > 2 else tensor
                found[name.removesuffix(half) + "lora_magnitude_vector"] = row if by_input else tensor.flatten()
    return found


def _module_of(name: str) -> str:
    """Return what the names of a module's matrices and of its alpha have in common."""
    for suffix in (".down.weight", ".up.weight", ".lora"):
        name = name.removesuffix(suffix)
    return name


_DOWN: Final = ("down.weight", "lora_A.weight", "lora_A.default.weight")
_UP: Final = ("up.weight", "lora_B.weight", "lora_B.default.weight")


def check_lora(adapter: Checkpoint, base: AdapterBase, family: Family) -> None:
    """Raise AdapterError for what its first request would be refused for: a layer that is absent or of another size."""
    (component,) = adapter.components
    _check_ranks(adapter, component.tensors)
    lora = parse_adapter(adapter.path, _blank_tensors(component.tensors), component.metadata)
    try:
        for name in (family.denoiser_name, *family.lora_encoders):
            if name in base.components:
                _fit(lora, family, name, base)
    except EngineError as error:
        raise AdapterError(f"{error}; expected a LoRA for {base.model!r}, a {base.class_name}") from None


def _fit(lora: LoraAdapter, family: Family, name: str, base: AdapterBase) -> None:
    part = base.components[name]
    FittedLoras(family, name, build_blank(part.library, part.class_name, base.folder / name)).pairs_of(lora)


def _check_ranks(adapter: Checkpoint, tensors: Mapping[str, SourceTensor]) -> None:
    """Raise AdapterError for two matrices of unlike ranks, which go to the converters with one."""
    for name in tensors:
        end = next((end for end in _DOWN if name.endswith(end)), None)
        other = name.removesuffix(end or "") + _UP[_DOWN.index(end)] if end else ""
        down, up = tensors[name].shape, tensors[other].shape if other in tensors else ()
        if up and (len(down) < 2 or len(up) < 2 or down[0] != up[1]):
            raise AdapterError(
                f"{adapter.path}: tensor {name} has shape {list(down)}, and {other} {list(up)}: they do not go together"
            )


def _blank_tensors(tensors: Mapping[str, SourceTensor]) -> dict[str, torch.Tensor]:
    """Return tensors of these names, ones of no memory: the matrices of rank 1, all else in its shape."""
    found = {}
    for name, tensor in tensors.items():
        blank = torch.ones((), dtype=TORCH_DTYPES[tensor.dtype]).expand(tensor.shape)
        if blank.ndim > 1 and name.endswith(_DOWN):
            blank = blank[:1]
        elif blank.ndim > 1 and name.endswith(_UP):
            blank = blank[:, :1]
        found[name] = blank
    return found
