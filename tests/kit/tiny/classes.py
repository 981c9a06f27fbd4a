"""Tiny random pipelines of any class: parts by the types that its signature names, models by sizes of one table."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import diffusers
import torch
import transformers
from diffusers.pipelines.deepfloyd_if.watermark import IFWatermarker
from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP
from diffusers.pipelines.stable_diffusion.clip_image_project_model import CLIPImageProjection
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer
from kit.tiny.clips import cogvideox, ltx, motion_adapter, wan_vae
from kit.tiny.parts import byte_tokenizer, clip, clip_tokenizer, language_model, t5, t5_tokenizer, unet, vae
from kit.tiny.pipelines import cogview4, ddpm, flux2_dev, flux2_klein, kandinsky, pixart, qwen_image, z_image
from kit.tiny.pipelines import sana as tiny_sana

# What is small in the constructors of models, whatever else they take. One head is 8 wide, all that is text 16.
SIZES: Final[Mapping[str, Any]] = {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 16,
    "cross_attention_dim": 16,
    "caption_channels": 16,
    "text_embed_dim": 16,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 16,
    "axes_dims_rope": (2, 2, 4),
    "rope_axes_dim": (2, 2, 4),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 8,
}
_TEXTS: Final = re.compile(r"^(prior_)?(text_encoder|tokenizer|unet|transformer)(_\d)?$")


def small(cls: Any, **own: Any) -> Any:
    """A model of the table's sizes, and of its own."""
    known = inspect.signature(cls.__init__).parameters
    return stirred(cls(**{name: size for name, size in SIZES.items() if name in known} | own))


def stirred(module: Any, std: float = 0.1) -> Any:
    """The same, without weights that are zero from the start: what they multiply would show nowhere."""
    for weights in module.parameters():
        if not weights.any():
            torch.nn.init.normal_(weights, std=std)
    return module


def clip_vision(cls: Any = transformers.CLIPVisionModelWithProjection, **own: Any) -> Any:
    sizes = {"hidden_size": 16, "image_size": 32, "projection_dim": 16, "intermediate_size": 16, "patch_size": 16}
    return cls(transformers.CLIPVisionConfig(num_attention_heads=2, num_hidden_layers=2, **(sizes | own)))


def image_processor() -> Any:
    return transformers.CLIPImageProcessor(crop_size=32, size=32)


def flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


def ddim() -> Any:
    return diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)


def umt5() -> Any:
    return t5(transformers.UMT5EncoderModel)


def changed(parts: Mapping[str, Any], **config: Any) -> dict[str, Any]:
    """The same parts around a denoiser of another config."""
    name = "transformer" if "transformer" in parts else "unet"
    return {**parts, name: stirred(type(parts[name]).from_config(parts[name].config, **config))}


# Parts by the name of their type: the first of a union that is here.
PARTS: Final[Mapping[str, Callable[[], Any]]] = {
    "AutoTokenizer": t5_tokenizer,
    "AutoencoderKL": vae,
    "AutoencoderKLWan": wan_vae,
    "CLIPImageProcessorPil": image_processor,
    "CLIPTextModel": clip,
    "CLIPTextModelWithProjection": lambda: clip(transformers.CLIPTextModelWithProjection),
    "CLIPTokenizer": clip_tokenizer,
    "CLIPVisionModel": lambda: clip_vision(transformers.CLIPVisionModel),
    "CLIPVisionModelWithProjection": clip_vision,
    "Gemma2PreTrainedModel": lambda: language_model("Gemma2"),
    "GemmaPreTrainedModel": lambda: language_model("Gemma"),
    "GemmaTokenizer": byte_tokenizer,
    "GlmModel": lambda: language_model("Glm"),
    "KarrasDiffusionSchedulers": ddim,
    "LlamaModel": lambda: language_model("Llama"),
    "LlamaTokenizer": byte_tokenizer,
    "MotionAdapter": motion_adapter,
    "Qwen2Tokenizer": lambda: byte_tokenizer(transformers.Qwen2TokenizerFast),
    "Qwen3Model": lambda: language_model("Qwen3"),
    "T5EncoderModel": t5,
    "T5Tokenizer": t5_tokenizer,
    "T5TokenizerFast": t5_tokenizer,
    "UMT5EncoderModel": umt5,
    "StableDiffusionSafetyChecker": lambda: None,
    "UNet2DConditionModel": lambda: unet(sample_size=16),
}


