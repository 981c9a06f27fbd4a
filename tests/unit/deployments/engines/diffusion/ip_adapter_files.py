"""Small IP-Adapters with random weights, as h94/IP-Adapter's folders have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, SiglipVisionConfig, SiglipVisionModel

from deployments.engines.diffusion.image_prompts import ImagePrompter, build_image_prompter
from weights.formats.checkpoint import read_checkpoint
from weights.formats.ip_adapter import canonical_name

Kind = Literal["plain", "plus", "full", "flux", "sd3"]
WIDTH, VECTOR, LATENTS = 32, 24, 64  # of the encoder, of what it says of an image, of a resampler


def write_ip_adapter(folder: Path, denoiser: Any, kind: Kind = "plain") -> Path:
    """Write an adapter for a UNet, whose tokens matter: matrices of a size that changes images."""
    folder.mkdir()
    if kind == "sd3":
        siglip = SiglipVisionConfig(
            hidden_size=WIDTH, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, image_size=32,
            patch_size=8,
        )  # fmt: skip
        SiglipVisionModel(siglip).save_pretrained(folder / "image_encoder")
        save_file(_of_stable_diffusion_3(denoiser), folder / "ip-adapter.safetensors")
        return folder
    config = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, image_size=32,
        patch_size=8, projection_dim=VECTOR,
    )  # fmt: skip
    CLIPVisionModelWithProjection(config).save_pretrained(folder / "image_encoder")
    if kind == "flux":
        save_file(_of_flux(denoiser), folder / "ip-adapter.safetensors")
        return folder
    width = denoiser.config.cross_attention_dim
    tensors = {"plain": _projection, "plus": _resampler, "full": _feed_forward}[kind](width)
    attentions = [name for name in denoiser.attn_processors if not name.endswith("attn1.processor")]
    for place, name in enumerate(attentions):
        attention = denoiser.get_submodule(name.removesuffix(".processor"))
        for half in "kv":
            weight = torch.randn(attention.inner_dim, width) * (2 / width**0.5)
            tensors[f"ip_adapter.{2 * place + 1}.to_{half}_ip.weight"] = weight
    save_file(tensors, folder / "ip-adapter.safetensors")
    return folder


def _of_flux(transformer: Any) -> dict[str, torch.Tensor]:
    """In XLabs' names, with a bias for each matrix."""
    width, inner = transformer.config.joint_attention_dim, transformer.inner_dim
    tensors = {name.replace("image_proj.", "ip_adapter_proj_model."): one for name, one in _projection(width).items()}
    for place in range(len(transformer.transformer_blocks)):
        for half in "kv":
            name = f"double_blocks.{place}.processor.ip_adapter_double_stream_{half}_proj"
            tensors[f"{name}.weight"] = torch.randn(inner, width) * (2 / width**0.5)
            tensors[f"{name}.bias"] = torch.randn(inner) * 0.3
    return tensors


def _of_stable_diffusion_3(transformer: Any) -> dict[str, torch.Tensor]:
    """In InstantX's names: a resampler that reads the time, and norms beside each attention's two matrices."""
    width, head = transformer.inner_dim, transformer.config.attention_head_dim
    tensors = _resampler(width)
    for name, rows, columns in (
        ("time_embedding.linear_1", LATENTS, 32), ("time_embedding.linear_2", LATENTS, LATENTS),
        *((f"layers.{layer}.2.1", 4 * LATENTS, LATENTS) for layer in range(4)),
    ):  # fmt: skip
        tensors[f"image_proj.{name}.weight"] = torch.randn(rows, columns) / columns**0.5
        tensors[f"image_proj.{name}.bias"] = torch.randn(rows) * 0.1
    for place in range(len(transformer.attn_processors)):
        prefix = f"ip_adapter.{place}."
        for half in "kv":
            tensors[f"{prefix}to_{half}_ip.weight"] = torch.randn(transformer.inner_dim, width) * (2 / width**0.5)
        tensors[f"{prefix}norm_ip.linear.weight"] = torch.randn(2 * width, LATENTS) / LATENTS**0.5
        tensors[f"{prefix}norm_ip.linear.bias"] = torch.randn(2 * width) * 0.1
        for norm in ("norm_q", "norm_k", "norm_ip_k"):
            tensors[f"{prefix}{norm}.weight"] = 1 + torch.randn(head) * 0.1
    return tensors


def _projection(width: int) -> dict[str, torch.Tensor]:
    return {
        "image_proj.proj.weight": torch.randn(4 * width, VECTOR) * 0.3,
        "image_proj.proj.bias": torch.randn(4 * width) * 0.1,
        **_norm("image_proj.norm", width),
    }


def _feed_forward(width: int) -> dict[str, torch.Tensor]:
    """The projection of `ip-adapter-full-face_sd15`: each of the encoder's tokens becomes one."""
    return {
        "image_proj.proj.0.weight": torch.randn(WIDTH, WIDTH) * 0.3,
        "image_proj.proj.0.bias": torch.randn(WIDTH) * 0.1,
        "image_proj.proj.2.weight": torch.randn(width, WIDTH) * 0.3,
        "image_proj.proj.2.bias": torch.randn(width) * 0.1,
        **_norm("image_proj.proj.3", width),
    }


def _resampler(width: int) -> dict[str, torch.Tensor]:
    tensors = {
        "latents": torch.randn(1, 5, LATENTS),
        "proj_in.weight": torch.randn(LATENTS, WIDTH) * 0.2,
        "proj_in.bias": torch.randn(LATENTS) * 0.1,
        "proj_out.weight": torch.randn(width, LATENTS) * 0.2,
        "proj_out.bias": torch.randn(width) * 0.1,
        **_norm("norm_out", width),
    }
    for layer in range(4):  # as many as diffusers makes
        for name in ("0.norm1", "0.norm2", "1.0"):
            tensors |= _norm(f"layers.{layer}.{name}", LATENTS)
        for name, rows, columns in (
            ("0.to_q", 128, LATENTS), ("0.to_kv", 256, LATENTS), ("0.to_out", LATENTS, 128),
            ("1.1", 4 * LATENTS, LATENTS), ("1.3", LATENTS, 4 * LATENTS),
        ):  # fmt: skip
            tensors[f"layers.{layer}.{name}.weight"] = torch.randn(rows, columns) / columns**0.5
    return {f"image_proj.{name}": tensor for name, tensor in tensors.items()}


def _norm(name: str, width: int) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": 1 + torch.randn(width) * 0.1, f"{name}.bias": torch.randn(width) * 0.1}


def opened(folder: Path) -> ImagePrompter:
    """As a replica has it: by the names that the store has."""
    (component,) = read_checkpoint(folder).components
    tensors = load_file(folder / "ip-adapter.safetensors")
    encoder = load_file(folder / "image_encoder" / "model.safetensors")
    tensors = {canonical_name(name): tensor for name, tensor in tensors.items()}
    tensors |= {f"image_encoder.{name}": tensor for name, tensor in encoder.items()}
    assert tensors.keys() == component.tensors.keys()
    return build_image_prompter(folder / "image_encoder", tensors)
