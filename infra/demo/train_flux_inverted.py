"""Fine-tune only the transformer of digits-flux until it paints white digits on black."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from digits import load_split, to_pixels
from flow_matching import (
    caption_drawer,
    encode_digits,
    flow_matching_loss,
    frozen_text,
    load_base,
)
from model_folder import MODELS_DIR, store_model
from training_loop import argument_parser, seed_everything, train


def copy_shared_files(base: Path, out: Path) -> None:
    """Everything but the transformer is the base model's, byte for byte."""
    skip = shutil.ignore_patterns("transformer", "README.md")
    shutil.copytree(base, out, ignore=skip, dirs_exist_ok=True)


def main() -> None:
    arguments = argument_parser(__doc__, 800, MODELS_DIR / "digits-flux-inverted").parse_args()
    rng, generator = seed_everything(arguments.seed, arguments.threads)
    base = load_base(MODELS_DIR / "digits-flux")
    paint = partial(to_pixels, inverted=True)
    data = encode_digits(base.vae, load_split()[0], generator, paint)
    transformer = base.transformer.requires_grad_(True).train()
    draw = caption_drawer(data, frozen_text(base), rng, generator)
    loss = flow_matching_loss(transformer, draw, generator)
    train("digits-flux-inverted", transformer.parameters(), loss, arguments.steps, 1e-3)
    copy_shared_files(MODELS_DIR / "digits-flux", arguments.out)
    store_model(transformer, arguments.out / "transformer")


if __name__ == "__main__":
    main()
