"""Tiny random pipelines of real classes of diffusers that have no family, text encoders and tokenizers included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel
from kit.tiny.parts import (
    CLIP_TOKENS,
    bert_tokenizer,
    byte_tokenizer,
    clip,
    clip_tokenizer,
    language_model,
    t5,
    t5_tokenizer,
    unet,
    vae,
)


def pixart(class_: Any, num_layers: int = 1) -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=num_layers, patch_size=2, attention_head_dim=8, num_attention_heads=2,
        caption_channels=16, in_channels=4, cross_attention_dim=16, out_channels=8, norm_num_groups=1,
    )  # fmt: skip
    scheduler = diffusers.DDIMScheduler()
    return class_(tokenizer=t5_tokenizer(), text_encoder=t5(), vae=vae(), transformer=transformer, scheduler=scheduler)


def sana() -> Any:
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=16,
        sample_size=32,
    )  # fmt: skip
    decoder = diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), downsample_block_type="conv",
        upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41,
    )  # fmt: skip
    return diffusers.SanaPipeline(
        tokenizer=byte_tokenizer(),
        text_encoder=language_model("Gemma2"),
        vae=decoder,
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def lumina2() -> Any:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=4, patch_size=2, in_channels=4, hidden_size=8, num_layers=1, num_attention_heads=1, num_kv_heads=1,
        multiple_of=16, scaling_factor=1.0, axes_dim_rope=(4, 2, 2), axes_lens=(300, 32, 32), cap_feat_dim=16,
        num_refiner_layers=1,
    )  # fmt: skip
    return diffusers.Lumina2Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(shift_factor=0.1),
        text_encoder=language_model("Gemma2"),
        tokenizer=byte_tokenizer(),
    )


def aura_flow() -> Any:
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=2, caption_projection_dim=16, joint_attention_dim=16, out_channels=4, pos_embed_max_size=64,
    )  # fmt: skip
    return diffusers.AuraFlowPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5(transformers.UMT5EncoderModel),
        vae=vae(),
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def cogview4() -> Any:
    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, num_layers=1, attention_head_dim=4, num_attention_heads=2, out_channels=4,
        text_embed_dim=16, time_embed_dim=8, condition_dim=4, rope_axes_dim=(32, 32),
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    return diffusers.CogView4Pipeline(
        tokenizer=byte_tokenizer(),
        text_encoder=language_model("Glm"),
        vae=vae(),
        transformer=transformer,
        scheduler=scheduler,
    )


def cogview3() -> Any:
    transformer = diffusers.CogView3PlusTransformer2DModel(
        patch_size=2, in_channels=4, num_layers=1, attention_head_dim=4, num_attention_heads=2, out_channels=4,
        text_embed_dim=16, time_embed_dim=8, condition_dim=2, pos_embed_max_size=8, sample_size=8,
    )  # fmt: skip
    return diffusers.CogView3PlusPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5(),
        vae=vae(),
        transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )


def qwen_image() -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=16, guidance_embeds=False, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLQwenImage(
        base_dim=24, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0,
            "vocab_size": 512,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
        hidden_size=16,
        vocab_size=512,
    )
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=decoder,
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=byte_tokenizer(transformers.Qwen2TokenizerFast),
        transformer=transformer,
    )


def z_image() -> Any:
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, qk_norm=True, cap_feat_dim=16, rope_theta=256.0, t_scale=1000.0, axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )  # fmt: skip
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ ' think' if enable_thinking }}"
    tokenizer = byte_tokenizer(chat_template=template)
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(16, shift_factor=0.1),
        text_encoder=language_model("Qwen3"),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def flux2(cls: Any, text_encoder: Any, tokenizer: Any, *, guidance_embeds: bool = False, **options: Any) -> Any:
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=48, timestep_guidance_channels=256, axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=4,
    )  # fmt: skip
    decoder.bn.running_mean.normal_(0, 0.3)
    decoder.bn.running_var.uniform_(0.5, 2.0)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return cls(
        scheduler=scheduler,
        vae=decoder,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        **options,
    )


def flux2_klein(**options: Any) -> Any:
    """Its text encoder has the layers that the pipeline takes: 9, 18 and 27."""
    config = transformers.Qwen3Config(
        vocab_size=512, num_key_value_heads=1, head_dim=8, pad_token_id=0, hidden_size=16, intermediate_size=16,
        num_hidden_layers=28, num_attention_heads=2,
    )  # fmt: skip
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ ' no' if not enable_thinking }}"
    encoder, tokenizer = transformers.Qwen3ForCausalLM(config), byte_tokenizer(chat_template=template)
    return flux2(diffusers.Flux2KleinPipeline, encoder, tokenizer, **options)


def flux2_dev() -> Any:
    """Its text encoder has the layers that the pipeline takes: 10, 20 and 30."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    config = transformers.Mistral3Config(
        text_config={
            **sizes, "model_type": "mistral", "vocab_size": 512, "num_key_value_heads": 1, "num_hidden_layers": 31,
            "pad_token_id": 0,
        },
        vision_config={**sizes, "model_type": "pixtral", "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        image_token_index=4,
        spatial_merge_size=1,
    )  # fmt: skip
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% endfor %}{{ ' go' if add_generation_prompt }}"
    )
    # In the place of a PixtralProcessor, which needs torchvision: it hands texts on to such a tokenizer.
    tokenizer = byte_tokenizer(padding_side="left", chat_template=template)
    encoder = transformers.Mistral3ForConditionalGeneration(config)
    return flux2(diffusers.Flux2Pipeline, encoder, tokenizer, guidance_embeds=True)


