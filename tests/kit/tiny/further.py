"""Tiny random pipelines of further classes, each with parts of its own."""

from __future__ import annotations

from typing import Any, Final

import diffusers
import transformers
from diffusers.pipelines.ace_step.modeling_ace_step import AceStepConditionEncoder
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder
from kit.tiny.classes import (
    IMAGE,
    SIZE,
    TIMED,
    VIDEO,
    Case,
    changed,
    clip_vision,
    ddim,
    fibo,
    flow,
    hunyuan_video,
    image_processor,
    sdxl,
    small,
    stirred,
)
from kit.tiny.clips import ltx
from kit.tiny.parts import byte_tokenizer, language_model, t5_tokenizer, unet, vae
from kit.tiny.pipelines import hunyuan_dit, z_image
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder


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


def t5gemma() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    part = transformers.T5GemmaModuleConfig(**sizes, vocab_size=512, num_key_value_heads=1, head_dim=8)
    return transformers.T5GemmaConfig(encoder=part, decoder=part, is_encoder_decoder=False, vocab_size=512)


def prx(channels: int = 4, **own: Any) -> dict[str, Any]:
    net = small(
        diffusers.PRXTransformer2DModel,
        in_channels=channels,
        context_in_dim=16,
        hidden_size=16,
        num_heads=2,
        depth=1,
        axes_dim=[4, 4],
        mlp_ratio=2.0,
    )
    return {"transformer": net, "text_encoder": T5GemmaEncoder(t5gemma().encoder), "tokenizer": byte_tokenizer(), **own}


def z_image_omni() -> dict[str, Any]:
    """It reads images by a tower of its own."""
    config = transformers.Siglip2VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=16, num_patches=16
    )
    return {
        **changed(z_image().components, siglip_feat_dim=16),
        "siglip": transformers.Siglip2VisionModel(config),
        "siglip_processor": transformers.Siglip2ImageProcessorPil(patch_size=16, max_num_patches=16),
    }


def helios() -> dict[str, Any]:
    """It makes a video chunk by chunk, and knows the ones before by their age."""
    net = small(
        diffusers.HeliosTransformer3DModel,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        rope_dim=(4, 4, 4),
        num_layers=2,
    )
    scheduler = diffusers.HeliosScheduler(stage_range=[0, 1], stages=1, use_dynamic_shifting=True)
    return {"transformer": net, "scheduler": scheduler, "tokenizer": t5_tokenizer()}


def stable_audio_3() -> dict[str, Any]:
    decoder = diffusers.AutoencoderSAME(
        patch_size=4,
        encoder_channels=8,
        encoder_c_mults=[1],
        encoder_strides=[2],
        encoder_transformer_depths=[1],
        latent_dim=8,
        dim_heads=4,
        sampling_rate=100,
    )
    net = diffusers.StableAudio3DiTModel(
        io_channels=8,
        embed_dim=16,
        depth=1,
        num_heads=2,
        cond_token_dim=16,
        global_cond_dim=16,
        local_add_cond_dim=9,
        timestep_features_dim=16,
        num_memory_tokens=2,
    )
    return {
        "vae": stirred(decoder, std=1.0),
        "transformer": stirred(net),
        "text_encoder": transformers.T5GemmaEncoderModel(t5gemma()),
        "tokenizer": byte_tokenizer(),
        "duration_embedder": StableAudio3DurationEmbedder(output_dim=16, fourier_dim=16),
    }


def longcat_audio() -> dict[str, Any]:
    decoder = diffusers.LongCatAudioDiTVae(
        channels=8, c_mults=[1, 2], strides=[2, 2], latent_dim=8, encoder_latent_dim=16, downsampling_ratio=4,
        sample_rate=100,
    )  # fmt: skip
    net = diffusers.LongCatAudioDiTTransformer(dit_dim=16, dit_depth=1, dit_heads=2, dit_text_dim=16, latent_dim=8)
    return {"vae": decoder, "transformer": stirred(net), "tokenizer": t5_tokenizer()}


def i2vgen() -> dict[str, Any]:
    net = small(
        diffusers.I2VGenXLUNet,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=4,
        num_attention_heads=None,
    )
    return {"unet": net, "image_encoder": clip_vision(), "scheduler": ddim()}


