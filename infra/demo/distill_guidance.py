"""Teach a trained Flux transformer to paint at once what it paints under guidance.

The student's target is the teacher's guided velocity, `empty + strength * (prompted - empty)`.
Afterwards one pass per step gives the clear digits that took two. Only the transformer changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel

from digits import load_split, to_pixels
from flow_matching import (
    Draw,
    FluxText,
    add_noise,
    caption_drawer,
    encode_digits,
    frozen_text,
    load_base,
    predict,
)
from model_folder import MODELS_DIR, store_model
from training_loop import argument_parser, seed_everything, train

STRENGTH = 2.5


def distillation_loss(
    student: FluxTransformer2DModel, text: FluxText, draw: Draw, generator: torch.Generator
) -> Callable[[], torch.Tensor]:
    """The loss of the student beside its teacher, a frozen copy of its first state."""
    teacher = copy.deepcopy(student).requires_grad_(False)
    empty_states, empty_pooled = text.encode([""])

    def loss_of_batch() -> torch.Tensor:
        latents, states, pooled = draw()
        noisy, _, sigma = add_noise(latents, generator)
        count = len(latents)
        with torch.no_grad():
            prompted = predict(teacher, noisy, sigma, states, pooled)
            empty = predict(
                teacher,
                noisy,
                sigma,
                empty_states.expand(count, -1, -1),
                empty_pooled.expand(count, -1),
            )
        target = empty + STRENGTH * (prompted - empty)
        return F.mse_loss(predict(student, noisy, sigma, states, pooled), target)

    return loss_of_batch


def main() -> None:
    parser = argument_parser(__doc__, 400, MODELS_DIR / "digits-flux")
    parser.add_argument("--model", type=Path, help="the Flux folder to start from; default: --out")
    parser.add_argument("--inverted", action="store_true", help="the model paints white on black")
    arguments = parser.parse_args()
    rng, generator = seed_everything(arguments.seed, arguments.threads)
    base = load_base(arguments.model or arguments.out)
    paint = partial(to_pixels, inverted=arguments.inverted)
    data = encode_digits(base.vae, load_split()[0], generator, paint)
    text = frozen_text(base)
    draw = caption_drawer(data, text, rng, generator)
    loss = distillation_loss(base.transformer, text, draw, generator)
    student = base.transformer.requires_grad_(True)
    train("guidance", student.parameters(), loss, arguments.steps, 5e-4, warmup=50)
    store_model(student, arguments.out / "transformer")


if __name__ == "__main__":
    main()
