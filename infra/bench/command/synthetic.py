"""Models of real structure and random content: speed and memory do not depend on what the numbers say.

Pipelines have the component structure of FLUX.1 and SDXL, narrower and less deep.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import zlib
from dataclasses import dataclass
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
FLUX, TUNED, ALIAS, SDXL = "flux", "flux-tuned", "flux-alias", "sdxl"
STOCK = {FLUX: "digits-flux", SDXL: "digits-sdxl"}
HEAD_SIZE = 64  # of every attention but that of Flux, whose heads have 128


def write_flux_transformer(folder: Path, shape: str) -> int:
    """Write a stock FluxTransformer2DModel folder with random bf16 weights; returns tensor bytes."""
    config = {"guidance_embeds": True, **FLUX_SHAPES[shape]}
    return _write_module(folder, "diffusers", "FluxTransformer2DModel", config, seed=0)


def _write_module(folder: Path, library: str, class_name: str, config: dict[str, Any], seed: int) -> int:
    """Write a model of diffusers or transformers with random bf16 weights; returns its tensors' bytes.

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
    """Return random bits of finite numbers: incompressible, and quick to make."""
    bits = torch.randint(-(2**15), 2**15, tuple(shape), dtype=torch.int16, generator=generator)
    return (bits & ~0x4000).view(torch.bfloat16)


@dataclass(frozen=True)
class Scale:
    """Widths and depths; the default makes 2.8 GB in all, 1.0 GB and about 1,000 tensors of it the Flux pipeline."""

    flux_heads: int = 6
    flux_layers: tuple[int, int] = (10, 20)
    t5_width: int = 512
    t5_layers: int = 10
    clip_width: int = 384
    clip_layers: int = 6
    big_clip_width: int = 640
    big_clip_layers: int = 16
    unet_channels: tuple[int, int, int] = (128, 256, 512)
    unet_depths: tuple[int, int, int] = (1, 2, 6)
    vae_channels: tuple[int, ...] = (64, 128, 256, 256)
    vocabulary: tuple[int, int] = (49408, 32128)  # CLIP, T5


def write_pipelines(folder: Path, stock: Path, scale: Scale | None = None, seed: int = 0) -> dict[str, Path]:
    """Write the pipelines; returns folders by name. `stock` holds the small pipelines' folders.

    `flux-tuned` has another transformer than `flux` and all else of it, `flux-alias` is the same; `sdxl` has the VAE
    of `flux`. Takes the memory of the largest component.
    """
    scale = scale or Scale()
    paths = {name: folder / name for name in (FLUX, TUNED, ALIAS, SDXL)}
    for name, small in STOCK.items():
        _copy_without_weights(stock / small, paths[name])
        for component, config in _configs(scale, name).items():
            if name == SDXL and component == "vae":
                shutil.copytree(paths[FLUX] / component, paths[name] / component, copy_function=os.link)
            else:
                _write(paths[name] / component, stock / small, config, _seed(name, component, seed))
    for name in (TUNED, ALIAS):
        shutil.copytree(paths[FLUX], paths[name], copy_function=os.link)
    shutil.rmtree(paths[TUNED] / "transformer")
    transformer = _configs(scale, FLUX)["transformer"]
    _write(paths[TUNED] / "transformer", stock / STOCK[FLUX], transformer, _seed(TUNED, "transformer", seed))
    return paths


def _copy_without_weights(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    shutil.copyfile(source / "model_index.json", target / "model_index.json")
    for part in ("scheduler", "tokenizer", "tokenizer_2"):
        shutil.copytree(source / part, target / part)


def _write(folder: Path, stock: Path, changes: dict[str, Any], seed: int) -> None:
    library, class_name = json.loads((stock / "model_index.json").read_text())[folder.name]
    config = json.loads((stock / folder.name / "config.json").read_text())
    known = {key: value for key, value in config.items() if not key.startswith("_") and key != "architectures"}
    _write_module(folder, library, class_name, known | changes, seed)


def _configs(scale: Scale, name: str) -> dict[str, dict[str, Any]]:
    """Return what differs from the small pipelines' configs, by component."""
    vae = {
        "block_out_channels": scale.vae_channels,
        "down_block_types": ["DownEncoderBlock2D"] * len(scale.vae_channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(scale.vae_channels),
        "layers_per_block": 2,
        "norm_num_groups": 32,
    }
    clip = _clip(scale, scale.clip_width, scale.clip_layers)
    if name == FLUX:
        return {"transformer": _transformer(scale), "text_encoder": clip, "text_encoder_2": _t5(scale), "vae": vae}
    big_clip = _clip(scale, scale.big_clip_width, scale.big_clip_layers)
    return {"unet": _unet(scale), "text_encoder": clip, "text_encoder_2": big_clip, "vae": vae}


def _transformer(scale: Scale) -> dict[str, Any]:
    return {
        "num_layers": scale.flux_layers[0],
        "num_single_layers": scale.flux_layers[1],
        "num_attention_heads": scale.flux_heads,
        "attention_head_dim": 128,
        "axes_dims_rope": (16, 56, 56),
        "joint_attention_dim": scale.t5_width,
        "pooled_projection_dim": scale.clip_width,
        "guidance_embeds": True,
    }


def _t5(scale: Scale) -> dict[str, Any]:
    return {
        "d_model": scale.t5_width,
        "d_kv": HEAD_SIZE,
        "num_heads": scale.t5_width // HEAD_SIZE,
        "d_ff": scale.t5_width * 5 // 2,
        "num_layers": scale.t5_layers,
        "vocab_size": scale.vocabulary[1],
    }


def _clip(scale: Scale, width: int, num_layers: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "projection_dim": width,
        "intermediate_size": width * 4,
        "num_attention_heads": width // HEAD_SIZE,
        "num_hidden_layers": num_layers,
        "vocab_size": scale.vocabulary[0],
        "max_position_embeddings": 77,
    }


def _unet(scale: Scale) -> dict[str, Any]:
    time_width = 256
    return {
        "block_out_channels": scale.unet_channels,
        "attention_head_dim": [max(1, width // HEAD_SIZE) for width in scale.unet_channels],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": scale.unet_depths,
        "layers_per_block": 2,
        "norm_num_groups": 32,
        "cross_attention_dim": scale.clip_width + scale.big_clip_width,
        "addition_time_embed_dim": time_width,
        "projection_class_embeddings_input_dim": scale.big_clip_width + 6 * time_width,
    }


def _seed(name: str, component: str, seed: int) -> int:
    return zlib.crc32(f"{seed} {name} {component}".encode())
