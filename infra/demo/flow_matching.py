"""Parts that the Flux trainings share: latents, packing, captions and the flow-matching loss.

A Flux transformer predicts the velocity `noise - latents` at the point
`(1 - sigma) * latents + sigma * noise`; its `timestep` argument is sigma itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from digits import DigitSet, draw_caption, jitter, to_pixels
from text_vocabulary import TEXT_LENGTH

BATCH = 64
LATENT_SIDE = 8
JITTERED_COPIES = 4

Draw = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class LatentSet:
    """`latents` is (N, 4, 8, 8), already multiplied by the scaling factor; `labels` is (N,)."""

    latents: torch.Tensor
    labels: torch.Tensor


def jittered_copies(data: DigitSet, generator: torch.Generator) -> DigitSet:
    """The digits, and behind them jittered copies of all of them."""
    copies = [data.ink, *(jitter(data.ink, generator) for _ in range(JITTERED_COPIES))]
    return DigitSet(torch.cat(copies), data.labels.repeat(len(copies)))


def encode_digits(
    vae: AutoencoderKL,
    data: DigitSet,
    generator: torch.Generator,
    paint: Callable[[torch.Tensor], torch.Tensor] = to_pixels,
) -> LatentSet:
    """The digits and some jittered copies of them; `paint` makes ink (N, 32, 32) into pixels."""
    return encode_all(vae, jittered_copies(data, generator), paint)


@torch.no_grad()
def encode_all(
    vae: AutoencoderKL, data: DigitSet, paint: Callable[[torch.Tensor], torch.Tensor] = to_pixels
) -> LatentSet:
    """Latents of exactly these digits, in their order."""
    latents = torch.cat([vae.encode(paint(ink)).latent_dist.mode() for ink in data.ink.split(256)])
    return LatentSet(latents * vae.config.scaling_factor, data.labels)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(B, 4, 8, 8) -> (B, 16 tokens, 16 channels): Flux's 2x2 patches."""
    count, channels, height, width = latents.shape
    return FluxPipeline._pack_latents(latents, count, channels, height, width)


def image_positions() -> torch.Tensor:
    """(16 tokens, 3) row and column numbers for the rotary embedding."""
    half = LATENT_SIDE // 2
    return FluxPipeline._prepare_latent_image_ids(1, half, half, torch.device("cpu"), torch.float32)


@dataclass
class FluxText:
    """The two encoders and tokenizers of a Flux pipeline."""

    clip: CLIPTextModel
    t5: T5EncoderModel
    clip_tokenizer: CLIPTokenizer
    t5_tokenizer: T5Tokenizer

    def encode(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, 16, 64) T5 states and (B, 32) pooled CLIP states, as FluxPipeline makes them."""
        states = self.t5(token_ids(self.t5_tokenizer, captions))[0]
        pooled = self.clip(token_ids(self.clip_tokenizer, captions)).pooler_output
        return states, pooled


def token_ids(tokenizer: CLIPTokenizer | T5Tokenizer, captions: list[str]) -> torch.Tensor:
    """(B, 16), padded and truncated."""
    return tokenizer(
        captions,
        padding="max_length",
        max_length=TEXT_LENGTH,
        truncation=True,
        return_tensors="pt",
    ).input_ids


def caption_drawer(data: LatentSet, text: FluxText, rng: random.Random, generator: torch.Generator) -> Draw:
    """Draws (latents, T5 states, pooled states); each distinct caption is encoded once."""

    def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(data.labels), (BATCH,), generator=generator)
        captions = [draw_caption(int(label), rng) for label in data.labels[chosen]]
        distinct = sorted(set(captions))
        rows = torch.tensor([distinct.index(caption) for caption in captions])
        states, pooled = text.encode(distinct)
        return data.latents[chosen], states[rows], pooled[rows]

    return draw


def predict(
    transformer: Callable[..., tuple[torch.Tensor, ...]],
    noisy: torch.Tensor,
    sigma: torch.Tensor,
    states: torch.Tensor,
    pooled: torch.Tensor,
) -> torch.Tensor:
    """Velocity (B, 16 tokens, 16) for noisy latents (B, 4, 8, 8) at sigma (B,).

    `transformer` is a FluxTransformer2DModel, or what takes and returns the same.
    """
    return transformer(
        hidden_states=pack(noisy),
        timestep=sigma,
        encoder_hidden_states=states,
        pooled_projections=pooled,
        img_ids=image_positions(),
        txt_ids=torch.zeros(TEXT_LENGTH, 3),
        return_dict=False,
    )[0]


def add_noise(latents: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(noisy latents, noise, logit-normal sigma (B,))."""
    noise = torch.randn(latents.shape, generator=generator)
    sigma = torch.randn(len(latents), generator=generator).sigmoid()
    mix = sigma[:, None, None, None]
    return (1 - mix) * latents + mix * noise, noise, sigma


def flow_matching_loss(
    transformer: FluxTransformer2DModel, draw: Draw, generator: torch.Generator
) -> Callable[[], torch.Tensor]:
    """A loss that draws a batch, noise and sigma each time it is called."""

    def loss_of_batch() -> torch.Tensor:
        latents, states, pooled = draw()
        noisy, noise, sigma = add_noise(latents, generator)
        velocity = predict(transformer, noisy, sigma, states, pooled)
        return F.mse_loss(velocity, pack(noise - latents))

    return loss_of_batch


def load_base(folder: Path) -> FluxPipeline:
    """digits-flux in float32, frozen."""
    pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        getattr(pipeline, name).requires_grad_(False)
    return pipeline


def frozen_text(pipeline: FluxPipeline) -> FluxText:
    return FluxText(
        pipeline.text_encoder,
        pipeline.text_encoder_2,
        pipeline.tokenizer,
        pipeline.tokenizer_2,
    )
