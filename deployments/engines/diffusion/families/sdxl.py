"""Stable Diffusion XL: a UNet with size conditioning.

Source: diffusers 0.42, `pipelines/stable_diffusion_xl/pipeline_stable_diffusion_xl.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from configs.model import LongText
from deployments.engines.diffusion.families.base import (
    Defaults,
    EditDefaults,
    Family,
    ImageDefaults,
    ImageSize,
    NoNegative,
    Rows,
    Steps,
    Texts,
)
from deployments.engines.diffusion.families.stable_diffusion import UNet, UNetAdapters, UNetLatents
from deployments.engines.diffusion.families.texts import Encoded, EncodeItem, EncoderUse, Role, output_of
from deployments.engines.records.protocol import EngineError

if TYPE_CHECKING:  # the ingress has no torch
    import torch

_CLASS: Final = "StableDiffusionXLPipeline"
NUM_TIME_IDS: Final = 6  # original height and width, crop top and left, target height and width
AESTHETIC_SCORE: Final = 6.0  # the stock pipeline's defaults
NEGATIVE_AESTHETIC_SCORE: Final = 2.5


class TwoClips(Texts):
    """Two CLIPs read the text; long texts may come in chunks of 77 tokens."""

    takes_clip_skip: ClassVar[bool] = True
    refused_rules: ClassVar[Mapping[str, str]] = {
        "trimmed": "text_padding 'trimmed' is for T5: the UNet of StableDiffusionXLPipeline was trained on CLIP's "
        "padding; use stock"
    }

    def encoders(
        self, max_sequence_length: int | None, long_text: LongText, lacking: Set[str] = frozenset()
    ) -> Sequence[EncoderUse]:
        """Return both, or the second alone if the pipeline has no first one, as stock does."""
        names = ("text_encoder_2",) if "text_encoder" in lacking else ("text_encoder", "text_encoder_2")
        return [EncoderUse(name, None, long_text) for name in names]

    def join(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        import torch

        second = output_of(role, encodings, "text_encoder_2", "penultimate")
        pooled = output_of(role, encodings, "text_encoder_2", "pooled")
        if "text_encoder" not in encodings:
            return {"prompt_embeds": second.unsqueeze(0), "pooled_prompt_embeds": pooled.unsqueeze(0)}
        first = output_of(role, encodings, "text_encoder", "penultimate")
        if len(first) != len(second):
            raise EngineError(
                f"text_encoder gave {len(first)} tokens and text_encoder_2 {len(second)}: "
                f"{_CLASS} needs tokenizers of one length"
            )
        prompt = torch.cat([first, second.to(first.device)], dim=-1).to(second.dtype)
        return {"prompt_embeds": prompt.unsqueeze(0), "pooled_prompt_embeds": pooled.unsqueeze(0)}

    def no_negative(self, model_index: Mapping[str, Any]) -> NoNegative:
        return "zeros" if model_index.get("force_zeros_for_empty_prompt", True) else "empty text"


class NormalizedLatents(UNetLatents):
    """Latents of a VAE whose config may have their mean and standard deviation."""

    upcasts_vae: ClassVar[bool] = True

    def scale(self, vae_latents: torch.Tensor, vae: Any) -> torch.Tensor:
        mean_C11, std_C11 = _latent_statistics(vae_latents, vae.config)
        return (vae_latents - mean_C11) * vae.config["scaling_factor"] / std_C11

    def unscale(self, latents_BCHW: torch.Tensor, vae: Any) -> torch.Tensor:
        mean_C11, std_C11 = _latent_statistics(latents_BCHW, vae.config)
        return latents_BCHW * std_C11 / vae.config["scaling_factor"] + mean_C11


class TwoClipAdapters(UNetAdapters):
    lora_encoders: ClassVar[Mapping[str, Sequence[str]]] = {
        "text_encoder": ("te", "te1", "clip_l"),
        "text_encoder_2": ("te2", "clip_g"),
    }


class SizedUNet(UNet):
    """A UNet with sizes as inputs: original and target size are the request's, crops are 0."""

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        config = denoiser.config
        pooled = denoiser.add_embedding.linear_1.in_features - NUM_TIME_IDS * config.addition_time_embed_dim
        return config.cross_attention_dim, pooled

    def added_conditioning(self, pooled: torch.Tensor | None, rows: Rows, size: ImageSize) -> dict[str, Any]:
        import torch

        latents = rows.latents
        own = _size_ids(latents, size)
        size_ids = torch.cat([*own, latents.new_zeros(2), *own])
        return {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": size_ids.expand(len(latents), -1)}}


class ScoredTexts(TwoClips):
    """Texts whose aesthetic score is the last element of the pooled text, and so row by row."""

    def assemble(
        self, model_index: Mapping[str, Any], outputs: Mapping[EncodeItem, Encoded], *, use_negative: bool = True
    ) -> dict[str, torch.Tensor]:
        import torch

        conditioning = super().assemble(model_index, outputs, use_negative=use_negative)
        for prefix, score in (("", AESTHETIC_SCORE), ("negative_", NEGATIVE_AESTHETIC_SCORE)):
            if (pooled := conditioning.get(f"{prefix}pooled_prompt_embeds")) is not None:
                conditioning[f"{prefix}pooled_prompt_embeds"] = torch.nn.functional.pad(pooled, (0, 1), value=score)
        return conditioning

    def zeroed(self, conditioning: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: one[..., -1:] for name, one in conditioning.items() if name.endswith("pooled_prompt_embeds")}
        zeros = super().zeroed(conditioning)
        for name, scores in kept.items():
            zeros[name][..., -1:] = scores
        return zeros


class ScoredUNet(UNet):
    """A UNet with an aesthetic score as input, in place of the target size."""

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        config = denoiser.config
        pooled = denoiser.add_embedding.linear_1.in_features - (NUM_TIME_IDS - 1) * config.addition_time_embed_dim
        return config.cross_attention_dim, pooled + 1

    def added_conditioning(self, pooled: torch.Tensor | None, rows: Rows, size: ImageSize) -> dict[str, Any]:
        import torch

        assert pooled is not None  # `text_widths` asks for it
        sizes = torch.cat([*_size_ids(rows.latents, size), rows.latents.new_zeros(2)])
        scores = pooled[:, -1:].to(sizes.dtype)
        ids = torch.cat([sizes.expand(len(pooled), -1), scores], dim=1)
        return {"added_cond_kwargs": {"text_embeds": pooled[:, :-1], "time_ids": ids}}


class RefinerSteps(Steps):
    refines_only: ClassVar[bool] = True


class StableDiffusionXL(Family):
    """StableDiffusionXLPipeline, or its refiner, which `requires_aesthetics_score`. No watermark is added."""

    def variant(self, model_index: Mapping[str, Any]) -> Family:
        if not model_index.get("requires_aesthetics_score"):
            return self
        return replace(self, network=ScoredUNet(), texts=ScoredTexts(), steps=RefinerSteps())


STABLE_DIFFUSION_XL: Final = StableDiffusionXL(
    class_name=_CLASS,
    other_class_names=("StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"),
    denoiser_name="unet",
    defaults=Defaults(
        ImageDefaults(num_inference_steps=50, guidance_scale=5.0),
        edits={
            "image-to-image": EditDefaults(strength=0.3, guidance_scale=5.0, num_inference_steps=50),
            "inpainting": EditDefaults(strength=0.9999, guidance_scale=7.5, num_inference_steps=50),
        },
        reads_sample_size=True,
    ),
    network=SizedUNet(),
    texts=TwoClips(),
    latents=NormalizedLatents(),
    adapters=TwoClipAdapters(),
)


def _size_ids(like: torch.Tensor, size: ImageSize) -> tuple[torch.Tensor, torch.Tensor]:
    """Return height and width, (1,) each, made on the device: a copy from the host would wait."""
    return like.new_full((1,), size.height), like.new_full((1,), size.width)


def _latent_statistics(like: torch.Tensor, vae_config: Mapping[str, Any]) -> tuple[torch.Tensor | float, ...]:
    """Return mean and standard deviation of the VAE's latents, (C, 1, 1) each, if its config has them; else 0 and 1."""
    import torch

    mean, std = vae_config.get("latents_mean"), vae_config.get("latents_std")
    if mean is None or std is None:
        return 0.0, 1.0
    return tuple(torch.tensor(values).view(-1, 1, 1).to(like) for values in (mean, std))
