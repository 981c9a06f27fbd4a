"""Train digits-flux: a transformer and its two text encoders, on the latents of train_vae.py.

With --continue-from it starts from the weights of an earlier run, at half the learning rate.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path

from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)

from digits import load_split
from flow_matching import (
    FluxText,
    caption_drawer,
    encode_digits,
    flow_matching_loss,
    frozen_text,
    load_base,
)
from model_folder import MODELS_DIR, store
from text_vocabulary import (
    CLIP_WIDTH,
    T5_WIDTH,
    build_clip,
    build_clip_tokenizer,
    build_t5,
    build_t5_tokenizer,
)
from training_loop import argument_parser, seed_everything, train


def build_transformer() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 8, 8),
    )


def build_text() -> FluxText:
    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    return FluxText(build_clip(clip_tokenizer), build_t5(t5_tokenizer), clip_tokenizer, t5_tokenizer)


def assemble(transformer: FluxTransformer2DModel, text: FluxText, vae: AutoencoderKL) -> FluxPipeline:
    return FluxPipeline(
        # The default sigmas run evenly from 1 to 1/steps: 16 tokens need no timestep shift.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=text.clip,
        tokenizer=text.clip_tokenizer,
        text_encoder_2=text.t5,
        tokenizer_2=text.t5_tokenizer,
        transformer=transformer,
    )


def main() -> None:
    parser = argument_parser(__doc__, 1800, MODELS_DIR / "digits-flux")
    parser.add_argument("--continue-from", type=Path, help="a folder that this script wrote")
    arguments = parser.parse_args()
    rng, generator = seed_everything(arguments.seed, arguments.threads)
    vae = AutoencoderKL.from_pretrained(MODELS_DIR / "digits-flux" / "vae").float()
    data = encode_digits(vae, load_split()[0], generator)
    transformer, text = build_transformer(), build_text()
    if arguments.continue_from:
        base = load_base(arguments.continue_from)
        transformer, text = base.transformer.requires_grad_(True), frozen_text(base)
        text.clip.requires_grad_(True)
        text.t5.requires_grad_(True)
    trained = chain(transformer.parameters(), text.clip.parameters(), text.t5.parameters())
    loss = flow_matching_loss(transformer, caption_drawer(data, text, rng, generator), generator)
    save = partial(store, assemble(transformer, text, vae), arguments.out)
    learning_rate = 1e-3 if arguments.continue_from else 2e-3
    train("digits-flux", trained, loss, arguments.steps, learning_rate, checkpoint=save)
    save()


if __name__ == "__main__":
    main()