def chroma() -> Any:
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 4, 8), approximator_hidden_dim=32, approximator_layers=1,
        approximator_num_channels=16,
    )  # fmt: skip
    return diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(shift_factor=0.0609),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
    )


def bria() -> Any:
    transformer = diffusers.BriaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=None, axes_dims_rope=[0, 4, 4],
    )  # fmt: skip
    return diffusers.BriaPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(shift_factor=0.0),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
    )


def latent_consistency() -> Any:
    return diffusers.LatentConsistencyModelPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        unet=unet(time_cond_proj_dim=32),
        scheduler=diffusers.LCMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def instruct_pix2pix() -> Any:
    return diffusers.StableDiffusionInstructPix2PixPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        unet=unet(in_channels=8),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def pag() -> Any:
    """A class that puts its own attention processors into the modules while it runs."""
    return diffusers.StableDiffusionPAGPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        unet=unet(sample_size=64),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        pag_applied_layers=["mid"],
    )


def dit() -> Any:
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=8, num_layers=1, patch_size=4, attention_head_dim=8, num_attention_heads=2, in_channels=4,
        out_channels=8, attention_bias=True, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero", norm_elementwise_affine=False,
    )  # fmt: skip
    return diffusers.DiTPipeline(transformer=transformer, vae=vae(), scheduler=diffusers.DDIMScheduler())


def ddpm() -> Any:
    model = diffusers.UNet2DModel(
        block_out_channels=(4, 8), layers_per_block=1, norm_num_groups=4, sample_size=8, in_channels=3, out_channels=3,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    return diffusers.DDPMPipeline(unet=model, scheduler=diffusers.DDPMScheduler())


def kandinsky() -> Any:
    """A prior and a decoder, whose pipelines are parts of the one that is called."""
    vision = transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(
            hidden_size=16, image_size=32, projection_dim=16, intermediate_size=16, num_attention_heads=2,
            num_hidden_layers=1, patch_size=16,
        )
    )  # fmt: skip
    prior = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, embedding_dim=16, num_layers=1, num_embeddings=CLIP_TOKENS
    )
    movq = diffusers.VQModel(
        block_out_channels=[32, 64], down_block_types=["DownEncoderBlock2D"] * 2, in_channels=3, latent_channels=4,
        layers_per_block=1, norm_num_groups=8, norm_type="spatial", num_vq_embeddings=12, out_channels=3,
        up_block_types=["AttnUpDecoderBlock2D", "UpDecoderBlock2D"], vq_embed_dim=4,
    )  # fmt: skip
    denoiser = unet(
        in_channels=4, out_channels=8, addition_embed_type="image", encoder_hid_dim=16,
        encoder_hid_dim_type="image_proj", class_embed_type=None, resnet_time_scale_shift="scale_shift",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
    )  # fmt: skip
    solver = diffusers.UnCLIPScheduler(
        variance_type="fixed_small_log", prediction_type="sample", num_train_timesteps=1000, clip_sample=True,
        clip_sample_range=10.0,
    )  # fmt: skip
    return diffusers.KandinskyV22CombinedPipeline(
        unet=denoiser,
        scheduler=diffusers.DDPMScheduler(beta_schedule="linear"),
        movq=movq,
        prior_prior=prior,
        prior_image_encoder=vision,
        prior_text_encoder=clip(transformers.CLIPTextModelWithProjection),
        prior_tokenizer=clip_tokenizer(),
        prior_scheduler=solver,
        prior_image_processor=transformers.CLIPImageProcessor(crop_size=32, size=32),
    )


