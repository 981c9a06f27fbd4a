"""Tiny random pipelines of real classes of diffusers that make videos and audio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import transformers
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from kit.tiny.parts import clip, clip_tokenizer, t5, t5_tokenizer, unet, vae


def wan_vae() -> Any:
    return diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def motion_adapter(**own: Any) -> Any:
    blocks = {"block_out_channels": (8, 16), "motion_layers_per_block": 1, "motion_norm_num_groups": 2}
    return diffusers.MotionAdapter(**blocks, motion_num_attention_heads=2, **own)


def wan() -> Any:
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=16, freq_dim=16, ffn_dim=16, num_layers=1, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    return diffusers.WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5(transformers.UMT5EncoderModel),
        vae=wan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        transformer=transformer,
    )


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, num_layers=1, caption_channels=16,
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLLTXVideo(
        in_channels=3, out_channels=3, latent_channels=8, block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8), layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1), spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4, upsample_factor=(1,) * 4, timestep_conditioning=False, patch_size=1,
        patch_size_t=1, encoder_causal=True, decoder_causal=False,
    )  # fmt: skip
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=decoder,
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
    )


def cogvideox() -> Any:
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=16,
        num_layers=1, sample_width=2, sample_height=2, sample_frames=9, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=16,
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLCogVideoX(
        in_channels=3, out_channels=3, down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4, block_out_channels=(8, 8, 8, 8), latent_channels=4,
        layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=4,
    )  # fmt: skip
    return diffusers.CogVideoXPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5(),
        vae=decoder,
        transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )


def animate_diff() -> Any:
    return diffusers.AnimateDiffPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        unet=unet(sample_size=8, norm_num_groups=2, block_out_channels=(8, 16)),
        motion_adapter=motion_adapter(),
        scheduler=diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False),
    )


def dance_diffusion() -> Any:
    model = diffusers.UNet1DModel(
        block_out_channels=(32, 32, 64), extra_in_channels=64, sample_size=512, sample_rate=16_000, in_channels=2,
        out_channels=2, flip_sin_to_cos=True, use_timestep_embedding=False, time_embedding_type="fourier",
        mid_block_type="UNetMidBlock1D", down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )  # fmt: skip
    return diffusers.DanceDiffusionPipeline(unet=model, scheduler=diffusers.IPNDMScheduler())


def stable_audio() -> Any:
    transformer = diffusers.StableAudioDiTModel(
        sample_size=4, in_channels=3, num_layers=1, attention_head_dim=4, num_key_value_attention_heads=2,
        out_channels=3, cross_attention_dim=4, time_proj_dim=8, global_states_input_dim=8, cross_attention_input_dim=4,
        num_attention_heads=2,
    )  # fmt: skip
    decoder = diffusers.AutoencoderOobleck(
        encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3, decoder_input_channels=3,
        audio_channels=2, channel_multiples=[2, 4], sampling_rate=4,
    )  # fmt: skip
    projection = StableAudioProjectionModel(text_encoder_dim=16, conditioning_dim=4, min_value=0, max_value=32)
    return diffusers.StableAudioPipeline(
        transformer=transformer,
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(prediction_type="v_prediction", sigma_data=1.0),
        vae=decoder,
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        projection_model=projection,
    )


# The arguments of a call, beside prompt, steps and seed.
VIDEOS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "WanPipeline": (wan, {"height": 16, "width": 32, "num_frames": 9, "max_sequence_length": 16}),
    "LTXPipeline": (ltx, {"height": 32, "width": 32, "num_frames": 9, "frame_rate": 24, "max_sequence_length": 16}),
    "CogVideoXPipeline": (cogvideox, {"height": 16, "width": 16, "num_frames": 8, "max_sequence_length": 16}),
    "AnimateDiffPipeline": (animate_diff, {"height": 16, "width": 16, "num_frames": 4}),
}
AUDIOS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "DanceDiffusionPipeline": (dance_diffusion, {}),
    "StableAudioPipeline": (stable_audio, {"audio_end_in_s": 1.5}),
}
