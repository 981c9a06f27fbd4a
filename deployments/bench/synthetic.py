"""Weights of real structure and random content: speed and memory do not depend on what the numbers say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# FLUX.1's transformer with wider and few blocks, and with narrow and many: about 3.2 GB in bf16 each, in about 100 and
# about 1,900 tensors. Fields are those of diffusers' FluxTransformer2DModel; FLUX.1 has 19, 38 and 24.
FLUX_SHAPES = {
    "wide": {"num_layers": 1, "num_single_layers": 4, "num_attention_heads": 32},
    "deep": {"num_layers": 24, "num_single_layers": 78, "num_attention_heads": 7},
}


def write_flux_transformer(folder: Path, shape: str, seed: int = 0) -> int:
    """A FluxTransformer2DModel folder in the stock layout with random bf16 weights. Returns its tensors' bytes."""
    config = {"guidance_embeds": True, **FLUX_SHAPES[shape]}
    return write_module(folder, "diffusers", "FluxTransformer2DModel", config, seed)


def write_module(folder: Path, library: str, class_name: str, config: dict[str, Any], seed: int) -> int:
    """A model of diffusers or transformers in its stock layout with random bf16 weights. Returns its tensors' bytes.

    Takes the memory of the one module that it writes.
    """
    cls = getattr(importlib.import_module(library), class_name)
    with torch.device("meta"):
        model = cls(cls.config_class(**config)) if library == "transformers" else cls(**config)
    generator = torch.Generator().manual_seed(seed)
    # Tied tensors are one in a file.
    shapes = {id(tensor): (name, tensor.shape) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    tensors = {name: _random(shape, generator) for name, shape in shapes.values()}
    folder.mkdir(parents=True, exist_ok=True)
    stem = "model" if library == "transformers" else "diffusion_pytorch_model"
    save_file(tensors, folder / f"{stem}.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config_of(model, library, class_name)))
    return sum(tensor.nbytes for tensor in tensors.values())


def _config_of(model: Any, library: str, class_name: str) -> dict[str, Any]:
    if library == "transformers":
        return model.config.to_dict() | {"architectures": [class_name], "dtype": "bfloat16"}
    return {"_class_name": class_name} | {key: value for key, value in model.config.items() if not key.startswith("_")}


def _random(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Random bits of finite numbers: incompressible, and quick to make."""
    bits = torch.randint(-(2**15), 2**15, tuple(shape), dtype=torch.int16, generator=generator)
    return (bits & ~0x4000).view(torch.bfloat16)
