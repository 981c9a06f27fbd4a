"""Random models of real classes for the stock bench: an image or a video by diffusers' own code, and a chat."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
import transformers

_ADDER: Final = Path(__file__).parents[1] / "demo" / "models" / "adder"
CLASSES: Final = ("PixArtSigmaPipeline", "CogView3PlusPipeline", "WanPipeline")
# With and without soft caps and windows, and with recurrent layers.
TEXT_CLASSES: Final = ("Gemma2ForCausalLM", "Olmo2ForCausalLM", "Qwen3_5ForCausalLM")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of what is made: `width` of a denoiser in channels, `layers` of it, `pixels` of a side."""

    width: int = 256
    layers: int = 4
    pixels: int = 64
    text_width: int = 512
    text_layers: int = 4


def build_pipeline(class_name: str, sizes: Sizes, seed: int) -> Any:
    """Return a random pipeline of one of CLASSES, in eval mode."""
    torch.manual_seed(seed)
    pipeline = {"PixArtSigmaPipeline": _pixart, "CogView3PlusPipeline": _cogview, "WanPipeline": _wan}[class_name](
        sizes
    )
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


def options_of(class_name: str, sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of a call beside prompt, steps and seed."""
    size = {"height": sizes.pixels, "width": sizes.pixels, "max_sequence_length": 64}
    if class_name == "PixArtSigmaPipeline":
        return {**size, "use_resolution_binning": False}
    return {**size, "num_frames": 9} if class_name == "WanPipeline" else size


def save_chat(folder: Path, seed: int) -> None:
    """Save a random Llama with the tokenizer of the demo's, large enough that a token takes some milliseconds."""
    torch.manual_seed(seed)
    shutil.copytree(_ADDER, folder)
    config = transformers.AutoConfig.from_pretrained(_ADDER)
    given = config.to_dict() | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    given |= {"num_attention_heads": 16, "num_key_value_heads": 8}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given)).to(torch.float32)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"dtype": "float32"}))


def save_text_model(class_name: str, folder: Path, seed: int, width: int, num_layers: int) -> Any:
    """Return one of TEXT_CLASSES of random float32 weights, of some 60 million parameters; `folder` has it too."""
    torch.manual_seed(seed)
    shutil.copytree(_ADDER, folder)  # for its tokenizer
    (folder / "model.safetensors").unlink()
    kind = getattr(transformers, class_name)
    # The cache of `generate` forgets by a window, also where the class knows of none.
    window = {"sliding_window": 128} if class_name == "Gemma2ForCausalLM" else {}
    config = kind.config_class(
        vocab_size=32000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=num_layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, head_dim=64, max_position_embeddings=1024,
        query_pre_attn_scalar=64, linear_num_key_heads=width // 128, eos_token_id=None,
        linear_num_value_heads=width // 64, linear_key_head_dim=64, linear_value_head_dim=64, tie_word_embeddings=True,
        architectures=[class_name], dtype="float32", **window,
    )  # fmt: skip
    model = kind(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def _t5(sizes: Sizes, class_: Any = transformers.T5EncoderModel) -> dict[str, Any]:
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -4.0)]
    scores += [(chr(code), -8.0) for code in range(33, 127)]
    kind = transformers.T5Config if class_ is transformers.T5EncoderModel else transformers.UMT5Config
    config = kind(
        vocab_size=512, d_model=sizes.text_width, d_kv=64, d_ff=2 * sizes.text_width, num_layers=sizes.text_layers,
        num_heads=sizes.text_width // 64,
    )  # fmt: skip
    tokenizer = transformers.T5Tokenizer(vocab=scores, extra_ids=0, model_max_length=512)
    return {"tokenizer": tokenizer, "text_encoder": class_(config)}


def _vae() -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 64, 64, 64), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=8, layers_per_block=1, latent_channels=4,
    )  # fmt: skip


def _pixart(sizes: Sizes) -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=sizes.pixels // 8, num_layers=sizes.layers, patch_size=2, attention_head_dim=64,
        num_attention_heads=sizes.width // 64, caption_channels=sizes.text_width, in_channels=4,
        cross_attention_dim=sizes.width, out_channels=8, norm_num_groups=1,
    )  # fmt: skip
    scheduler = diffusers.DDIMScheduler()
    return diffusers.PixArtSigmaPipeline(**_t5(sizes), vae=_vae(), transformer=transformer, scheduler=scheduler)


def _cogview(sizes: Sizes) -> Any:
    transformer = diffusers.CogView3PlusTransformer2DModel(
        patch_size=2, in_channels=4, num_layers=sizes.layers, attention_head_dim=64,
        num_attention_heads=sizes.width // 64, out_channels=4, text_embed_dim=sizes.text_width, time_embed_dim=256,
        condition_dim=64, pos_embed_max_size=sizes.pixels // 8, sample_size=sizes.pixels // 8,
    )  # fmt: skip
    scheduler = diffusers.CogVideoXDDIMScheduler()
    return diffusers.CogView3PlusPipeline(**_t5(sizes), vae=_vae(), transformer=transformer, scheduler=scheduler)


def _wan(sizes: Sizes) -> Any:
    decoder = diffusers.AutoencoderKLWan(
        base_dim=16, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=sizes.width // 64, attention_head_dim=64, in_channels=16,
        out_channels=16, text_dim=sizes.text_width, freq_dim=256, ffn_dim=2 * sizes.width, num_layers=sizes.layers,
        cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
    )  # fmt: skip
    return diffusers.WanPipeline(
        **_t5(sizes, transformers.UMT5EncoderModel), vae=decoder, transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip
