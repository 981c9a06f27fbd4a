"""Tiny random pipelines of further classes, each with parts of its own."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from unit.deployments.engines.stock.tiny_classes import (
    IMAGE,
    SIZE,
    TIMED,
    Case,
    changed,
    clip_vision,
    fibo,
    hunyuan_video,
    image_processor,
    sdxl,
    small,
    stirred,
)
from unit.deployments.engines.stock.tiny_clips import ltx
from unit.deployments.engines.stock.tiny_pipelines import byte_tokenizer, hunyuan_dit, unet, vae


def hidream() -> dict[str, Any]:
    net = small(
        diffusers.HiDreamImageTransformer2DModel,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        caption_channels=[16, 16],
        text_emb_dim=32,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
    )
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    return {
        "transformer": net,
        "text_encoder_4": transformers.LlamaForCausalLM(config),
        "tokenizer_4": byte_tokenizer(),
        "vae": vae(shift_factor=0.1),
    }


def hunyuan_dit_control() -> dict[str, Any]:
    parts = hunyuan_dit().components
    control = small(
        diffusers.HunyuanDiT2DControlNetModel,
        num_attention_heads=3,
        in_channels=4,
        patch_size=2,
        sample_size=16,
        hidden_size=24,
        transformer_num_layers=4,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=16,
    )
    return {**changed(parts, num_layers=4), "controlnet": control}


def xs(base: Any, **own: Any) -> dict[str, Any]:
    """A small net that goes along with the denoiser. One made of two models differs from what diffusers loads of it
    (by the groups of its middle), so it is made of its config.
    """
    adapter = small(
        diffusers.ControlNetXSAdapter,
        conditioning_embedding_out_channels=(8, 8),
        num_attention_heads=2,
        block_out_channels=(4, 8),
        base_block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        sample_size=16,
        use_linear_projection=False,
        **own,
    )
    both = diffusers.UNetControlNetXSModel
    return {"controlnet": adapter, "unet": stirred(both.from_config(both.from_unet(base, adapter).config))}


def framepack() -> dict[str, Any]:
    """It goes on from the frames before, packed by their age."""
    net = small(
        diffusers.HunyuanVideoFramepackTransformer3DModel,
        in_channels=4,
        out_channels=4,
        patch_size=2,
        mlp_ratio=2.0,
        has_image_proj=True,
        image_proj_dim=16,
        has_clean_x_embedder=True,
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=16)
    return {
        **hunyuan_video(),
        "transformer": net,
        "image_encoder": transformers.SiglipVisionModel(config),
        "feature_extractor": transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}),
    }


FURTHER_CASES: dict[str, Case] = {
    "BriaFiboEditPipeline": Case(
        fibo,
        {**SIZE, "max_sequence_length": 16, "prompt": '{"edit_instruction": "a hat"}', "negative_prompt": "dull"},
        IMAGE,
    ),
    "HiDreamImagePipeline": Case(hidream, {**SIZE, "max_sequence_length": 16}),
    "HunyuanDiTControlNetPipeline": Case(
        hunyuan_dit_control, {"height": 16, "width": 16, "use_resolution_binning": False}, ("control_image",)
    ),
    "HunyuanVideoFramepackPipeline": Case(
        framepack,
        {**SIZE, "num_frames": 9, "latent_window_size": 3, "max_sequence_length": 16},
        IMAGE,
    ),
    "LTXLatentUpsamplePipeline": Case(
        lambda: {
            "vae": ltx().vae,
            "latent_upsampler": LTXLatentUpsamplerModel(in_channels=8, mid_channels=32, num_blocks_per_stage=1),
        },
        SIZE,
        ("video:9",),
    ),
    "StableDiffusionControlNetXSPipeline": Case(lambda: xs(unet(layers_per_block=2, sample_size=16)), SIZE, IMAGE),
    "StableDiffusionXLControlNetXSPipeline": Case(
        lambda: sdxl(**xs(unet(**TIMED, layers_per_block=2, sample_size=16), cross_attention_dim=32)), SIZE, IMAGE
    ),
    "VersatileDiffusionImageVariationPipeline": Case(
        lambda: {
            "image_encoder": clip_vision(),
            "image_feature_extractor": image_processor(),
            "image_unet": unet(sample_size=16),
        },
        SIZE,
        IMAGE,
    ),
}