def assembled(class_name: str, base: Mapping[str, Any] | None = None, **own: Any) -> Any:
    """A pipeline of a class: its own parts, those of another pipeline, and for the rest those of the types' names."""
    cls = getattr(diffusers, class_name)
    found = {}
    for name, one in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if name in own:
            found[name] = own[name]
        elif base is not None and name in base:
            found[name] = base[name]
        elif name == "requires_safety_checker":
            found[name] = False
        elif name in cls._optional_components and not _TEXTS.match(name):
            found[name] = None
        elif one.default is one.empty or (name in cls._optional_components and one.default is not None):
            found[name] = part(class_name, name, one.annotation)
    return cls(**found)


def part(class_name: str, name: str, annotation: Any) -> Any:
    names = re.findall(r"\w+", annotation.__name__ if isinstance(annotation, type) else str(annotation))
    for kind in names:
        if kind in PARTS:
            return PARTS[kind]()
        if kind.endswith("Scheduler") and hasattr(diffusers, kind):
            return getattr(diffusers, kind)()
    raise KeyError(f"{class_name}: no part of the type of {name}: {names}")


class Case(NamedTuple):
    """A way to make a pipeline, the arguments of a call beside prompt, steps and seed, its images and its audio."""

    parts: Callable[[], Mapping[str, Any]]
    options: Mapping[str, Any]
    images: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()


def of_types() -> dict[str, Any]:
    """Nothing of its own: the types' names say all."""
    return {}


def control_net(cls: Any = diffusers.ControlNetModel, **own: Any) -> Any:
    blocks = {"block_out_channels": (8, 16), "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    return small(cls, **blocks, conditioning_embedding_out_channels=(8, 16), **{"attention_head_dim": 4} | own)


def adapter() -> Any:
    return small(diffusers.T2IAdapter, channels=[8, 16], num_res_blocks=1, downscale_factor=2)


def early_unet(**own: Any) -> Any:
    """A network that attends in its first block."""
    return unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        sample_size=16,
        **own,
    )


TIMED: Final = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
    "cross_attention_dim": 32,
}


def sdxl(**own: Any) -> dict[str, Any]:
    """Two text encoders side by side, and the sizes of the image among what the denoiser knows."""
    return {"unet": unet(**TIMED, sample_size=16), **own}


def sd3(**own: Any) -> dict[str, Any]:
    widths = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "caption_projection_dim": 16}
    transformer = small(
        diffusers.SD3Transformer2DModel,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        patch_size=1,
        pos_embed_max_size=32,
        **widths,
    )
    return {"transformer": transformer, "vae": vae(shift_factor=0.1), "text_encoder_3": t5(width=32), **own}


def sd3_control_net(**own: Any) -> Any:
    widths = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "caption_projection_dim": 16}
    return small(
        diffusers.SD3ControlNetModel,
        in_channels=4,
        out_channels=4,
        patch_size=1,
        pos_embed_max_size=32,
        **widths,
        **own,
    )


def flux(channels: int = 16, **own: Any) -> dict[str, Any]:
    transformer = small(diffusers.FluxTransformer2DModel, in_channels=channels, out_channels=16, guidance_embeds=True)
    return {"transformer": transformer, "vae": vae(shift_factor=0.1), **own}


def flux_control_net() -> Any:
    return small(diffusers.FluxControlNetModel, in_channels=16, guidance_embeds=True)


def sana(**own: Any) -> dict[str, Any]:
    base = tiny_sana().components
    return {**base, **own}


def sana_sprint() -> dict[str, Any]:
    transformer = small(
        diffusers.SanaTransformer2DModel,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        sample_size=32,
        guidance_embeds=True,
        qk_norm="rms_norm_across_heads",
    )
    return sana(transformer=transformer, scheduler=diffusers.SCMScheduler())


def sana_control_net() -> Any:
    return small(
        diffusers.SanaControlNetModel,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        sample_size=32,
    )


def qwen_control_net(**own: Any) -> Any:
    return small(
        diffusers.QwenImageControlNetModel,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        attention_head_dim=16,
        num_attention_heads=4,
        axes_dims_rope=(8, 4, 4),
        **own,
    )


def z_control(channels: int) -> dict[str, Any]:
    net = small(
        diffusers.ZImageControlNetModel,
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=channels,
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )
    net.save_pretrained = copy.deepcopy(net).save_pretrained  # a pipeline puts parts of the transformer into it
    return {**z_image().components, "controlnet": net}


def control_union() -> Any:
    return control_net(
        diffusers.ControlNetUnionModel, **TIMED, num_trans_channel=8, num_trans_head=2, num_proj_channel=8
    )


