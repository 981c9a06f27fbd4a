"""The loop gives the stock pipelines' images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deployments.engines.building.build import build_module
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.nn import forwards

SOLVERS = [
    "DDIMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler",  # draws noise at every step
    "HeunDiscreteScheduler",  # two forwards per step
]


def assert_same_image(ours: np.ndarray, stock: np.ndarray) -> None:
    assert ours.dtype == np.uint8
    assert ours.shape == stock.shape
    assert np.abs(ours.astype(int) - stock.astype(int)).max() <= 1
    assert ours.std() > 3  # the random VAE has something to show


@pytest.mark.parametrize("true_cfg_scale", [1.0, 2.5])
def test_flux(flux, make_request, true_cfg_scale):
    request = make_request(num_images=2, guidance_scale=3.5, true_cfg_scale=true_cfg_scale, height=48)
    conditioning = flux.conditioning(negative=True)
    flux.assert_equals_stock(request, conditioning)


def test_flux_without_guidance_embedding(make_flux_pair, make_request):
    pair = make_flux_pair(guidance_embeds=False)
    request = make_request(true_cfg_scale=3.0)  # no negative prompt: no guidance, as in stock
    conditioning = pair.conditioning()
    pair.assert_equals_stock(request, conditioning)


@pytest.mark.parametrize("guidance_scale", [1.0, 6.0])
def test_sdxl(sdxl, make_request, guidance_scale):
    request = make_request(num_images=2, guidance_scale=guidance_scale, height=48)
    conditioning = sdxl.conditioning(negative=True)
    sdxl.assert_equals_stock(request, conditioning)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("solver", SOLVERS)
def test_sdxl_solvers(make_sdxl_pair, make_request, solver):
    pair = make_sdxl_pair(solver)
    request = make_request(num_images=2, guidance_scale=4.0, num_inference_steps=4)
    conditioning = pair.conditioning(negative=True)
    pair.assert_equals_stock(request, conditioning)


def test_sdxl_vae_with_latent_statistics(make_sdxl_pair, make_request):
    pair = make_sdxl_pair(latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 1.0, 2.0])
    request, conditioning = make_request(), pair.conditioning()
    pair.assert_equals_stock(request, conditioning)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("use_dynamic_shifting", [False, True])
@pytest.mark.parametrize("guidance_scale", [1.0, 7.0])
def test_stable_diffusion_3(make_stable_diffusion_3_pair, make_request, guidance_scale, use_dynamic_shifting):
    pair = make_stable_diffusion_3_pair(use_dynamic_shifting=use_dynamic_shifting)
    request = make_request(num_images=2, guidance_scale=guidance_scale, height=48)
    conditioning = pair.conditioning(negative=True)
    pair.assert_equals_stock(request, conditioning)


@pytest.mark.parametrize("guidance_scale", [1.0, 7.5])
def test_stable_diffusion(stable_diffusion, make_request, guidance_scale):
    request = make_request(num_images=2, guidance_scale=guidance_scale, height=48)
    conditioning = stable_diffusion.conditioning(negative=True)
    stable_diffusion.assert_equals_stock(request, conditioning)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("solver", ["PNDMScheduler", *SOLVERS])
def test_stable_diffusion_solvers(make_stable_diffusion_pair, make_request, solver):
    pair = make_stable_diffusion_pair(solver)
    request = make_request(num_images=2, guidance_scale=4.0, num_inference_steps=4)
    conditioning = pair.conditioning(negative=True)
    pair.assert_equals_stock(request, conditioning)


def test_a_float16_vae_that_overflows_decodes_in_float32(sdxl, load_pipeline, make_request):
    vae = load_pipeline(sdxl.folder, "StableDiffusionXLPipeline", "unet", torch.float16)._codec.vae
    # The UNet in float32, so that only the VAE differs.
    half = DenoisePipeline(sdxl.ours.family, sdxl.folder, {"unet": sdxl.ours.denoiser, "vae": vae})
    assert half._codec.vae.config.force_upcast
    request, conditioning = make_request(), sdxl.conditioning()
    ours, full = half.generate(request, conditioning), sdxl.ours.generate(request, conditioning)
    assert np.abs(ours.astype(int) - full.astype(int)).max() <= 2
    assert half._codec.vae.dtype == torch.float16  # the given weights stay as they are


def test_bfloat16_is_stock_in_bfloat16(flux, load_pipeline, make_request, monkeypatch):
    ours = load_pipeline(flux.folder, "FluxPipeline", "transformer", torch.bfloat16)
    parts = [
        type(part).from_pretrained(flux.folder / name, dtype=torch.bfloat16)
        for name, part in (("vae", flux.stock.vae), ("transformer", flux.stock.transformer))
    ]
    stock = type(flux.stock)(flux.stock.scheduler, parts[0], None, None, None, None, parts[1])
    stock.set_progress_bar_config(disable=True)
    request = make_request(guidance_scale=2.0)
    # A length that is not padded: under a mask, bfloat16 rounds otherwise.
    conditioning = {name: tensor.bfloat16() for name, tensor in flux.conditioning(length=16).items()}
    flux_bfloat16 = type(flux)(stock, ours, flux.folder, flux.conditioning)
    own = ours.generate(request, conditioning)
    # Attention in the compiled kernels rounds otherwise, and no more: float32's image is as near.
    exact = flux.ours.generate(request, flux.conditioning(length=16)).astype(int)
    theirs = flux_bfloat16.stock_images(request, conditioning)
    assert np.abs(own - exact).mean() <= 1.25 * np.abs(theirs - exact).mean()
    monkeypatch.setattr(forwards, "_may_gain", lambda hidden: False)
    assert_same_image(ours.generate(request, conditioning), theirs)


def test_weights_are_not_written(pair, make_request):
    weights = {**pair.ours.denoiser.state_dict(), **pair.ours._codec.vae.state_dict(prefix="vae.")}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    pair.ours.generate(make_request(guidance_scale=2.0), pair.conditioning(negative=True))
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())


def test_weights_are_not_copied(pair):
    for component in (pair.denoiser_name, "vae"):
        tensors = load_file(pair.folder / component / "diffusion_pytorch_model.safetensors")
        module = build_module("diffusers", None, pair.folder / component, tensors)
        assert {own.data_ptr() for own in module.state_dict().values()} == {t.data_ptr() for t in tensors.values()}
