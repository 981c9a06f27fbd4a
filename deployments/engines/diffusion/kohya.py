"""LoRA files of kohya's trainer (`lora_unet_…`, `lora_te_…`, `.alpha`): renamed as the stock loaders do it.

Which module a name means depends on the model, so it is found out beside the denoiser and not in the store. The
renaming is that of diffusers 0.42, `loaders/lora_conversion_utils.py`, behind `lora_state_dict` of the pipelines.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import loaders
from diffusers.utils import convert_unet_state_dict_to_peft

from deployments.engines.diffusion.families.base import Family
from deployments.engines.protocol import EngineError
from weights.adapters import LoraAdapter, parse_adapter
from weights.errors import AdapterError


def rename_kohya(adapter: LoraAdapter, family: Family, denoiser: Any) -> LoraAdapter:
    """Return the adapter with its modules named as the denoiser has them. Its tensors are not written.

    Raises EngineError naming the file, for one of another family or kind.
    """
    if family.lora_loader is None:
        raise EngineError(f"{adapter.path}: {family.class_name} takes LoRAs in the layout of diffusers, not of kohya")
    loader: Any = getattr(loaders, family.lora_loader)
    options: dict[str, Any] = {"return_alphas": True}
    if family.denoiser_name == "unet":
        options = {"unet_config": denoiser.config}
    try:
        state, alphas = loader.lora_state_dict(dict(adapter.kohya), **options)[:2]
        names: dict[str, str] = convert_unet_state_dict_to_peft({name: name for name in state})
    except Exception as error:  # the converters know the layouts of their models, and fail in their own ways
        raise EngineError(f"{adapter.path}: is no LoRA of kohya's for a {family.class_name}: {error}") from error
    if foreign := sorted({name.partition(".")[0] for name in names} - {family.denoiser_name}):
        raise EngineError(f"{adapter.path}: changes {', '.join(foreign)}, only {family.denoiser_name!r} can be adapted")
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


def _module_of(name: str) -> str:
    """Return what the names of a module's matrices and of its alpha have in common."""
    for suffix in (".down.weight", ".up.weight", ".lora"):
        name = name.removesuffix(suffix)
    return name