def latent_diffusion() -> Any:
    """Its text encoder is a class of the pipeline's own folder."""
    config = LDMBertConfig(
        vocab_size=64, encoder_layers=1, encoder_ffn_dim=16, encoder_attention_heads=2, d_model=16, head_dim=8,
        max_position_embeddings=77,
    )  # fmt: skip
    return diffusers.LDMTextToImagePipeline(
        vqvae=vae(),
        bert=LDMBertModel(config),
        tokenizer=bert_tokenizer(),
        unet=unet(sample_size=8),
        scheduler=diffusers.DDIMScheduler(),
    )


def hunyuan_dit() -> Any:
    transformer = diffusers.HunyuanDiT2DModel(
        sample_size=16, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, in_channels=4,
        cross_attention_dim=16, cross_attention_dim_t5=16, pooled_projection_dim=16, hidden_size=24,
        activation_fn="gelu-approximate", text_len=77, text_len_t5=256,
    )  # fmt: skip
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return diffusers.HunyuanDiTPipeline(
        vae=vae(),
        text_encoder=transformers.BertModel(config),
        tokenizer=bert_tokenizer(),
        transformer=transformer,
        scheduler=diffusers.DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        text_encoder_2=t5(),
        tokenizer_2=t5_tokenizer(),
    )


# The arguments of a call, beside prompt, steps and seed.
SMALL = {"height": 16, "width": 16}
BINNED = {**SMALL, "use_resolution_binning": False}
PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "PixArtAlphaPipeline": (lambda: pixart(diffusers.PixArtAlphaPipeline), {**BINNED, "max_sequence_length": 16}),
    "PixArtSigmaPipeline": (lambda: pixart(diffusers.PixArtSigmaPipeline), {**BINNED, "max_sequence_length": 16}),
    "SanaPipeline": (
        sana,
        {"height": 32, "width": 32, "use_resolution_binning": False, "complex_human_instruction": []},
    ),
    "Lumina2Pipeline": (lumina2, {"height": 32, "width": 32, "max_sequence_length": 16}),
    "AuraFlowPipeline": (aura_flow, {**SMALL, "max_sequence_length": 16}),
    "CogView4Pipeline": (cogview4, {**SMALL, "negative_prompt": "dull", "max_sequence_length": 16}),
    "CogView3PlusPipeline": (cogview3, {**SMALL, "max_sequence_length": 16}),
    "QwenImagePipeline": (qwen_image, {"height": 32, "width": 32, "negative_prompt": "dull", "true_cfg_scale": 2.0}),
    "ZImagePipeline": (z_image, {"height": 32, "width": 32, "cfg_normalization": True}),
    "Flux2Pipeline": (flux2_dev, {"height": 32, "width": 32, "max_sequence_length": 192}),
    "Flux2KleinPipeline": (flux2_klein, {"height": 32, "width": 32, "max_sequence_length": 64}),
    "ChromaPipeline": (chroma, {**SMALL, "max_sequence_length": 16}),
    "BriaPipeline": (bria, {**SMALL, "max_sequence_length": 16}),
    "LatentConsistencyModelPipeline": (latent_consistency, SMALL),
    "StableDiffusionInstructPix2PixPipeline": (instruct_pix2pix, {}),
    "StableDiffusionPAGPipeline": (pag, {**SMALL, "pag_scale": 2.0}),
    "DiTPipeline": (dit, {"class_labels": [7]}),
    "DDPMPipeline": (ddpm, {}),
    "KandinskyV22CombinedPipeline": (kandinsky, {"height": 32, "width": 32, "prior_num_inference_steps": 2}),
    "LDMTextToImagePipeline": (latent_diffusion, SMALL),
    "HunyuanDiTPipeline": (hunyuan_dit, BINNED),
}


def make(class_name: str, folder: Path) -> Any:
    """Return a stock pipeline, and save it as a folder."""
    return saved(PIPELINES[class_name][0], folder)


def saved(build: Callable[[], Any], folder: Path) -> Any:
    """Build a pipeline, save it as a folder, and return it.

    HAZARD: torch's products round otherwise where a parameter requires gradients, without any being computed.
    """
    torch.manual_seed(0)
    pipeline = build()
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    pipeline.save_pretrained(folder)
    return pipeline