def depth() -> dict[str, Any]:
    config = transformers.DPTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
        patch_size=16,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        reassemble_factors=[4, 2, 1, 0.5],
    )
    estimator = transformers.DPTForDepthEstimation(config)
    return {
        "depth_estimator": estimator,
        "feature_extractor": transformers.DPTImageProcessorPil(size={"height": 32, "width": 32}),
    }


def deep_floyd(up: bool = False) -> dict[str, Any]:
    """Stages in pixels, of which the second one makes an image larger."""
    blocks = {
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    }
    net = unet(
        **blocks,
        in_channels=6 if up else 3,
        out_channels=6,
        sample_size=32,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        encoder_hid_dim=16,
        encoder_hid_dim_type="text_proj",
        class_embed_type="timestep" if up else None,
        resnet_time_scale_shift="scale_shift",
        act_fn="gelu",
    )
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range", thresholding=True)
    return {"unet": net, "scheduler": scheduler, "watermarker": IFWatermarker()}


def wan_net(cls: Any, **own: Any) -> Any:
    return small(cls, **{"attention_head_dim": 12, "in_channels": 16, "out_channels": 16, "rope_max_seq_len": 32} | own)


def skyreels() -> dict[str, Any]:
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
    )
    return {"transformer": wan_net(diffusers.SkyReelsV2Transformer3DModel), "scheduler": scheduler}


BLOCKS_3D: Final = {
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "attention_head_dim": 4,
    "num_attention_heads": None,
}


def amused() -> dict[str, Any]:
    transformer = small(
        diffusers.UVit2DModel,
        hidden_size=8,
        cond_embed_dim=16,
        micro_cond_encode_dim=2,
        micro_cond_embed_dim=10,
        encoder_hidden_size=16,
        vocab_size=32,
        codebook_size=24,
        in_channels=8,
        block_out_channels=8,
        num_res_blocks=1,
        block_num_heads=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        sample_size=16,
    )
    vqvae = small(
        diffusers.VQModel,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        latent_channels=8,
        up_block_types=("UpDecoderBlock2D",) * 2,
        num_vq_embeddings=24,
        mid_block_add_attention=False,
        lookup_from_codebook=True,
    )
    return {"transformer": transformer, "vqvae": vqvae, "scheduler": diffusers.AmusedScheduler(mask_token_id=31)}


def hunyuan_video(channels: int = 4) -> dict[str, Any]:
    decoder = small(diffusers.AutoencoderKLHunyuanVideo, latent_channels=4, block_out_channels=(8, 8, 8, 8))
    net = small(
        diffusers.HunyuanVideoTransformer3DModel, in_channels=channels, out_channels=4, patch_size=1, mlp_ratio=2.0
    )
    return {"transformer": net, "vae": decoder, "text_encoder_2": clip(positions=77)}


def movq(channels: int = 4, kind: str = "spatial") -> Any:
    return small(
        diffusers.VQModel,
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        norm_type=kind,
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=channels,
        num_vq_embeddings=12,
        vq_embed_dim=channels,
    )


def kandinsky3() -> dict[str, Any]:
    net = small(
        diffusers.Kandinsky3UNet,
        time_embedding_dim=4,
        groups=2,
        attention_head_dim=4,
        layers_per_block=3,
        block_out_channels=(32, 64),
        encoder_hid_dim=16,
    )
    return {"unet": net, "movq": movq()}


def latte() -> dict[str, Any]:
    net = small(
        diffusers.LatteTransformer3DModel,
        in_channels=4,
        out_channels=8,
        patch_size=2,
        sample_size=16,
        video_length=4,
        attention_bias=True,
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        activation_fn="gelu-approximate",
    )
    return {"transformer": net}


def mochi() -> dict[str, Any]:
    net = small(diffusers.MochiTransformer3DModel, time_embed_dim=4, max_sequence_length=16)
    decoder = small(
        diffusers.AutoencoderKLMochi,
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1, 1, 1, 1, 1),
    )
    return {"transformer": net, "vae": decoder}


CHAT: Final = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def ovis() -> dict[str, Any]:
    net = small(diffusers.OvisImageTransformer2DModel, in_channels=16, out_channels=16)
    tokenizer = byte_tokenizer(transformers.Qwen2TokenizerFast, chat_template=CHAT)
    return {"transformer": net, "vae": vae(shift_factor=0.1), "tokenizer": tokenizer}


