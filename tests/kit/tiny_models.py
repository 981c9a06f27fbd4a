"""Tiny random parts of image models, of stock's classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTokenizer

CLIP_TOKENS = 10


def clip_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer of CLIP whose tokens are bytes."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_TOKENS)


def clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    """Return sizes of a CLIP of width 8, projected to 6."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        projection_dim=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def random_vae(levels: int = 2, **config: Any) -> AutoencoderKL:
    """Return a VAE with enough contrast to see a difference."""
    options = {
        "latents_mean": None,
        "latents_std": None,
        "shift_factor": 0.1,
        "scaling_factor": 0.5,
        "latent_channels": 4,
        **config,
    }
    vae = AutoencoderKL(
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        norm_num_groups=4,
        layers_per_block=1,
        **options,
    )
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(4)
    return vae.eval()


def sdxl_unet(text_width: int = 12, num_time_ids: int = 6) -> UNet2DConditionModel:
    """Return SDXL's UNet in small, for a pooled text of width 6; its refiner has five time ids."""
    return UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=num_time_ids * 4 + 6,
        cross_attention_dim=text_width,
        norm_num_groups=4,
    ).eval()


def save_controlnet(unet: Path, folder: Path) -> Path:
    """Save a ControlNet for a UNet whose residuals matter: stock's begin at zero."""
    torch.manual_seed(0)
    stock = UNet2DConditionModel.from_pretrained(unet, torch_dtype=torch.float32)
    net = ControlNetModel.from_unet(stock, conditioning_embedding_out_channels=(4, 8, 8))
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    net.save_pretrained(folder)
    return folder
