"""Train the autoencoder that all diffusion demo models share: (3, 32, 32) <-> (4, 8, 8)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from digits import DigitSet, jitter, load_split, thicken, to_pixels
from model_folder import MODELS_DIR, store_model
from training_loop import argument_parser, seed_everything, train

BATCH = 32
KL_WEIGHT = 1e-3


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
        scaling_factor=1.0,
        shift_factor=0.0,
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def draw_pixels(data: DigitSet, generator: torch.Generator) -> torch.Tensor:
    """A batch of everything the models will paint: thin and thick, both polarities, jittered.

    Returns (BATCH, 3, 32, 32).
    """
    chosen = torch.randint(len(data.ink), (BATCH,), generator=generator)
    ink = jitter(data.ink[chosen], generator)
    thick = torch.rand(BATCH, generator=generator) < 0.35
    ink = torch.where(thick[:, None, None], thicken(ink), ink)
    inverted = torch.rand(BATCH, generator=generator) < 0.4
    return torch.where(inverted[:, None, None, None], to_pixels(ink, True), to_pixels(ink))


def measure_scale(vae: AutoencoderKL, data: DigitSet) -> float:
    """The factor that gives the latents of ordinary digits a root mean square of one."""
    with torch.no_grad():
        latents = vae.encode(to_pixels(data.ink)).latent_dist.mode()
    return round(float(1.0 / latents.square().mean().sqrt()), 4)


def main() -> None:
    arguments = argument_parser(__doc__, 700, MODELS_DIR / "digits-flux" / "vae").parse_args()
    _, generator = seed_everything(arguments.seed, arguments.threads)
    data, held_out = load_split()
    vae = build_vae().to(memory_format=torch.channels_last)

    def loss_of_batch() -> torch.Tensor:
        pixels = draw_pixels(data, generator)
        posterior = vae.encode(pixels).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        painted = vae.decode(posterior.mean + posterior.std * noise).sample
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        return F.mse_loss(painted, pixels) + KL_WEIGHT * kl

    train("vae", vae.parameters(), loss_of_batch, arguments.steps, 2e-3)
    vae.to(torch.bfloat16).to(torch.float32).eval()
    vae.register_to_config(scaling_factor=measure_scale(vae, data))
    with torch.no_grad():
        pixels = to_pixels(held_out.ink)
        painted = vae.decode(vae.encode(pixels).latent_dist.mode()).sample
    print(f"held-out mean squared error {F.mse_loss(painted, pixels).item():.4f}")
    store_model(vae.to(memory_format=torch.contiguous_format), arguments.out)


if __name__ == "__main__":
    main()
