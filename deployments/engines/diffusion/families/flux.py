"""Flux: flow matching with a transformer over 2x2 patches of latents.

Source: diffusers 0.42, `pipelines/flux/pipeline_flux.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
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
    NoNegative,
    Rows,
    Texts,
    sum_residuals,
)
from deployments.engines.diffusion.families.flow_matching import (
    PATCH,
    ModulatedFlow,
    PackedLatents,
    ShiftedSteps,
    TrueGuidance,
    num_patches,
)
from deployments.engines.diffusion.families.texts import Encoded, EncoderUse, Role, output_of
from deployments.engines.records.protocol import EngineError

if TYPE_CHECKING:  # the ingress has no torch
    import torch

MAX_T5_TOKENS: Final = 512  # the stock pipeline's default and upper bound
# FLUX.1-schnell, by its model card: distilled to few steps, without guidance, its schedule not shifted by the size.
SCHNELL: Final = ImageDefaults(num_inference_steps=4, guidance_scale=0.0, max_sequence_length=256)


class FluxDefaults(Defaults):
    """Defaults that differ for a checkpoint distilled to few steps."""

    def of(self, variant: Mapping[str, bool | int]) -> ImageDefaults:
        is_timestep_distilled = variant.get("guidance_embeds") is variant.get("use_dynamic_shifting") is False
        return SCHNELL if is_timestep_distilled else self.usual


class FluxTexts(Texts):
    """CLIP's pooled text modulates, T5's tokens are attended to."""

    masks: ClassVar[bool] = True
    refused_rules: ClassVar[Mapping[str, str]] = {
        "chunk": f"long_text 'chunk' is for CLIP, and FluxPipeline reads prompts with T5, which takes up to "
        f"{MAX_T5_TOKENS} tokens in one piece; use truncate or error"
    }

    def encoders(
        self, max_sequence_length: int | None, long_text: LongText, lacking: Set[str] = frozenset()
    ) -> Sequence[EncoderUse]:
        """Return CLIP and T5. CLIP always truncates: its one vector only tints the T5's text, whatever the padding."""
        t5_tokens = MAX_T5_TOKENS if max_sequence_length is None else max_sequence_length
        if not 1 <= t5_tokens <= MAX_T5_TOKENS:
            raise EngineError(f"max_sequence_length {t5_tokens}: expected 1 to {MAX_T5_TOKENS}")
        return EncoderUse("text_encoder"), EncoderUse("text_encoder_2", t5_tokens, long_text)

    def join(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        hidden = output_of(role, encodings, "text_encoder_2", "hidden")
        pooled = output_of(role, encodings, "text_encoder", "pooled")
        return {"prompt_embeds": hidden.unsqueeze(0), "pooled_prompt_embeds": pooled.unsqueeze(0)}

    def no_negative(self, model_index: Mapping[str, Any]) -> NoNegative:
        return "unguided"


class FluxSteps(ShiftedSteps):
    inpaints_from_noise: ClassVar[bool] = False


class FluxLatents(PackedLatents):
    def batch_shape(self, size: ImageSize) -> Hashable:
        """Return the number of patches: attention sees them as one sequence, each with its own position."""
        return num_patches(size)


class FluxAdapters(Adapters):
    takes_image_prompts: ClassVar[bool] = True
    lora_encoders: ClassVar[Mapping[str, Sequence[str]]] = {
        "text_encoder": ("te1", "clip_l"),
        "text_encoder_2": ("te2", "te3", "t5xxl"),  # trainers differ in the choice of the two
    }
    control_keys: ClassVar[Mapping[str, Sequence[str]]] = {
        "FluxControlNetModel": (
            *("in_channels", "num_attention_heads", "attention_head_dim"),
            *("joint_attention_dim", "pooled_projection_dim"),
        )
    }
    controls_read_prompt: ClassVar[bool] = True
    encodes_controls: ClassVar[bool] = True

    def __init__(self, latents: Latents) -> None:
        self._latents = latents

    def control_inputs(self, net: Any, pixels_B3HW: torch.Tensor, encode: EncodeImages) -> tuple[torch.Tensor, ...]:
        images = pixels_B3HW * 2 - 1
        return (images if _reads_pixels(net) else self._latents.pack(encode(images)),)

    def num_modes(self, net: Any) -> int:
        return int(net.config.get("num_mode") or 0)


class FluxNetwork(ModulatedFlow):
    """`guidance_scale` is embedded if the transformer has an embedding for it, else it does nothing."""

    keeps_precision: ClassVar[Sequence[str]] = ("*norm*", "*embed*", "proj_out.weight")

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        return denoiser.config.joint_attention_dim, denoiser.config.pooled_projection_dim

    def embed_times(self, denoiser: Any, rows: Rows, size: ImageSize) -> Sequence[torch.Tensor]:
        dtype = rows.latents.dtype
        times = rows.timesteps.to(dtype) / 1000 * 1000  # divided by us and multiplied by the transformer
        guidance = [rows.guidance.to(dtype) * 1000] if denoiser.config.guidance_embeds else []
        return [denoiser.time_text_embed(times, *guidance, rows.pooled)]

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        import torch

        from deployments.engines.nn.forwards import replaced_forwards

        latents = rows.latents
        timesteps = rows.timesteps.to(latents.dtype) / 1000
        sizes = rows.sizes or (size,)
        patch_ids = _patch_ids(sizes[0], latents.device).to(latents.dtype)

        def run(control: ControlRows) -> Sequence[Sequence[torch.Tensor] | None]:
            residuals: Sequence[Sequence[torch.Tensor] | None] = control.net(
                hidden_states=latents,
                controlnet_cond=control.images,
                controlnet_mode=None if control.modes is None else control.modes[:, None],
                timestep=timesteps,
                guidance=rows.guidance if control.net.config.guidance_embeds else None,
                pooled_projections=control.pooled,
                encoder_hidden_states=control.prompts,
                txt_ids=latents.new_zeros(control.prompts.shape[1], 3),
                img_ids=patch_ids,
                return_dict=False,
            )
            return residuals

        blocks, single_blocks = sum_residuals(rows, run) or (None, None)
        attention = {}
        if rows.mask is not None:  # of keys: text, then patches, all of them real
            patches = rows.mask.new_ones(latents.shape[:2])
            attention["attention_mask"] = torch.cat([rows.mask, patches], dim=1)[:, None, None, :]
        positions = denoiser.pos_embed
        own = {positions: _angles_by_row(positions, sizes)} if len(set(sizes)) > 1 else {}
        with replaced_forwards(own):
            noise: torch.Tensor = denoiser(
                hidden_states=latents,
                timestep=timesteps,
                guidance=rows.guidance if denoiser.config.guidance_embeds else None,
                pooled_projections=rows.pooled,
                encoder_hidden_states=rows.prompts,
                txt_ids=latents.new_zeros(rows.prompts.shape[1], 3),
                img_ids=patch_ids,
                controlnet_block_samples=blocks or None,
                controlnet_single_block_samples=single_blocks or None,
                controlnet_blocks_repeat=any(_reads_pixels(control.net) for control in rows.controls[:1]),
                joint_attention_kwargs=attention or None,
                return_dict=False,
            )[0]
        return noise


def _reads_pixels(net: Any) -> bool:
    """Return whether a ControlNet is of XLabs' kind, which reads the image itself; InstantX's reads latents."""
    return net.input_hint_block is not None


class _AnglesByRow:
    """Rotary angles (B, S, D), for stock's attention, which indexes (S, D) to broadcast them over rows and heads."""

    def __init__(self, angles_BSD: torch.Tensor) -> None:
        self._angles_BSD = angles_BSD

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._angles_BSD[:, :, None, :]


def _angles_by_row(positions: Any, sizes: Sequence[ImageSize]) -> Callable[[torch.Tensor], Any]:
    """Return a forward of the denoiser's `positions` for rows with equal numbers of patches in several shapes."""

    def forward(ids: torch.Tensor) -> tuple[_AnglesByRow, ...]:
        import torch

        text_ids = ids[: len(ids) - num_patches(sizes[0])]
        found = {
            size: type(positions).forward(positions, torch.cat([text_ids, _patch_ids(size, ids.device).to(ids)]))
            for size in dict.fromkeys(sizes)
        }
        return tuple(_AnglesByRow(torch.stack([found[size][part] for size in sizes])) for part in range(2))

    return forward


def _patch_ids(size: ImageSize, device: torch.device) -> torch.Tensor:
    """Return the positions (h * w, 3) of the patches: (0, row, column). Made on the device: a copy would wait."""
    import torch

    rows, columns = size.latent_height // PATCH, size.latent_width // PATCH
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)[None, :]
    return ids.view(-1, 3)


_LATENTS: Final = FluxLatents()
FLUX: Final = Family(
    class_name="FluxPipeline",
    other_class_names=("FluxImg2ImgPipeline", "FluxInpaintPipeline"),
    denoiser_name="transformer",
    defaults=FluxDefaults(
        ImageDefaults(num_inference_steps=28, guidance_scale=3.5),
        edits={
            "image-to-image": EditDefaults(strength=0.6, guidance_scale=7.0, num_inference_steps=28),
            "inpainting": EditDefaults(strength=0.6, guidance_scale=7.0, num_inference_steps=28),
        },
    ),
    network=FluxNetwork(),
    texts=FluxTexts(),
    latents=_LATENTS,
    guidance=TrueGuidance(),
    steps=FluxSteps(),
    adapters=FluxAdapters(_LATENTS),
)
