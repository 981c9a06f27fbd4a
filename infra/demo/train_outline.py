"""Train outline: a ControlNet for digits-flux that paints the digit whose outline it is given.

The base is frozen. Half of the captions say nothing of the digit, so that it learns to read the outline.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FluxControlNetModel, FluxTransformer2DModel

from digits import DigitSet, draw_caption, load_split, outline, to_pixels
from flow_matching import (
    BATCH,
    FluxText,
    LatentSet,
    add_noise,
    encode_all,
    frozen_text,
    jittered_copies,
    load_base,
    pack,
    predict,
)
from model_folder import MODELS_DIR, store_model
from training_loop import argument_parser, seed_everything, train

NEUTRAL_CAPTIONS = ("", "a handwritten digit", "a digit", "a picture")
NEUTRAL_SHARE = 0.5


def build_net(base: FluxTransformer2DModel) -> FluxControlNetModel:
    """One double block, which begins as the base's first, and a small stack of convolutions that sees the outline."""
    shared = (
        "in_channels",
        "attention_head_dim",
        "num_attention_heads",
        "joint_attention_dim",
        "pooled_projection_dim",
    )
    net = FluxControlNetModel(
        num_layers=1,
        num_single_layers=0,
        axes_dims_rope=list(base.config.axes_dims_rope),
        conditioning_embedding_channels=base.config.in_channels,
        **{name: base.config[name] for name in shared},
    )
    net.load_state_dict(base.state_dict(), strict=False)
    return net


def controlled(
    transformer: FluxTransformer2DModel, net: FluxControlNetModel, outlines: torch.Tensor
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The transformer with what the net makes of outlines (B, 3, 32, 32) added to its blocks."""

    def paint(**inputs: Any) -> tuple[torch.Tensor, ...]:
        blocks, _ = net(controlnet_cond=outlines, **inputs)
        return transformer(**inputs, controlnet_block_samples=blocks, controlnet_blocks_repeat=True)

    return paint


def outline_loss(
    transformer: FluxTransformer2DModel,
    net: FluxControlNetModel,
    text: FluxText,
    digits: DigitSet,
    latents: LatentSet,
    rng: random.Random,
    generator: torch.Generator,
) -> Callable[[], torch.Tensor]:
    """The flow-matching loss of digits whose outlines the net sees."""

    def loss_of_batch() -> torch.Tensor:
        chosen = torch.randint(len(digits.labels), (BATCH,), generator=generator)
        captions = [draw_some_caption(int(label), rng) for label in digits.labels[chosen]]
        distinct = sorted(set(captions))
        rows = torch.tensor([distinct.index(caption) for caption in captions])
        with torch.no_grad():
            states, pooled = text.encode(distinct)
        noisy, noise, sigma = add_noise(latents.latents[chosen], generator)
        paint = controlled(transformer, net, to_pixels(outline(digits.ink[chosen])))
        velocity = predict(paint, noisy, sigma, states[rows], pooled[rows])
        return F.mse_loss(velocity, pack(noise - latents.latents[chosen]))

    return loss_of_batch


def draw_some_caption(label: int, rng: random.Random) -> str:
    """A caption of the digit, or one that says nothing of it."""
    return rng.choice(NEUTRAL_CAPTIONS) if rng.random() < NEUTRAL_SHARE else draw_caption(label, rng)


def main() -> None:
    arguments = argument_parser(__doc__, 1500, MODELS_DIR / "outline").parse_args()
    rng, generator = seed_everything(arguments.seed, arguments.threads)
    base = load_base(MODELS_DIR / "digits-flux")
    digits = jittered_copies(load_split()[0], generator)
    net = build_net(base.transformer).train()
    loss = outline_loss(base.transformer, net, frozen_text(base), digits, encode_all(base.vae, digits), rng, generator)
    train("outline", net.parameters(), loss, arguments.steps, 1e-3)
    store_model(net, arguments.out)


if __name__ == "__main__":
    main()
