"""Tiny random parts of pipelines, of stock's classes: tokenizers, text encoders, denoisers, VAEs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

CLIP_TOKENS = 16
_VAE_BLOCKS = ("DownEncoderBlock2D",), ("UpDecoderBlock2D",)


def byte_tokenizer(class_: Any = transformers.PreTrainedTokenizerFast, **settings: Any) -> Any:
    """One token for each byte."""
    special = ["<pad>", "</s>", "<unk>", "<s>"]
    vocabulary = {token: number for number, token in enumerate([*special, *sorted(ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    options = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
    return class_(tokenizer_object=core, model_max_length=512, **options, **settings)


def clip_tokenizer(length: int = CLIP_TOKENS) -> Any:
    """One token for each byte, at the end of a word another."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length)


def t5_tokenizer() -> Any:
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -4.0)]
    scores += [(chr(code), -8.0) for code in range(33, 127)]
    return transformers.T5Tokenizer(vocab=scores, extra_ids=0, model_max_length=512)


def bert_tokenizer() -> Any:
    letters = [chr(code) for code in range(97, 123)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    return transformers.BertTokenizer(vocab={word: number for number, word in enumerate(words)}, model_max_length=77)


def t5(class_: Any = transformers.T5EncoderModel, width: int = 16) -> Any:
    config = transformers.T5Config if class_ is transformers.T5EncoderModel else transformers.UMT5Config
    return class_(config(vocab_size=512, d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def clip_config(tokenizer: Any, width: int = 16, projection: int = 0, positions: int = 0) -> Any:
    return transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=16,
        projection_dim=projection or width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions or tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def clip(class_: Any = transformers.CLIPTextModel, width: int = 16, positions: int = CLIP_TOKENS) -> Any:
    return class_(clip_config(clip_tokenizer(), width, positions=positions))


def language_model(name: str, **more: Any) -> Any:
    """A decoder without its head, by the prefix of its classes in transformers."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=512, num_key_value_heads=1, head_dim=8, pad_token_id=0, **sizes, **more
    )
    return getattr(transformers, f"{name}Model")(config)


def vae(channels: int = 4, levels: int = 2, **more: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8,) * levels,
        down_block_types=_VAE_BLOCKS[0] * levels,
        up_block_types=_VAE_BLOCKS[1] * levels,
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=channels,
        **more,
    )


def random_vae(levels: int = 2, **config: Any) -> Any:
    """Return a VAE with enough contrast to see a difference."""
    scales = {"latents_mean": None, "latents_std": None, "shift_factor": 0.1, "scaling_factor": 0.5}
    made = vae(config.pop("latent_channels", 4), levels, **scales | config)
    with torch.no_grad():
        made.decoder.conv_out.weight.mul_(4)
    return made.eval()


def unet(**more: Any) -> Any:
    options = {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
        "cross_attention_dim": 16,
        "norm_num_groups": 4,
        **more,
    }
    return diffusers.UNet2DConditionModel(**options)


def sdxl_unet(text_width: int = 12, num_time_ids: int = 6) -> Any:
    """Return SDXL's UNet in small, for a pooled text of width 6; its refiner has five time ids."""
    return unet(
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=num_time_ids * 4 + 6,
        cross_attention_dim=text_width,
    ).eval()


def save_controlnet(unet: Path, folder: Path) -> Path:
    """Save a ControlNet for a UNet whose residuals matter: stock's begin at zero."""
    torch.manual_seed(0)
    stock = diffusers.UNet2DConditionModel.from_pretrained(unet, torch_dtype=torch.float32)
    net = diffusers.ControlNetModel.from_unet(stock, conditioning_embedding_out_channels=(4, 8, 8))
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    net.save_pretrained(folder)
    return folder
