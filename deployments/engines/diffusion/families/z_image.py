"""Z-Image and Z-Image-Turbo: one stream of image patches and of a language model's reading of the prompt.

Source: diffusers 0.42, `pipelines/z_image/pipeline_z_image.py` and `pipeline_z_image_controlnet.py`,
`models/transformers/transformer_z_image.py` and `models/controlnets/controlnet_z_image.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from deployments.engines.diffusion.families.base import (
    Adapters,
    Defaults,
    EditDefaults,
    EncodeImages,
    Family,
    Guidance,
    ImageDefaults,
    ImageSize,
    Network,
    Rows,
)
from deployments.engines.diffusion.families.flow_matching import FlowLatents, ReadTexts, ShiftedSteps
from deployments.engines.records.protocol import DiffusionRequest, PromptForm

if TYPE_CHECKING:  # the ingress has no torch
    import torch

_LENT: Final = (  # to a ControlNet, whose class has places for them
    *("t_scale", "t_embedder", "all_x_embedder", "cap_embedder", "rope_embedder", "noise_refiner", "context_refiner"),
    *("x_pad_token", "cap_pad_token"),
)
SIDE: Final = 1024  # pixels, whatever the configs say
TEXT_MULTIPLE: Final = 32  # the transformer pads texts to it with a learned vector that it attends to


class ZDefaults(Defaults):
    def sides(self, variant: Mapping[str, bool | int]) -> tuple[int, int]:
        return SIDE, SIDE


class ZTexts(ReadTexts):
    """The prompt is a chat's first message, its encoding the language model's last layer but one. The transformer pads
    texts itself.
    """

    masks: ClassVar[bool] = True
    counts_tokens: ClassVar[bool] = True

    def padded_length(self, num_tokens: int) -> int:
        """Return the length to which the transformer pads a text: texts of one length share forwards without a mask."""
        return -(-num_tokens // TEXT_MULTIPLE) * TEXT_MULTIPLE


class AddedGuidance(Guidance):
    """Guidance is added to the prompt's prediction, so that a scale of 0 is none, as for Z-Image-Turbo with its 9
    steps.
    """

    rule: ClassVar[str] = "guidance_scale > 0"

    def uses_negative(self, request: DiffusionRequest, has_negative: bool) -> bool:
        return request.guidance_scale > 0

    def combine(self, negative: torch.Tensor, prompt: torch.Tensor, scale: float) -> torch.Tensor:
        return prompt + scale * (prompt - negative)


class ZLatents(FlowLatents):
    """Latents are images: (num_images, C, h, w), in float32."""

    are_float32: ClassVar[bool] = True


class ZAdapters(Adapters):
    """ControlNets that read the most likely latents of an image, and the transformer's own reading of latents and text:
    they run its first layers.
    """

    control_keys: ClassVar[Mapping[str, Sequence[str]]] = {
        "ZImageControlNetModel": (
            *("dim", "n_heads", "n_kv_heads", "n_refiner_layers", "all_patch_size", "all_f_patch_size", "qk_norm"),
        )
    }
    encodes_controls: ClassVar[bool] = True

    def control_inputs(self, net: Any, pixels_B3HW: torch.Tensor, encode: EncodeImages) -> tuple[torch.Tensor, ...]:
        """Return the latents; a net that also reads what is painted over gets zeros for that."""
        import torch

        latents = encode(pixels_B3HW * 2 - 1, draws=False)
        lacking = net.config.control_in_dim - latents.shape[1]
        return (torch.nn.functional.pad(latents, (0, 0, 0, 0, 0, lacking)),)

    def control_refusal(
        self, class_name: str, config: Mapping[str, Any], denoiser_config: Mapping[str, Any], pixels_per_latent: int
    ) -> str | None:
        reads, channels = config.get("control_in_dim"), denoiser_config.get("in_channels", 16)
        if not isinstance(reads, int) or reads < channels:
            return f"reads {reads} channels, and the model's latents have {channels}"
        layers, places = denoiser_config.get("n_layers", 30), config.get("control_layers_places")
        if not isinstance(places, list | tuple) or any(place not in range(layers) for place in places):
            return f"adds to the layers {places}, and the model has {layers}"
        return None


class ZNetwork(Network):
    keeps_precision: ClassVar[Sequence[str]] = ("*norm*", "*embed*", "*pad_token", "all_final_layer.*")

    def text_widths(self, denoiser: Any) -> tuple[int, int | None]:
        return denoiser.config.cap_feat_dim, None

    def predict_noise(self, denoiser: Any, rows: Rows, size: ImageSize) -> torch.Tensor:
        import torch

        latents = rows.latents.to(denoiser.dtype)
        inputs = (
            list(latents.unsqueeze(2).unbind()),
            (1000 - rows.timesteps) / 1000,
            [prompt[:length] for prompt, length in zip(rows.prompts, rows.lengths, strict=True)],
        )
        added = dict[int, torch.Tensor]()
        for control in rows.controls:
            # Of each row, and in the net's own type: it also scales what it adds to its own layers.
            scales = control.scales.to(latents.dtype).view(-1, 1, 1)
            with _reading_by(control.net, denoiser):
                own = control.net(*inputs, list(control.images.unsqueeze(2).unbind()), conditioning_scale=scales)
            for layer, residual in own.items():
                added[layer] = added[layer] + residual if layer in added else residual
        (images,) = denoiser(*inputs, controlnet_block_samples=added or None, return_dict=False)
        return -torch.stack([image.squeeze(1).float() for image in images])


@contextlib.contextmanager
def _reading_by(net: Any, denoiser: Any) -> Iterator[None]:
    """Lend a ControlNet the transformer's first layers within the block. HAZARD: one thread at a time may run it."""
    try:
        for name in _LENT:
            setattr(net, name, getattr(denoiser, name))
        yield
    finally:
        for name in _LENT:
            delattr(net, name)
            setattr(net, name, None)


Z_IMAGE: Final = Family(
    class_name="ZImagePipeline",
    other_class_names=("ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    denoiser_name="transformer",
    defaults=ZDefaults(
        ImageDefaults(num_inference_steps=50, guidance_scale=5.0),
        edits={
            "image-to-image": EditDefaults(strength=0.6, guidance_scale=5.0, num_inference_steps=50),
            "inpainting": EditDefaults(strength=1.0, guidance_scale=5.0, num_inference_steps=50),
        },
    ),
    network=ZNetwork(),
    texts=ZTexts(PromptForm(layers=(-2,), variables=(("enable_thinking", True),))),
    latents=ZLatents(),
    guidance=AddedGuidance(),
    steps=ShiftedSteps(),
    adapters=ZAdapters(),
)
