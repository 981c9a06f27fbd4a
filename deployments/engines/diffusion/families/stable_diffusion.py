"""Stable Diffusion 1 and 2: a UNet that attends to one CLIP's tokens.

Source: diffusers 0.42, `pipelines/stable_diffusion/pipeline_stable_diffusion.py`.

The common parts of families with a UNet come first.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar, Final

from configs.model import LongText
from deployments.engines.diffusion.families.base import (
    Adapters,
    ControlRows,
    Defaults,
    EditDefaults,
    EncodeImages,
    Family,
    ImageDefaults,
    ImageSize,
    Latents,
    Network,
    Rows,
    Steps,
    Texts,
    sum_residuals,
)
from deployments.engines.diffusion.families.control_xs import (
    CONTROL_XS,
    changes_times,
    read_hint,
    running_beside,
    why_unlike_unet,
)
from deployments.engines.diffusion.families.texts import Encoded, EncoderUse, Role, output_of
from deployments.engines.diffusion.families.unet_controls import (
    CONTROL_UNION,
    T2I_ADAPTER,
    adapter_features,
    run_controlnet,
    why_unlike_adapter,
)
from deployments.engines.records.protocol import LAST, DiffusionRequest

if TYPE_CHECKING:
    import torch


_CONTROL_CHANNELS: Final = (16, 32, 96, 256)  # of a ControlNet's own layers, unless its config has them


class UNet(Network):
    """diffusers' UNet2DConditionModel."""

    keeps_precision: ClassVar[Sequence[str]] = ("time_embedding.*", "add_embedding.*", "*time_emb_proj*")
    embedding_parts: ClassVar[Sequence[str]] = ("time_embedding", "add_embedding")
    modulated_layers: ClassVar[str] = "*.time_emb_proj"
    text_layers: ClassVar[str] = "*.attn2.to_[kv]"

    def num_extra_channels(self, config: Mapping[str, Any]) -> int:
        return int(config["in_channels"]) - int(config["out_channels"])

    @abstractmethod
    def added_conditioning(self, pooled: torch.Tensor | None, rows: Rows, size: ImageSize) -> dict[str, Any]:
        """Return the UNet's and its ControlNets' further arguments, beside latents, timesteps and prompts."""

    def refusal(self, denoiser_config: Mapping[str, Any]) -> str | None:
        if denoiser_config.get("time_cond_proj_dim") is None:
            return None
        return "a UNet with embedded guidance (time_cond_proj_dim) is not supported"

    def is_modulated(self, denoiser: Any) -> bool:
        config = denoiser.config
        others = config.time_embedding_act_fn, config.class_embed_type, config.encoder_hid_dim_type
        has_more = any(others) or config.resnet_skip_time_act or config.dual_cross_attention
        return config.act_fn in ("silu", "swish") and not has_more

    def embed_times(self, denoiser: Any, rows: Rows, size: ImageSize) -> Sequence[torch.Tensor]:
        times = denoiser.time_embedding(denoiser.get_time_embed(rows.latents, rows.timesteps))
        added = self.added_conditioning(rows.pooled, rows, size).get("added_cond_kwargs", {})
        other = denoiser.get_aug_embed(times, rows.prompts, added)
        return [times] if other is None else [times, other]

    def changes_times(self, control: Any) -> bool:
        return changes_times(control)

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        beside = [control for control in rows.controls if type(control.net).__name__ == CONTROL_XS]

        def run(control: ControlRows) -> tuple[Sequence[torch.Tensor], ...]:
            if type(control.net).__name__ == CONTROL_XS:
                return [], [], []
            if type(control.net).__name__ == T2I_ADAPTER:
                return [], [], control.inputs
            down, mid = run_controlnet(
                control,
                rows.latents[:, : control.net.config.in_channels],  # without the extra channels of inpainting UNets
                rows.timesteps,
                encoder_hidden_states=control.prompts,
                return_dict=False,
                **self.added_conditioning(control.pooled, rows, size),
            )
            return down, [mid], []

        down, mid, inner = sum_residuals(rows, run) or ([], [], [])
        with running_beside(denoiser, beside):
            noise: torch.Tensor = denoiser(
                rows.latents,
                rows.timesteps,
                encoder_hidden_states=rows.prompts,
                down_block_additional_residuals=down or None,
                mid_block_additional_residual=mid[0] if mid else None,
                down_intrablock_additional_residuals=inner or None,
                return_dict=False,
                **self.added_conditioning(rows.pooled, rows, size),
            )[0]
        return noise


class UNetLatents(Latents):
    """Latents are images: (num_images, C, h, w)."""

    def size_multiple(self, pixels_per_latent: int) -> int:
        return math.lcm(8, pixels_per_latent)  # stock demands 8 for any VAE

    def channels(self, denoiser_config: Mapping[str, Any]) -> int:
        return int(denoiser_config["out_channels"])


