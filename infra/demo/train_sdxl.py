"""Train digits-sdxl: a UNet and two CLIP encoders, on the latents of digits-flux's VAE."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from digits import IMAGE_SIZE, draw_caption, load_split
from flow_matching import LATENT_SIDE, LatentSet, encode_digits, token_ids
from model_folder import MODELS_DIR, store
from text_vocabulary import (
    CLIP_WIDTH,
    build_clip,
    build_clip_tokenizer,
    build_clip_with_projection,
)
from training_loop import argument_parser, seed_everything, train

BATCH = 64
SIZE_WIDTH = 8
# (original height and width, crop top and left, target height and width)
SIZE_IDS = (IMAGE_SIZE, IMAGE_SIZE, 0, 0, IMAGE_SIZE, IMAGE_SIZE)
# "linspace" starts at the noisiest timestep; SDXL's "leading" would start one stride below it.
NOISE_SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}


@dataclass
class SdxlText:
    """SDXL's two encoders over one tokenizer."""

    first: CLIPTextModel
    second: CLIPTextModelWithProjection
    tokenizer: CLIPTokenizer

    def encode(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, 16, 64) penultimate states of both encoders, (B, 32) projected pooled states."""
        ids = token_ids(self.tokenizer, captions)
        first = self.first(ids, output_hidden_states=True)
        second = self.second(ids, output_hidden_states=True)
        states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        return states, second.text_embeds


def build_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=4,
        out_channels=4,
        block_out_channels=(48, 80),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        transformer_layers_per_block=1,
        attention_head_dim=(4, 4),
        cross_attention_dim=2 * CLIP_WIDTH,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=SIZE_WIDTH,
        projection_class_embeddings_input_dim=CLIP_WIDTH + SIZE_WIDTH * len(SIZE_IDS),
    )


def noise_prediction_loss(
    unet: UNet2DConditionModel,
    text: SdxlText,
    data: LatentSet,
    rng: random.Random,
    generator: torch.Generator,
) -> Callable[[], torch.Tensor]:
    """The noise prediction loss. Half of the empty captions become zeros, as stock SDXL's guidance expects."""
    schedule = DDPMScheduler(**NOISE_SCHEDULE)
    sizes = torch.tensor(SIZE_IDS, dtype=torch.float32).expand(BATCH, -1)

    def loss_of_batch() -> torch.Tensor:
        chosen = torch.randint(len(data.labels), (BATCH,), generator=generator)
        captions = [draw_caption(int(label), rng) for label in data.labels[chosen]]
        kept = torch.tensor([caption != "" or rng.random() < 0.5 for caption in captions])
        states, pooled = text.encode(captions)
        latents = data.latents[chosen]
        noise = torch.randn(latents.shape, generator=generator)
        timesteps = torch.randint(1000, (BATCH,), generator=generator)
        predicted = unet(
            schedule.add_noise(latents, noise, timesteps),
            timesteps,
            encoder_hidden_states=states * kept[:, None, None],
            added_cond_kwargs={"text_embeds": pooled * kept[:, None], "time_ids": sizes},
        ).sample
        return F.mse_loss(predicted, noise)

    return loss_of_batch


def assemble(unet: UNet2DConditionModel, text: SdxlText, vae: AutoencoderKL) -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=text.first,
        text_encoder_2=text.second,
        tokenizer=text.tokenizer,
        tokenizer_2=text.tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler(timestep_spacing="linspace", **NOISE_SCHEDULE),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )


def main() -> None:
    arguments = argument_parser(__doc__, 1800, MODELS_DIR / "digits-sdxl").parse_args()
    rng, generator = seed_everything(arguments.seed, arguments.threads)
    shared_vae = MODELS_DIR / "digits-flux" / "vae"
    vae = AutoencoderKL.from_pretrained(shared_vae).float()
    data = encode_digits(vae, load_split()[0], generator)
    tokenizer = build_clip_tokenizer()
    text = SdxlText(build_clip(tokenizer), build_clip_with_projection(tokenizer), tokenizer)
    unet = build_unet()
    trained = chain(unet.parameters(), text.first.parameters(), text.second.parameters())
    loss = noise_prediction_loss(unet, text, data, rng, generator)
    train("digits-sdxl", trained, loss, arguments.steps, 1e-3)
    store(assemble(unet, text, vae), arguments.out)
    # A plain copy, so that a store that deduplicates by content finds the same bytes.
    shutil.copytree(shared_vae, arguments.out / "vae", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
