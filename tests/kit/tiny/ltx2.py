"""Tiny random pipelines of LTX 2, which makes videos with sound."""

from __future__ import annotations

from typing import Any, Final

import diffusers
import transformers
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from kit.tiny.classes import IMAGE, SIZE, Case, flow, small
from kit.tiny.parts import byte_tokenizer

_LAYERS: Final = 2


def gemma3() -> Any:
    """A text encoder that could see, and is given texts alone."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": _LAYERS, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 512, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
    vision = {**sizes, "image_size": 28, "patch_size": 14, "vision_use_head": False}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def connectors() -> Any:
    sizes: dict[str, Any] = {}
    for stream in ("video", "audio"):
        sizes |= {
            f"{stream}_connector_num_attention_heads": 2,
            f"{stream}_connector_attention_head_dim": 8,
            f"{stream}_connector_num_layers": 1,
            f"{stream}_connector_num_learnable_registers": None,
        }
    return small(
        LTX2TextConnectors,
        text_proj_in_factor=_LAYERS + 1,
        connector_rope_base_seq_len=32,
        rope_double_precision=False,
        causal_temporal_positioning=False,
        rope_type="split",
        **sizes,
    )


def video_vae() -> Any:
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )


def ltx2(**of_net: Any) -> dict[str, Any]:
    net = small(
        diffusers.LTX2VideoTransformer3DModel,
        in_channels=4,
        out_channels=4,
        patch_size=1,
        patch_size_t=1,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        qk_norm="rms_norm_across_heads",
        rope_double_precision=False,
        rope_type="split",
        **of_net,
    )
    sound = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        is_causal=True,
        mel_bins=8,
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )
    return {
        "transformer": net,
        "vae": video_vae(),
        "audio_vae": sound,
        "scheduler": flow(),
        "text_encoder": gemma3(),
        "tokenizer": byte_tokenizer(),
        "connectors": connectors(),
        "vocoder": vocoder,
    }


SHORT: Final = {**SIZE, "num_frames": 5, "max_sequence_length": 16, "use_cross_timestep": False}
LTX2_CASES: dict[str, Case] = {
    "LTX2ConditionPipeline": Case(ltx2, SHORT),
    "LTX2DFRPipeline": Case(
        lambda: ltx2(vae_scale_factors=(2, 2, 2), use_keyframes_abs_pos_embedding=True),
        {**SHORT, "num_frames": 9, "sigmas": [1.0, 0.5]},
    ),
    "LTX2ImageToVideoPipeline": Case(ltx2, SHORT, IMAGE),
    "LTX2InContextPipeline": Case(ltx2, SHORT),
    "LTX2LatentUpsamplePipeline": Case(
        lambda: {
            "vae": video_vae(),
            "latent_upsampler": LTX2LatentUpsamplerModel(in_channels=4, mid_channels=32, num_blocks_per_stage=1),
        },
        {**SIZE, "num_frames": 5},
        ("video:5",),
    ),
    "LTX2Pipeline": Case(ltx2, SHORT),
}