class UNetAdapters(Adapters):
    """Images as prompts, and ControlNets and T2I-Adapters that add residuals to the UNet's blocks."""

    takes_image_prompts: ClassVar[bool] = True
    control_keys: ClassVar[Mapping[str, Sequence[str]]] = {
        "ControlNetModel": ("block_out_channels", "cross_attention_dim", "addition_embed_type"),
        CONTROL_UNION: ("block_out_channels", "cross_attention_dim", "addition_embed_type"),
        CONTROL_XS: ("cross_attention_dim",),
        T2I_ADAPTER: (),
    }

    def control_inputs(self, net: Any, pixels_B3HW: torch.Tensor, encode: EncodeImages) -> tuple[torch.Tensor, ...]:
        if type(net).__name__ == T2I_ADAPTER:  # what it says of an image is the same at every step
            return adapter_features(net, pixels_B3HW)
        if type(net).__name__ == CONTROL_XS:
            return (read_hint(net, pixels_B3HW),)
        return (pixels_B3HW,)

    def num_modes(self, net: Any) -> int:
        return int(net.config.get("num_control_type") or 0)

    def why_not_together(self, nets: Sequence[Any]) -> str | None:
        if sum(type(net).__name__ == CONTROL_XS for net in nets) < 2:
            return None
        return "more than one ControlNet-XS; one of them goes with any number of others"

    def control_refusal(
        self, class_name: str, config: Mapping[str, Any], denoiser_config: Mapping[str, Any], pixels_per_latent: int
    ) -> str | None:
        if class_name == T2I_ADAPTER:
            return why_unlike_adapter(config, denoiser_config, pixels_per_latent)
        if class_name == CONTROL_XS and (reason := why_unlike_unet(config, denoiser_config)):
            return reason
        if config.get("global_pool_conditions"):
            return "pools its image (global_pool_conditions), which is not supported"
        channels = config.get("conditioning_embedding_out_channels", _CONTROL_CHANNELS)
        factor = 2 ** (len(channels) - 1) if isinstance(channels, Sequence) else 1
        if factor == pixels_per_latent:
            return None
        return f"reduces its image by {factor}, and the model's latents have a side of 1/{pixels_per_latent}"


class ClipTexts(Texts):
    """The text is CLIP's last layer; a missing negative prompt is the empty text."""

    takes_clip_skip: ClassVar[bool] = True
    refused_rules: ClassVar[Mapping[str, str]] = {
        "trimmed": "text_padding 'trimmed' is for T5: the UNet of StableDiffusionPipeline was trained on CLIP's "
        "padding; use stock",
    }

    def encoders(
        self, max_sequence_length: int | None, long_text: LongText, lacking: Set[str] = frozenset()
    ) -> Sequence[EncoderUse]:
        return (EncoderUse("text_encoder", None, long_text, layer=LAST),)

    def join(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        return {"prompt_embeds": output_of(role, encodings, "text_encoder", "hidden").unsqueeze(0)}


class StableDiffusionSteps(Steps):
    def solver_changes(self, request: DiffusionRequest, solver_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return corrections of configs from 2022. Stock's pipeline for inpainting makes fewer of them, and
        pipelines with a ControlNet make none.
        """
        clips = {"skip_prk_steps": True} if request.mask_image is not None else {"clip_sample": False}
        wanted = {} if request.control else {"steps_offset": 1, **clips}
        return {key: value for key, value in wanted.items() if key in solver_config}


class StableDiffusionAdapters(UNetAdapters):
    lora_encoders: ClassVar[Mapping[str, Sequence[str]]] = {"text_encoder": ("te", "te1", "clip_l", "clip_h")}


class StableDiffusionUNet(UNet):
    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        return denoiser.config.cross_attention_dim, None

    def added_conditioning(self, pooled: torch.Tensor | None, rows: Rows, size: ImageSize) -> dict[str, Any]:
        return {}


# A checkpoint's safety checker is not run: images are not inspected.
STABLE_DIFFUSION: Final = Family(
    class_name="StableDiffusionPipeline",
    other_class_names=("StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
    denoiser_name="unet",
    defaults=Defaults(
        ImageDefaults(num_inference_steps=50, guidance_scale=7.5),
        edits={
            "image-to-image": EditDefaults(strength=0.8, guidance_scale=7.5, num_inference_steps=50),
            "inpainting": EditDefaults(strength=1.0, guidance_scale=7.5, num_inference_steps=50),
        },
        sample_size=64,
        reads_sample_size=True,
    ),
    network=StableDiffusionUNet(),
    texts=ClipTexts(),
    latents=UNetLatents(),
    steps=StableDiffusionSteps(),
    adapters=StableDiffusionAdapters(),
)