def unclip() -> dict[str, Any]:
    """The text is made an embedding of an image first, and that is noised as the image is."""
    net = unet(class_embed_type="projection", projection_class_embeddings_input_dim=32, sample_size=16)
    prior = small(diffusers.PriorTransformer, embedding_dim=16, num_embeddings=16)
    solver = diffusers.DDPMScheduler(
        variance_type="fixed_small_log", prediction_type="sample", clip_sample=True, clip_sample_range=5.0
    )
    return {
        "unet": net,
        "prior": prior,
        "prior_scheduler": solver,
        "image_normalizer": StableUnCLIPImageNormalizer(embedding_dim=16),
        "image_noising_scheduler": diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
    }


def svd() -> dict[str, Any]:
    net = small(
        diffusers.UNetSpatioTemporalConditionModel,
        block_out_channels=(32, 64),
        num_attention_heads=(2, 4),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        addition_time_embed_dim=8,
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        projection_class_embeddings_input_dim=24,
    )
    decoder = small(
        diffusers.AutoencoderKLTemporalDecoder,
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
    )
    return {
        "unet": net,
        "vae": decoder,
        "image_encoder": clip_vision(image_size=224, patch_size=112),
        "scheduler": diffusers.EulerDiscreteScheduler(
            prediction_type="v_prediction",
            use_karras_sigmas=True,
            sigma_min=0.002,
            sigma_max=700.0,
            timestep_type="continuous",
        ),
    }


def audio_ldm() -> dict[str, Any]:
    config = transformers.ClapTextConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        projection_dim=16,
        max_position_embeddings=520,
        pad_token_id=0,
    )
    net = unet(
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=16,
        class_embeddings_concat=True,
        cross_attention_dim=(8, 16),
        sample_size=16,
    )
    config_vocoder = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8,
        sampling_rate=16000,
        upsample_initial_channel=16,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        normalize_before=False,
    )
    return {
        "text_encoder": transformers.ClapTextModelWithProjection(config),
        "unet": net,
        "vae": vae(in_channels=1, out_channels=1),
        "tokenizer": byte_tokenizer(),
        "vocoder": transformers.SpeechT5HifiGan(config_vocoder),
    }


def ernie() -> dict[str, Any]:
    base = flux2_dev().components
    net = small(
        diffusers.ErnieImageTransformer2DModel,
        hidden_size=16,
        ffn_hidden_size=16,
        in_channels=16,
        out_channels=16,
        text_in_dim=16,
    )
    return {**base, "transformer": net, "text_encoder": base["text_encoder"].model, "scheduler": flow()}


def qwen_vl(text: bool = False) -> Any:
    encoder = qwen_image().components["text_encoder"]
    return encoder.model.language_model if text else encoder


def byt5() -> dict[str, Any]:
    config = transformers.T5Config(vocab_size=400, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return {
        "text_encoder_2": transformers.T5EncoderModel(config),
        "tokenizer_2": transformers.ByT5Tokenizer(extra_ids=0),
    }


def hunyuan_image() -> dict[str, Any]:
    net = small(
        diffusers.HunyuanImageTransformer2DModel,
        in_channels=4,
        out_channels=4,
        text_embed_2_dim=16,
        rope_axes_dim=(4, 4),
    )
    decoder = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=32,
        scaling_factor=0.5,
    )
    tokenizer = byte_tokenizer(transformers.Qwen2TokenizerFast, chat_template=CHAT)
    return {"transformer": net, "vae": decoder, "text_encoder": qwen_vl(), "tokenizer": tokenizer, **byt5()}


def hunyuan_video15() -> dict[str, Any]:
    net = small(
        diffusers.HunyuanVideo15Transformer3DModel,
        in_channels=65,
        out_channels=32,
        text_embed_2_dim=16,
        image_embed_dim=16,
    )
    decoder = small(diffusers.AutoencoderKLHunyuanVideo15, block_out_channels=(32, 32, 32, 32, 32))
    tokenizer = byte_tokenizer(transformers.Qwen2TokenizerFast, chat_template=CHAT)
    return {
        "transformer": net,
        "vae": decoder,
        "text_encoder": qwen_vl(text=True),
        "tokenizer": tokenizer,
        **byt5(),
        "guider": diffusers.ClassifierFreeGuidance(),
    }


def sana_video() -> dict[str, Any]:
    net = small(
        diffusers.SanaVideoTransformer3DModel,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        attention_head_dim=12,
        cross_attention_dim=24,
        sample_size=8,
        rope_max_seq_len=32,
    )
    return {"transformer": net}


