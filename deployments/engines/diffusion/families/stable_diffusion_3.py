"""Stable Diffusion 3: flow matching with a transformer that attends to two CLIPs' and a T5's tokens.

Source: diffusers 0.42, `pipelines/stable_diffusion_3/pipeline_stable_diffusion_3.py`.
"""

from __future__ import annotations

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
    Rows,
    Texts,
    sum_residuals,
)
from deployments.engines.diffusion.families.flow_matching import (
    FlowLatents,
    FlowSteps,
    ModulatedFlow,
    dynamic_shift,
    num_patches,
)
from deployments.engines.diffusion.families.texts import Encoded, EncodeItem, EncoderUse, Role, output_of
from deployments.engines.records.protocol import DiffusionRequest, EngineError

if TYPE_CHECKING:  # the ingress has no torch
    import torch

T5_TOKENS: Final = 256  # the stock pipeline's default
MAX_T5_TOKENS: Final = 512
_CLIPS: Final = ("text_encoder", "text_encoder_2")
_T5: Final = "text_encoder_3"


class ThreeEncoders(Texts):
    """Two CLIPs' tokens come before the T5's; their pooled texts modulate.

    In a folder without its T5, zeros take the place of its tokens.
    """

    refused_rules: ClassVar[Mapping[str, str]] = {
        "trimmed": "text_padding 'trimmed' is for pipelines that read a T5 alone: StableDiffusion3Pipeline was trained "
        "on the padding of its CLIPs; use stock",
        "chunk": "long_text 'chunk' is for StableDiffusionXLPipeline; use truncate or error",
    }

    def encoders(
        self, max_sequence_length: int | None, long_text: LongText, lacking: Set[str] = frozenset()
    ) -> Sequence[EncoderUse]:
        """Return the CLIPs and the T5. CLIPs truncate beside a T5, which reads the whole text."""
        t5_tokens = T5_TOKENS if max_sequence_length is None else max_sequence_length
        if not 1 <= t5_tokens <= MAX_T5_TOKENS:
            raise EngineError(f"max_sequence_length {t5_tokens}: expected 1 to {MAX_T5_TOKENS}")
        of_clips = long_text if _T5 in lacking else "truncate"
        clips = (EncoderUse(name, None, of_clips) for name in _CLIPS)
        return *clips, EncoderUse(_T5, t5_tokens, long_text)

    def stand_in(self, item: EncodeItem, denoiser_config: Mapping[str, Any], like: torch.Tensor) -> Encoded | None:
        """Return zeros in place of the T5's tokens."""
        if item.component != _T5 or item.max_length is None:
            return None
        return {"hidden": like.new_zeros(item.max_length, int(denoiser_config["joint_attention_dim"]))}

    def join(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        import torch

        t5 = output_of(role, encodings, _T5, "hidden")
        clips = [output_of(role, encodings, name, "penultimate").to(t5) for name in _CLIPS]
        pooled = [output_of(role, encodings, name, "pooled").to(t5) for name in _CLIPS]
        if len({len(clip) for clip in clips}) > 1 or sum(clip.shape[1] for clip in clips) > t5.shape[1]:
            shapes = ", ".join(str(tuple(encoding.shape)) for encoding in (*clips, t5))
            raise EngineError(
                f"the {role}'s encodings are {shapes}: expected CLIPs of one length, together no wider than T5"
            )
        tokens = torch.cat(clips, dim=-1)
        tokens = torch.nn.functional.pad(tokens, (0, t5.shape[1] - tokens.shape[1]))
        prompt = torch.cat([tokens, t5])
        return {"prompt_embeds": prompt.unsqueeze(0), "pooled_prompt_embeds": torch.cat(pooled).unsqueeze(0)}


class MaybeShiftedSteps(FlowSteps):
    """A schedule shifted by the size if the solver's config says so."""

    def schedule(self, request: DiffusionRequest, solver_config: Mapping[str, Any], size: ImageSize) -> dict[str, Any]:
        schedule = super().schedule(request, solver_config, size)
        if not solver_config.get("use_dynamic_shifting"):
            return schedule
        return schedule | {"mu": dynamic_shift(num_patches(size), solver_config, max_shift=1.16)}


class StableDiffusion3Adapters(Adapters):
    takes_image_prompts: ClassVar[bool] = True
    lora_encoders: ClassVar[Mapping[str, Sequence[str]]] = {
        "text_encoder": ("te1", "clip_l"),
        "text_encoder_2": ("te2", "clip_g"),
        "text_encoder_3": ("te3", "t5xxl"),
    }
    control_keys: ClassVar[Mapping[str, Sequence[str]]] = {
        "SD3ControlNetModel": (
            *("in_channels", "patch_size", "num_attention_heads", "attention_head_dim", "pooled_projection_dim"),
        )
    }
    encodes_controls: ClassVar[bool] = True
    draws_controls_apart: ClassVar[bool] = True

    def control_inputs(self, net: Any, pixels_B3HW: torch.Tensor, encode: EncodeImages) -> tuple[torch.Tensor, ...]:
        return (encode(pixels_B3HW * 2 - 1, shifts=not net.config.force_zeros_for_pooled_projection),)

    def control_refusal(
        self, class_name: str, config: Mapping[str, Any], denoiser_config: Mapping[str, Any], pixels_per_latent: int
    ) -> str | None:
        if more := config.get("extra_conditioning_channels"):
            return f"reads {more} channels beside its image's (extra_conditioning_channels), which is not supported"
        width, own = denoiser_config.get("joint_attention_dim"), config.get("joint_attention_dim")
        if own is None or width is None or own == width:
            return None
        return f"reads text of {own} numbers, and the model {width}"


class StableDiffusion3Network(ModulatedFlow):
    """Latents are images: (num_images, C, h, w)."""

    keeps_precision: ClassVar[Sequence[str]] = ("*norm*", "*embed*", "proj_out.weight")

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        return denoiser.config.joint_attention_dim, denoiser.config.pooled_projection_dim

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        def run(control: ControlRows) -> Sequence[Sequence[torch.Tensor]]:
            net, pooled = control.net, control.pooled
            assert pooled is not None  # every text of the family has one
            residuals: Sequence[Sequence[torch.Tensor]] = net(
                hidden_states=rows.latents if net.pos_embed is not None else denoiser.pos_embed(rows.latents),
                controlnet_cond=control.images,
                timestep=rows.timesteps,
                encoder_hidden_states=None if net.config.joint_attention_dim is None else control.prompts,
                pooled_projections=pooled * 0 if net.config.force_zeros_for_pooled_projection else pooled,
                return_dict=False,
            )
            return residuals

        (blocks,) = sum_residuals(rows, run) or (None,)
        noise: torch.Tensor = denoiser(
            hidden_states=rows.latents,
            timestep=rows.timesteps,
            encoder_hidden_states=rows.prompts,
            pooled_projections=rows.pooled,
            block_controlnet_hidden_states=blocks,
            return_dict=False,
        )[0]
        return noise


# Stock's inpainting pipeline forgets the VAE's shift when it decodes; here it is not forgotten.
STABLE_DIFFUSION_3: Final = Family(
    class_name="StableDiffusion3Pipeline",
    other_class_names=("StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"),
    denoiser_name="transformer",
    defaults=Defaults(
        ImageDefaults(num_inference_steps=28, guidance_scale=7.0),
        edits={
            "image-to-image": EditDefaults(strength=0.6, guidance_scale=7.0, num_inference_steps=50),
            "inpainting": EditDefaults(strength=0.6, guidance_scale=7.0, num_inference_steps=50),
        },
        reads_sample_size=True,
    ),
    network=StableDiffusion3Network(),
    texts=ThreeEncoders(),
    latents=FlowLatents(),
    steps=MaybeShiftedSteps(),
    adapters=StableDiffusion3Adapters(),
)
