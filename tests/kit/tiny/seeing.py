"""Tiny random pipelines of classes whose text encoders are models that see: Qwen-VL, with its processor."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import diffusers
import pytest
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from kit.tiny.classes import AGAIN, CHAT, IMAGE, PAINT, SIZE, Case, changed, small, stirred
from kit.tiny.parts import byte_tokenizer, clip, vae
from kit.tiny.pipelines import flux2_klein, qwen_image

from deployments.engines.diffusion import families

_TOKENS: Final = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_ROLES: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)
PATCH: Final = 14
_SMALL_AREA: Final = 128 * 128


def seeing_tokenizer(**settings: Any) -> Any:
    tokenizer = byte_tokenizer(transformers.Qwen2TokenizerFast, **{"chat_template": CHAT} | settings)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS)})
    return tokenizer


def processor(name: str = "Qwen2VLProcessor", patch: int = PATCH, template: str = CHAT) -> Any:
    """A processor of images and texts. The one for videos needs torchvision."""
    cls: Any = getattr(transformers, name)
    sizes = {"min_pixels": (2 * patch) ** 2, "max_pixels": (4 * patch) ** 2}
    images = transformers.Qwen2VLImageProcessorPil(patch_size=patch, **sizes)
    own = {"check_argument_for_proper_class": lambda *_: None, "save_pretrained": _save, "__module__": cls.__module__}
    return type(name, (cls,), own)(
        image_processor=images, tokenizer=seeing_tokenizer(chat_template=template), chat_template=template
    )


def _save(processor: Any, folder: Any, **_: Any) -> None:
    """Save the parts that are there, as published folders have them."""
    processor.image_processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)


def seeing(cls: Any = transformers.Qwen2_5_VLForConditionalGeneration) -> Any:
    """Qwen 2.5 VL, with the tokens of images of the tokenizer above."""
    config = qwen_image().components["text_encoder"].config
    tokenizer = seeing_tokenizer()
    for name, token in (("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>")):
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    for name, token in (("vision_start_token_id", "<|vision_start|>"), ("vision_end_token_id", "<|vision_end|>")):
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    return cls(config)


def kandinsky5() -> dict[str, Any]:
    net = small(
        diffusers.Kandinsky5Transformer3DModel,
        in_text_dim=16,
        in_text_dim2=16,
        time_dim=16,
        model_dim=24,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 4, 4),
    )
    return {
        "transformer": net,
        "vae": small(diffusers.AutoencoderKLHunyuanVideo, latent_channels=4, block_out_channels=(8, 8, 8, 8)),
        "text_encoder": seeing(),
        "tokenizer": processor(),
        "text_encoder_2": clip(positions=77),
    }


def qwen_edit(**own: Any) -> dict[str, Any]:
    """Its VAE makes images small: these pipelines let a million pixels be seen, whatever they are given."""
    decoder = diffusers.AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1] * 6,
        num_res_blocks=1,
        temperal_downsample=[False] * 5,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return {
        **qwen_image().components,
        "vae": decoder,
        "text_encoder": seeing(),
        "tokenizer": seeing_tokenizer(),
        "processor": processor(),
        **own,
    }


def edit_small_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both stock and the family scale images to 128x128 pixels, and not to a million."""
    monkeypatch.setattr(families.qwen_image, "_AREA", _SMALL_AREA)
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        calculate: Any = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", partial(_calculated, calculate))


def _calculated(calculate: Any, area: int, ratio: float) -> Any:
    return calculate(_SMALL_AREA if area == 1024 * 1024 else area, ratio)


def longcat() -> dict[str, Any]:
    net = small(diffusers.LongCatImageTransformer2DModel, in_channels=64, pooled_projection_dim=16)
    return {
        "transformer": net,
        "vae": vae(16, levels=6, shift_factor=0.1),
        "text_encoder": seeing(),
        "tokenizer": seeing_tokenizer(),
        "text_processor": processor(),
    }