def latent_upscale() -> dict[str, Any]:
    across = "KCrossAttnDownBlock2D", "KCrossAttnUpBlock2D"
    net = diffusers.UNet2DConditionModel(
        act_fn="gelu",
        attention_head_dim=8,
        norm_num_groups=None,
        block_out_channels=[32, 32, 64, 64],
        time_cond_proj_dim=144,  # of the noise's level, 128, and of the text
        conv_in_kernel=1,
        conv_out_kernel=1,
        cross_attention_dim=16,
        down_block_types=("KDownBlock2D", *across[:1] * 3),
        in_channels=8,
        mid_block_type=None,
        out_channels=5,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
        up_block_types=(*across[1:] * 3, "KUpBlock2D"),
        layers_per_block=1,
    )
    return {"unet": net, "scheduler": diffusers.EulerDiscreteScheduler(prediction_type="sample")}


def motif(**own: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 512, "num_key_value_heads": 1, "head_dim": 8, "dropout_rate": 0.0}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    encoder = T5Gemma2Encoder(transformers.T5Gemma2EncoderConfig(text_config=text, vision_config=vision))
    return {
        "transformer": small(
            diffusers.MotifVideoTransformer3DModel,
            in_channels=33,
            out_channels=16,
            rope_axes_dim=(2, 2, 4),
            mlp_ratio=2.0,
            **own,
        ),
        "text_encoder": encoder,
        "guider": diffusers.ClassifierFreeGuidance(),
        "tokenizer": byte_tokenizer(),
        "scheduler": flow(),
    }


def allegro() -> dict[str, Any]:
    """Its VAE works in tiles alone, and a stock pipeline has to be told so."""
    decoder = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2, sample_size=64
    )
    decoder.enable_tiling()
    net = small(
        diffusers.AllegroTransformer3DModel,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        sample_height=8,
        sample_width=8,
        sample_frames=8,
        cross_attention_dim=24,
    )
    return {"transformer": net, "vae": decoder, "tokenizer": t5_tokenizer()}


def ace_step() -> dict[str, Any]:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8}
    widths = {"hidden_size": 16, "intermediate_size": 16}
    net = diffusers.AceStepTransformer1DModel(
        **heads, **widths, num_hidden_layers=2, in_channels=12, audio_acoustic_hidden_dim=4
    )
    encoder = AceStepConditionEncoder(
        **heads,
        **widths,
        text_hidden_dim=16,
        timbre_hidden_dim=4,
        num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
    )
    decoder = diffusers.AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[1, 2],
        decoder_channels=4,
        decoder_input_channels=4,
        audio_channels=2,
        channel_multiples=[2, 4],
        sampling_rate=50,
    )
    return {
        "vae": decoder,
        "text_encoder": language_model("Qwen3"),
        "tokenizer": byte_tokenizer(),
        "transformer": stirred(net),
        "condition_encoder": stirred(encoder),
    }


PLAIN: Final = {**SIZE, "use_resolution_binning": False}
CHUNKS: Final = {**VIDEO, "num_latent_frames_per_chunk": 2}
FURTHER_CASES: dict[str, Case] = {
    "AceStepPipeline": Case(ace_step, {"audio_duration": 0.5}),
    "AllegroPipeline": Case(allegro, {"height": 16, "width": 16, "num_frames": 8, "max_sequence_length": 16}),
    "HeliosPipeline": Case(helios, CHUNKS),
    "HeliosPyramidPipeline": Case(helios, {**CHUNKS, "pyramid_num_inference_steps_list": [1]}),
    "MotifVideoPipeline": Case(motif, {**VIDEO, "num_frames": 5}),
    "PRXPipeline": Case(lambda: prx(vae=vae(shift_factor=0.1)), PLAIN),
    "PRXPixelPipeline": Case(lambda: prx(3), PLAIN),
    "I2VGenXLPipeline": Case(i2vgen, {**SIZE, "num_frames": 3, "clip_skip": None}, IMAGE),
    "LongCatAudioDiTPipeline": Case(longcat_audio, {"audio_duration_s": 1.0}),
    "StableAudio3AudioToAudioPipeline": Case(
        stable_audio_3, {"duration": 1.0, "init_noise_level": 0.6}, audio=("audio",)
    ),
    "StableAudio3InpaintPipeline": Case(
        stable_audio_3, {"duration": 1.0, "mask_start_seconds": 0.3, "mask_end_seconds": 0.7}, audio=("audio",)
    ),
    "StableAudio3Pipeline": Case(stable_audio_3, {"duration": 1.0}),
    "ZImageOmniPipeline": Case(z_image_omni, SIZE),
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
    "StableDiffusionLatentUpscalePipeline": Case(latent_upscale, {}, IMAGE),
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
