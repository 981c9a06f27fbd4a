"""Train bold: a LoRA on the attention projections of digits-flux that thickens the strokes."""

from __future__ import annotations

import torch
from diffusers import FluxPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from digits import load_split, thicken, to_pixels
from flow_matching import (
    caption_drawer,
    encode_digits,
    flow_matching_loss,
    frozen_text,
    load_base,
)
from model_folder import MODELS_DIR, tidy
from training_loop import argument_parser, seed_everything, train

RANK = 8
PROJECTIONS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)


def paint_bold(ink: torch.Tensor) -> torch.Tensor:
    """(N, 32, 32) ink -> (N, 3, 32, 32) pixels with thick strokes."""
    return to_pixels(thicken(ink))


def main() -> None:
    arguments = argument_parser(__doc__, 500, MODELS_DIR / "bold").parse_args()
    rng, generator = seed_everything(arguments.seed, arguments.threads)
    base = load_base(MODELS_DIR / "digits-flux")
    data = encode_digits(base.vae, load_split()[0], generator, paint_bold)
    # alpha equals the rank: a strength of 1.0 needs no alpha in the file.
    base.transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(PROJECTIONS)), "bold")
    draw = caption_drawer(data, frozen_text(base), rng, generator)
    loss = flow_matching_loss(base.transformer, draw, generator)
    train("bold", base.transformer.parameters(), loss, arguments.steps, 5e-3, warmup=50)
    layers = get_peft_model_state_dict(base.transformer, adapter_name="bold")
    layers = {name: tensor.to(torch.bfloat16) for name, tensor in layers.items()}
    FluxPipeline.save_lora_weights(arguments.out, transformer_lora_layers=layers)
    tidy(arguments.out)


if __name__ == "__main__":
    main()
