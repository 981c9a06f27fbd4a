"""Adapters compared with the models that they are registered for, by headers and configs alone.

The rules are those by which the engines refuse a request: a user should meet them when the adapter comes in. Torch is
imported for LoRAs whose modules are named beside the model, by the converters of diffusers, and for ControlNets whose
layers are not all told by their base's.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from deployments.engines.diffusion.adapted_parts import AdaptedParts, is_divided, stock_parts
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.families.base import Family
from deployments.engines.libraries.config_files import read_config
from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.known import PROMPTED, takes_image_prompts
from weights.formats.checkpoint import check_lora_base, check_same_layers
from weights.formats.control_layers import is_as_made
from weights.formats.ip_adapter import check_ip_base
from weights.formats.learned_words import WORDS_CLASS
from weights.formats.lora import PEFT_CLASS, changes_text_encoders, is_convertible
from weights.formats.pipeline_parts import float_dtype, pipeline_variant
from weights.formats.source import AdapterBase, Checkpoint
from weights.operations.externalize import stored_dtypes
from weights.records.errors import AdapterError

_PIXELS_PER_LATENT = 8  # of a VAE whose config does not say


def check_base(adapter: Checkpoint, base: AdapterBase, dtype: str = "auto") -> None:
    """Check that an adapter that is stored with that `dtype` fits a model. No weights are read.

    Raises AdapterError: what came, what the base has.
    """
    try:
        match adapter.kind:
            case "adapter":
                _check_lora(adapter, base)
            case "controlnet":
                _check_controlnet(adapter, base, dtype)
            case "ip_adapter":
                _check_ip_adapter(adapter, base)
    except EngineError as error:
        raise AdapterError(str(error)) from None


def _check_lora(adapter: Checkpoint, base: AdapterBase) -> None:
    family, tensors = FAMILIES.get(base.class_name or ""), adapter.components[0].tensors
    if family is None and base.kind == "diffusion" and adapter.class_name != PEFT_CLASS:
        _check_lora_of_stock(adapter, base)
        return
    check_lora_base(adapter, base)
    if family is None or adapter.class_name in (PEFT_CLASS, WORDS_CLASS):
        return
    if is_convertible(tensors) or changes_text_encoders(tensors):
        _check_layers(adapter, base, family)


def _check_lora_of_stock(adapter: Checkpoint, base: AdapterBase) -> None:
    """Check a LoRA for a pipeline that diffusers runs, whose layers may have the names of the model's own code."""
    class_name, tensors = base.class_name or "", adapter.components[0].tensors
    parts = stock_parts(class_name, base.components, is_divided=is_divided(tensors))
    if adapter.class_name == WORDS_CLASS and "text_encoder" in base.components:
        loading = importlib.import_module("deployments.engines.stock.loading")
        if importlib.import_module("deployments.engines.stock.learned_words").takes_words(
            loading.pipeline_class(class_name)
        ):
            check_lora_base(adapter, base)
            return
    what = "a textual inversion" if adapter.class_name == WORDS_CLASS else "a LoRA"
    if not parts or adapter.class_name == WORDS_CLASS:
        raise AdapterError(f"{adapter.path}: {what}, and none are served with {base.model!r}, a {class_name}")
    for one in parts:
        _check_layers(adapter, base, one)


def _check_layers(adapter: Checkpoint, base: AdapterBase, parts: AdaptedParts) -> None:
    # By name: the registry goes without torch until such a file comes.
    importlib.import_module("deployments.engines.diffusion.fitted_loras").check_lora(adapter, base, parts)


def _check_controlnet(adapter: Checkpoint, base: AdapterBase, dtype: str) -> None:
    family = FAMILIES.get(base.class_name or "")
    if family is None or base.kind != "diffusion":
        what = base.class_name if base.kind == "diffusion" else base.kind
        raise AdapterError(f"{adapter.path}: a ControlNet, which {base.model!r}, {what}, cannot follow")
    reason = family.control_misfit(
        adapter.class_name or "",
        adapter.config,
        _config_of(base, family.denoiser_name),
        int(pipeline_variant(base.folder).get("pixels_per_latent", _PIXELS_PER_LATENT)),
        base.model,
    )
    if reason:
        raise AdapterError(f"{adapter.path}: a ControlNet that {reason}")
    check_same_layers(adapter, _denoiser(base, family), base)
    (net,) = adapter.components
    if not _is_as_made(adapter, base, family):
        # By name: the registry goes without torch until such a checkpoint comes.
        importlib.import_module("deployments.engines.building.build").check_module(
            net.library, adapter.class_name, adapter.config, _shapes_of(net), adapter.path
        )
    own = float_dtype(net, stored_dtypes(adapter, dtype)[net.name])
    if own != base.dtype and own and base.dtype:
        raise AdapterError(
            f"{adapter.path}: a ControlNet in {own}, and {base.model!r} is in {base.dtype}: register it without a "
            "dtype, which gives it that of its models, and once for each dtype that they have"
        )


def _is_as_made(adapter: Checkpoint, base: AdapterBase, family: Family) -> bool:
    """Return whether the base's headers say that a ControlNet has all that its class asks for, and nothing else."""
    denoiser, (net,) = _denoiser(base, family), adapter.components
    config = _config_of(base, family.denoiser_name)
    return denoiser.format == "safetensors" and is_as_made(
        adapter.class_name or "", adapter.config, _shapes_of(net), config, _shapes_of(denoiser)
    )


def _shapes_of(component: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in component.tensors.items()}


def _check_ip_adapter(adapter: Checkpoint, base: AdapterBase) -> None:
    family = FAMILIES.get(base.class_name or "")
    is_stock = base.kind == "diffusion" and family is None and takes_image_prompts(base.class_name or "")
    if not is_stock and (family is None or base.kind != "diffusion" or not family.adapters.takes_image_prompts):
        what = base.class_name or base.kind
        raise AdapterError(f"{adapter.path}: an IP-Adapter, and none are served with {base.model!r}, {what}")
    (component,) = adapter.components
    shapes = {name: tensor.shape for name, tensor in component.tensors.items()}
    check_ip_base(adapter.path / component.files[0], shapes, _denoiser(base, family), base)


def _denoiser(base: AdapterBase, family: Family | None) -> Any:
    name = PROMPTED if family is None else family.denoiser_name
    if name not in base.components:
        raise AdapterError(f"{base.model!r} has no {name}")
    return base.components[name]


def _config_of(base: AdapterBase, component: str) -> dict[str, Any]:
    folder: Path = base.folder / component
    return read_config(folder / "config.json")