def qwen3_vl(cls: Any = transformers.Qwen3VLForConditionalGeneration, layers: int = 9) -> Any:
    """Qwen 3 VL with layers enough for pipelines that take the eighth from the end."""
    ids = seeing_tokenizer().convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {
        "vocab_size": 512,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": 0,
        "rope_parameters": rope,
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": 16,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return cls(config)


def nucleus() -> dict[str, Any]:
    net = small(
        diffusers.NucleusMoEImageTransformer2DModel,
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_key_value_heads=1,
        axes_dims_rope=(8, 4, 4),
        num_experts=4,
        moe_intermediate_dim=16,
        capacity_factors=2.0,
    )
    return {
        **qwen_image().components,
        "transformer": net,
        "text_encoder": qwen3_vl(),
        "processor": processor("Qwen3VLProcessor"),
    }


def krea() -> dict[str, Any]:
    net = small(
        diffusers.Krea2Transformer2DModel,
        in_channels=16,
        num_key_value_heads=1,
        intermediate_size=16,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(2, 2, 4),
    )
    return {
        **qwen_image().components,
        "transformer": net,
        "text_encoder": qwen3_vl(transformers.Qwen3VLModel),
        "tokenizer": seeing_tokenizer(),
        "text_encoder_select_layers": (2, 5),
    }


def joy(cls: Any) -> dict[str, Any]:
    net = small(cls, in_channels=16, hidden_size=24, rope_dim_list=[4, 4, 4], mlp_width_ratio=2.0)
    return {"transformer": net, **qwen3_reader()}


def qwen3_reader() -> dict[str, Any]:
    parts = {"text_encoder": qwen3_vl(), "processor": processor("Qwen3VLProcessor")}
    return {**parts, "tokenizer": seeing_tokenizer()}


def dreamlite() -> dict[str, Any]:
    net = diffusers.DreamLiteUNetModel(
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        attention_head_dim=4,
        norm_num_groups=4,
        cross_attention_dim=16,
    )
    blocks = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    decoder = diffusers.AutoencoderTiny(**blocks, num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))
    return {"unet": stirred(net), "vae": decoder, **qwen3_reader()}


def ideogram() -> dict[str, Any]:
    """Two denoisers, with and without a text, of which it takes thirteen layers."""

    def net() -> Any:
        return small(
            diffusers.Ideogram4Transformer2DModel,
            in_channels=16,
            attention_head_dim=16,
            intermediate_size=16,
            adaln_dim=16,
            llm_features_dim=13 * 16,
            mrope_section=(4, 2, 2),
        )

    return {
        "transformer": net(),
        "unconditional_transformer": net(),
        "vae": flux2_klein().components["vae"],
        "text_encoder": qwen3_vl(transformers.Qwen3VLModel, layers=36),
        "tokenizer": seeing_tokenizer(),
    }


def qwen_image_21() -> dict[str, Any]:
    """It drops the tokens before the prompt, which it counts by the template of the chat."""
    net = small(
        diffusers.QwenImage21Transformer2DModel,
        in_channels=4,
        out_channels=4,
        context_in_dim=16,
        axes_dims_rope=(2, 2, 4),
    )
    decoder = diffusers.AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1] * 5,
        num_res_blocks=1,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return {
        "transformer": net,
        "vae": decoder,
        "text_encoder": qwen3_vl(),
        "processor": processor("Qwen3VLProcessor", template=_ROLES),
    }


EDIT: Final = {"height": 64, "width": 64}
K5_VIDEO: Final = {**SIZE, "num_frames": 5, "max_sequence_length": 16}
SEEING_CASES: dict[str, Case] = {
    "DreamLiteMobilePipeline": Case(dreamlite, SIZE),
    "DreamLitePipeline": Case(dreamlite, SIZE),
    "Ideogram4Pipeline": Case(ideogram, {**SIZE, "max_sequence_length": 64, "guidance_schedule": [7.0, 3.0]}),
    "JoyImageEditPipeline": Case(lambda: joy(diffusers.JoyImageEditTransformer3DModel), SIZE, IMAGE),
    "JoyImageEditPlusPipeline": Case(lambda: joy(diffusers.JoyImageEditPlusTransformer3DModel), SIZE, ("images:2",)),
    "Kandinsky5T2VPipeline": Case(kandinsky5, K5_VIDEO),
    "Kandinsky5I2VPipeline": Case(
        lambda: changed(kandinsky5(), visual_cond=True), {**K5_VIDEO, "num_frames": 17}, IMAGE
    ),
    "Krea2Pipeline": Case(krea, SIZE),
    "LongCatImageEditPipeline": Case(longcat, {}, IMAGE),
    "LongCatImagePipeline": Case(longcat, {**EDIT, "enable_prompt_rewrite": False, "guidance_scale": 2.0}),
    "NucleusMoEImagePipeline": Case(nucleus, SIZE),
    "QwenImage21Pipeline": Case(qwen_image_21, SIZE),
    "QwenImageEditInpaintPipeline": Case(qwen_edit, {**EDIT, **AGAIN}, PAINT),
    "QwenImageEditPipeline": Case(qwen_edit, EDIT, IMAGE),
    "QwenImageEditPlusPipeline": Case(qwen_edit, EDIT, ("image:2",)),
    "QwenImageLayeredPipeline": Case(qwen_edit, {"layers": 2, "resolution": 640}, IMAGE),
}