def fibo() -> dict[str, Any]:
    net = small(
        diffusers.BriaFiboTransformer2DModel,
        in_channels=16,
        joint_attention_dim=32,
        text_encoder_dim=16,
        axes_dims_rope=[0, 4, 4],
    )
    config = transformers.SmolLM3Config(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        bos_token_id=3,
        eos_token_id=1,
    )
    encoder = transformers.SmolLM3ForCausalLM(config)
    return {"transformer": net, "text_encoder": encoder, "tokenizer": byte_tokenizer()}


def kandinsky21(channels: int = 4) -> dict[str, Any]:
    config = MCLIPConfig(
        numDims=16,
        transformerDimensions=16,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=512,
    )
    base = changed(
        kandinsky().components,
        in_channels=channels,
        addition_embed_type="text_image",
        encoder_hid_dim_type="text_image_proj",
        encoder_hid_dim=16,
        cross_attention_dim=16,
    )
    scheduler = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    encoder = MultilingualCLIP(config)
    return {**base, "text_encoder": encoder, "tokenizer": t5_tokenizer(), "scheduler": scheduler}


def lumina() -> dict[str, Any]:
    net = small(
        diffusers.LuminaNextDiT2DModel, sample_size=16, patch_size=2, hidden_size=16, num_kv_heads=1, multiple_of=16
    )
    return {"transformer": net, "tokenizer": t5_tokenizer()}


def wan_seeing(cls: Any) -> dict[str, Any]:
    parts = {"image_encoder": clip_vision(transformers.CLIPVisionModel), "image_processor": image_processor()}
    return {"transformer": wan_net(cls, in_channels=36, image_dim=16), "scheduler": flow(), **parts}


