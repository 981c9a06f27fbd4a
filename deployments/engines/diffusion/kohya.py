"""LoRA files of kohya's trainer (`lora_unet_…`, `lora_te_…`, `.alpha`): renamed as the stock loaders do it.

Which module a name means depends on the model, so it is found out beside the model and not in the store. The
renaming is that of diffusers 0.42, `loaders/lora_conversion_utils.py`, behind `lora_state_dict` of the pipelines.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import loaders
from diffusers.utils.state_dict_utils import (
    PEFT_STATE_DICT_MAPPINGS,
    StateDictType,
    convert_state_dict,
    convert_unet_state_dict_to_peft,
)

from deployments.engines.diffusion.families.base import Family
from deployments.engines.protocol import EngineError
from weights.adapters import LoraAdapter, parse_adapter
from weights.errors import AdapterError

_TEXT_TO_PEFT = {
    **PEFT_STATE_DICT_MAPPINGS[StateDictType.DIFFUSERS_OLD],
    **PEFT_STATE_DICT_MAPPINGS[StateDictType.DIFFUSERS],
}


def rename_kohya(adapter: LoraAdapter, family: Family, *, of_text: bool, denoiser_config: Any = None) -> LoraAdapter:
    """Return what the adapter changes in text encoders, or else in the denoiser, with modules named as diffusers does.

    A UNet's names depend on `denoiser_config`. The adapter's tensors are not written. Raises EngineError naming the
    file, for one of another family or kind.
    """
    if family.lora_loader is None:
        raise EngineError(f"{adapter.path}: {family.class_name} takes LoRAs in the layout of diffusers, not of kohya")
    loader: Any = getattr(loaders, family.lora_loader)
    options = {"unet_config": denoiser_config} if family.denoiser_name == "unet" else {"return_alphas": True}
    others = "lora_unet_" if of_text else "lora_te"
    # HAZARD: stock scales the matrices of Flux's text encoder in place.
    own = {
        name: tensor.clone() if of_text else tensor
        for name, tensor in adapter.kohya.items()
        if not name.startswith(others)
    }
    if not own:
        return LoraAdapter(adapter.path, {})
    try:
        state, alphas = loader.lora_state_dict(own, **options)[:2]
        names = {_peft_name(name): name for name in state}
    except Exception as error:  # the converters know the layouts of their models, and fail in their own ways
        raise EngineError(f"{adapter.path}: is no LoRA of kohya's for a {family.class_name}: {error}") from error
    alpha_of = {_module_of(name.removesuffix(".alpha")): alpha for name, alpha in (alphas or {}).items()}
    tensors = {new: state[old] for new, old in names.items()}
    for new, old in names.items():
        module, is_down, _ = new.rpartition(".lora_A.weight")
        if is_down and (alpha := alpha_of.get(_module_of(old))) is not None:
            tensors[f"{module}.alpha"] = torch.as_tensor(alpha)
    try:
        return parse_adapter(adapter.path, tensors, {})
    except AdapterError as error:
        raise EngineError(str(error)) from None


def _peft_name(name: str) -> str:
    if name.startswith("text_encoder"):
        (renamed,) = convert_state_dict({name: None}, _TEXT_TO_PEFT)
    else:
        (renamed,) = convert_unet_state_dict_to_peft({name: None})
    return str(renamed)


def _module_of(name: str) -> str:
    """Return what the names of a module's matrices and of its alpha have in common."""
    for suffix in (".down.weight", ".up.weight", ".lora"):
        name = name.removesuffix(suffix)
    return name