SIZE: Final = {"height": 32, "width": 32}
VIDEO: Final = {**SIZE, "num_frames": 9, "max_sequence_length": 16}
SANA: Final = {**SIZE, "use_resolution_binning": False, "complex_human_instruction": []}
T5_SIZE: Final = {**SIZE, "max_sequence_length": 16}
AGAIN: Final = {"strength": 0.9}
IMAGE: Final = ("image",)
PAINT: Final = ("image", "mask_image")
CASES: dict[str, Case] = {
    "AnimateDiffSDXLPipeline": Case(
        lambda: {"unet": unet(**TIMED, sample_size=16, norm_num_groups=2)}, {**SIZE, "num_frames": 4}
    ),
    "CogView4ControlPipeline": Case(
        lambda: {
            "tokenizer": byte_tokenizer(),
            "transformer": small(
                diffusers.CogView4Transformer2DModel,
                in_channels=8,
                out_channels=4,
                patch_size=2,
                condition_dim=4,
                time_embed_dim=8,
                rope_axes_dim=(32, 32),
                attention_head_dim=4,
            ),
            "scheduler": cogview4().scheduler,
        },
        {**T5_SIZE, "negative_prompt": "dull"},
        ("control_image",),
    ),
    "CycleDiffusionPipeline": Case(
        lambda: {"scheduler": diffusers.DDIMScheduler(steps_offset=1, set_alpha_to_one=False)},
        {"source_prompt": "a dog", **AGAIN},
        IMAGE,
    ),
    "Flux2KleinKVPipeline": Case(
        lambda: flux2_klein().components, {"height": 64, "width": 64, "max_sequence_length": 64}, IMAGE
    ),
    "FluxControlImg2ImgPipeline": Case(lambda: flux(32), {**T5_SIZE, **AGAIN}, ("image", "control_image")),
    "FluxControlInpaintPipeline": Case(lambda: flux(32), {**T5_SIZE, **AGAIN}, (*PAINT, "control_image")),
    "FluxControlNetImg2ImgPipeline": Case(
        lambda: flux(controlnet=flux_control_net()), {**T5_SIZE, **AGAIN}, ("image", "control_image")
    ),
    "FluxControlNetInpaintPipeline": Case(
        lambda: flux(controlnet=flux_control_net()), {**T5_SIZE, **AGAIN}, (*PAINT, "control_image")
    ),
    "FluxControlNetPipeline": Case(lambda: flux(controlnet=flux_control_net()), T5_SIZE, ("control_image",)),
    "FluxControlPipeline": Case(lambda: flux(32), T5_SIZE, ("control_image",)),
    "FluxFillPipeline": Case(lambda: flux(48), {**T5_SIZE, **AGAIN}, PAINT),
    "IFImg2ImgPipeline": Case(deep_floyd, AGAIN, IMAGE),
    "IFImg2ImgSuperResolutionPipeline": Case(lambda: deep_floyd(up=True), AGAIN, ("image", "original_image")),
    "IFInpaintingPipeline": Case(deep_floyd, AGAIN, PAINT),
    "IFInpaintingSuperResolutionPipeline": Case(lambda: deep_floyd(up=True), AGAIN, (*PAINT, "original_image")),
    "IFPipeline": Case(deep_floyd, SIZE),
    "IFSuperResolutionPipeline": Case(lambda: deep_floyd(up=True), SIZE, IMAGE),
    "PixArtSigmaPAGPipeline": Case(
        lambda: {**pixart(diffusers.PixArtSigmaPipeline, num_layers=2).components},
        {**T5_SIZE, "use_resolution_binning": False},
    ),
    "QwenImageControlNetInpaintPipeline": Case(
        lambda: {**qwen_image().components, "controlnet": qwen_control_net(extra_condition_channels=4)},
        SIZE,
        ("control_image", "control_mask"),
    ),
    "QwenImageControlNetPipeline": Case(
        lambda: {**qwen_image().components, "controlnet": qwen_control_net()}, SIZE, ("control_image",)
    ),
    "SanaControlNetPipeline": Case(
        lambda: sana(scheduler=diffusers.DPMSolverMultistepScheduler(), controlnet=sana_control_net()),
        SANA,
        ("control_image",),
    ),
    "SanaSprintImg2ImgPipeline": Case(sana_sprint, {**SANA, **AGAIN, "num_inference_steps": 2}, IMAGE),
    "SanaSprintPipeline": Case(sana_sprint, SANA),
    "StableDiffusion3ControlNetInpaintingPipeline": Case(
        lambda: sd3(controlnet=sd3_control_net(extra_conditioning_channels=1)), SIZE, ("control_image", "control_mask")
    ),
    "StableDiffusion3ControlNetPipeline": Case(lambda: sd3(controlnet=sd3_control_net()), SIZE, ("control_image",)),
    "StableDiffusion3PAGImg2ImgPipeline": Case(sd3, {**SIZE, **AGAIN}, IMAGE),
    "StableDiffusion3PAGPipeline": Case(sd3, SIZE),
    "StableDiffusionAdapterPipeline": Case(lambda: {"adapter": adapter(), "unet": early_unet()}, SIZE, IMAGE),
    "StableDiffusionAttendAndExcitePipeline": Case(of_types, {**SIZE, "token_indices": [1, 2], "attn_res": [8, 8]}),
    "StableDiffusionControlNetImg2ImgPipeline": Case(
        lambda: {"controlnet": control_net()}, AGAIN, ("image", "control_image")
    ),
    "StableDiffusionControlNetInpaintPipeline": Case(
        lambda: {"controlnet": control_net()}, {**SIZE, **AGAIN}, (*PAINT, "control_image")
    ),
    "StableDiffusionControlNetPAGInpaintPipeline": Case(
        lambda: {"controlnet": control_net()}, {**SIZE, **AGAIN}, (*PAINT, "control_image")
    ),
    "StableDiffusionControlNetPAGPipeline": Case(lambda: {"controlnet": control_net()}, SIZE, IMAGE),
    "StableDiffusionControlNetPipeline": Case(lambda: {"controlnet": control_net()}, SIZE, IMAGE),
    "StableDiffusionDepth2ImgPipeline": Case(
        lambda: {"unet": unet(in_channels=5, sample_size=16), **depth()}, AGAIN, IMAGE
    ),
    "StableDiffusionGLIGENPipeline": Case(
        lambda: {"unet": unet(attention_type="gated")},
        {**SIZE, "gligen_phrases": ["a hat"], "gligen_boxes": [[0.1, 0.2, 0.5, 0.6]]},
    ),
    "StableDiffusionImageVariationPipeline": Case(lambda: {"feature_extractor": image_processor()}, SIZE, IMAGE),
    "StableDiffusionParadigmsPipeline": Case(lambda: {"scheduler": diffusers.DDIMParallelScheduler()}, SIZE),
    "StableDiffusionUpscalePipeline": Case(lambda: {"unet": unet(in_channels=7, num_class_embeds=1000)}, {}, IMAGE),
    "StableDiffusionXLAdapterPipeline": Case(lambda: sdxl(adapter=adapter(), unet=early_unet(**TIMED)), SIZE, IMAGE),
    "StableDiffusionXLControlNetImg2ImgPipeline": Case(
        lambda: sdxl(controlnet=control_net(**TIMED)), {**SIZE, **AGAIN}, ("image", "control_image")
    ),
    "StableDiffusionXLControlNetInpaintPipeline": Case(
        lambda: sdxl(controlnet=control_net(**TIMED)), {**SIZE, **AGAIN}, (*PAINT, "control_image")
    ),
    "StableDiffusionXLControlNetPAGImg2ImgPipeline": Case(
        lambda: sdxl(controlnet=control_net(**TIMED)), {**SIZE, **AGAIN}, ("image", "control_image")
    ),
    "StableDiffusionXLControlNetPAGPipeline": Case(lambda: sdxl(controlnet=control_net(**TIMED)), SIZE, IMAGE),
    "StableDiffusionXLControlNetPipeline": Case(lambda: sdxl(controlnet=control_net(**TIMED)), SIZE, IMAGE),
    "StableDiffusionXLControlNetUnionImg2ImgPipeline": Case(
        lambda: sdxl(controlnet=control_union()), {**SIZE, **AGAIN, "control_mode": 1}, ("image", "control_image")
    ),
    "StableDiffusionXLControlNetUnionInpaintPipeline": Case(
        lambda: sdxl(controlnet=control_union()), {**SIZE, **AGAIN, "control_mode": 1}, (*PAINT, "control_image")
    ),
    "StableDiffusionXLControlNetUnionPipeline": Case(
        lambda: sdxl(controlnet=control_union()), {**SIZE, "control_mode": 1}, ("control_image",)
    ),
    "StableDiffusionXLInstructPix2PixPipeline": Case(lambda: {"unet": unet(**TIMED, in_channels=8)}, SIZE, IMAGE),
    "TextToVideoZeroPipeline": Case(of_types, {**SIZE, "video_length": 2, "t0": 0, "t1": 1}),
    "TextToVideoZeroSDXLPipeline": Case(sdxl, {**SIZE, "video_length": 2, "t0": 0, "t1": 1}),
    "ZImageControlNetInpaintPipeline": Case(lambda: z_control(33), SIZE, (*PAINT, "control_image")),
    "ZImageControlNetPipeline": Case(lambda: z_control(16), SIZE, ("control_image",)),
    "AmusedImg2ImgPipeline": Case(amused, AGAIN, IMAGE),
    "AmusedInpaintPipeline": Case(amused, AGAIN, PAINT),
    "AmusedPipeline": Case(amused, SIZE),
    "AnyFlowPipeline": Case(lambda: {"transformer": wan_net(diffusers.AnyFlowTransformer3DModel)}, VIDEO),
    "AnyFlowFARPipeline": Case(
        lambda: {
            "transformer": wan_net(diffusers.AnyFlowFARTransformer3DModel, chunk_partition=(1, 2), full_chunk_limit=2)
        },
        VIDEO,
    ),
    "CogVideoXImageToVideoPipeline": Case(
        lambda: changed(cogvideox().components, in_channels=8, sample_height=4, sample_width=4), VIDEO, IMAGE
    ),
    "HunyuanSkyreelsImageToVideoPipeline": Case(
        lambda: hunyuan_video(8), {**SIZE, "num_frames": 5, "max_sequence_length": 16}, IMAGE
    ),
    "HunyuanVideoPipeline": Case(hunyuan_video, {**SIZE, "num_frames": 5, "max_sequence_length": 16}),
    "Kandinsky3Img2ImgPipeline": Case(kandinsky3, AGAIN, IMAGE),
    "Kandinsky3Pipeline": Case(kandinsky3, SIZE),
    "KandinskyV22InpaintCombinedPipeline": Case(
        lambda: changed(kandinsky().components, in_channels=9),
        {**SIZE, "prior_num_inference_steps": 2},
        PAINT,
    ),
    "LDMPipeline": Case(lambda: {"unet": ddpm().unet, "vqvae": movq(3, "group")}, {}),
    "LDMSuperResolutionPipeline": Case(
        lambda: {
            **changed({"unet": ddpm().unet}, in_channels=6),
            "vqvae": movq(3, "group"),
            "scheduler": diffusers.DDIMScheduler(),
        },
        {},
        IMAGE,
    ),
    "LattePipeline": Case(latte, {**SIZE, "video_length": 4}),
    "MochiPipeline": Case(mochi, {**T5_SIZE, "num_frames": 7}),
    "OvisImagePipeline": Case(ovis, {**SIZE, "max_sequence_length": 64}),
    "PIAPipeline": Case(
        lambda: {"unet": unet(norm_num_groups=2, sample_size=16), "motion_adapter": motion_adapter(conv_in_channels=9)},
        {**SIZE, "num_frames": 4},
        IMAGE,
    ),
    "PNDMPipeline": Case(lambda: {"unet": ddpm().unet}, {"num_inference_steps": 10}),
    "RePaintPipeline": Case(lambda: {"unet": ddpm().unet}, {"jump_length": 1, "jump_n_sample": 1}, PAINT),
    "ScoreSdeVePipeline": Case(lambda: {"unet": ddpm().unet}, {}),
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": Case(skyreels, VIDEO, IMAGE),
    "SkyReelsV2DiffusionForcingPipeline": Case(skyreels, VIDEO),
    "SkyReelsV2Pipeline": Case(skyreels, VIDEO),
    "StableUnCLIPImg2ImgPipeline": Case(unclip, SIZE, IMAGE),
    "StableUnCLIPPipeline": Case(unclip, {**SIZE, "prior_num_inference_steps": 2}),
    "StableVideoDiffusionPipeline": Case(svd, {**SIZE, "num_frames": 2}, IMAGE),
    "TextToVideoSDPipeline": Case(
        lambda: {"unet": small(diffusers.UNet3DConditionModel, **BLOCKS_3D)}, {**SIZE, "num_frames": 3}
    ),
    "WanImageToVideoPipeline": Case(lambda: wan_seeing(diffusers.WanTransformer3DModel), VIDEO, IMAGE),
    "WanVACEPipeline": Case(
        lambda: {"transformer": wan_net(diffusers.WanVACETransformer3DModel, vace_layers=[0], vace_in_channels=96)},
        VIDEO,
    ),
    "AudioLDMPipeline": Case(audio_ldm, {"audio_length_in_s": 0.5}),
    "ErnieImagePipeline": Case(ernie, SIZE),
    "HunyuanImagePipeline": Case(hunyuan_image, SIZE),
    "HunyuanVideo15Pipeline": Case(hunyuan_video15, {**SIZE, "num_frames": 5}),
    "SanaImageToVideoPipeline": Case(
        lambda: {**sana_video(), "scheduler": flow()},
        {**SANA, "frames": 5, "max_sequence_length": 16},
        IMAGE,
    ),
    "SanaVideoPipeline": Case(
        lambda: {**sana_video(), "scheduler": diffusers.DPMSolverMultistepScheduler()},
        {**SANA, "frames": 5, "max_sequence_length": 16},
    ),
    "BriaFiboPipeline": Case(fibo, {**SIZE, "max_sequence_length": 16, "negative_prompt": "dull"}),
    "KandinskyCombinedPipeline": Case(kandinsky21, {**SIZE, "prior_num_inference_steps": 2}),
    "KandinskyImg2ImgCombinedPipeline": Case(kandinsky21, {**SIZE, **AGAIN, "prior_num_inference_steps": 2}, IMAGE),
    "KandinskyInpaintCombinedPipeline": Case(lambda: kandinsky21(9), {**SIZE, "prior_num_inference_steps": 2}, PAINT),
    "LuminaPipeline": Case(lumina, {**SIZE, "max_sequence_length": 16}),
    "ChronoEditPipeline": Case(
        lambda: wan_seeing(diffusers.ChronoEditTransformer3DModel),
        {**SIZE, "num_frames": 5, "max_sequence_length": 16},
        IMAGE,
    ),
    "LTXI2VLongMultiPromptPipeline": Case(
        lambda: ltx().components, {**T5_SIZE, "num_frames": 17, "temporal_tile_size": 16, "temporal_overlap": 8}
    ),
    "SkyReelsV2ImageToVideoPipeline": Case(
        lambda: {
            **wan_seeing(diffusers.SkyReelsV2Transformer3DModel),
            "image_encoder": clip_vision(),
            "scheduler": skyreels()["scheduler"],
        },
        VIDEO,
        IMAGE,
    ),
    "StableDiffusionGLIGENTextImagePipeline": Case(
        lambda: {
            "unet": unet(attention_type="gated-text-image", sample_size=16),
            "processor": transformers.CLIPProcessor(image_processor(), clip_tokenizer()),
            "image_encoder": clip_vision(),
            "image_project": CLIPImageProjection(hidden_size=16),
        },
        {**SIZE, "gligen_phrases": ["a hat"], "gligen_boxes": [[0.1, 0.2, 0.5, 0.6]]},
    ),
}
