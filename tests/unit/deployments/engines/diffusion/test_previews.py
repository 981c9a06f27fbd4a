"""Previews come at the steps that were asked for, show what diffusers' own solvers expect, and disturb nothing."""

from __future__ import annotations

import copy

import diffusers
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.pipeline import create_pipeline
from deployments.engines.diffusion.previews import expected_latents, preview_steps
from deployments.engines.records.protocol import ConditionedRequest


@pytest.mark.parametrize(
    ("num_steps", "num_previews", "steps"),
    [(20, 3, (5, 10, 15)), (4, 3, (1, 2, 3)), (2, 3, (1,)), (1, 3, ()), (28, 0, ()), (10, 1, (5,)), (3, 2, (1, 2))],
)
def test_steps_are_spread_evenly(num_steps, num_previews, steps):
    assert preview_steps(num_steps, num_previews) == steps


BOTH = ("epsilon", "v_prediction")  # diffusers has not built "sample" for Euler's ancestral solver
PREDICTIONS = {
    "EulerDiscreteScheduler": (*BOTH, "sample"),
    "EulerAncestralDiscreteScheduler": BOTH,
    "DDIMScheduler": (*BOTH, "sample"),
}


@pytest.mark.parametrize(
    ("name", "prediction_type"), [(name, one) for name in PREDICTIONS for one in PREDICTIONS[name]]
)
def test_expected_latents_are_those_of_diffusers(name, prediction_type):
    solver = (
        getattr(diffusers, name)(prediction_type=prediction_type, clip_sample=False)
        if name == "DDIMScheduler"
        else (getattr(diffusers, name)(prediction_type=prediction_type))
    )
    solver.set_timesteps(9)
    for place, timestep in enumerate(solver.timesteps):
        latents, prediction = torch.randn(2, 4, 8, 8) * 3, torch.randn(2, 4, 8, 8)
        solver.scale_model_input(latents, timestep)
        ours = expected_latents(solver, place, latents, prediction)
        theirs = solver.step(prediction, timestep, latents, return_dict=True).pred_original_sample
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler", "PNDMScheduler"])
def test_a_constant_prediction_leads_to_what_was_expected(name):
    """Follow one solver to its end with noise and image known: every step expects the image."""
    solver = getattr(diffusers, name)()
    solver.set_timesteps(12)
    image, noise = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8)
    for place, timestep in enumerate(solver.timesteps):
        if name.startswith("FlowMatch"):
            sigma = float(solver.sigmas[place])
            latents, prediction = (1 - sigma) * image + sigma * noise, noise - image
        else:
            latents = solver.add_noise(image, noise, timestep.view(1))
            prediction = noise
        assert torch.allclose(expected_latents(solver, place, latents, prediction), image, atol=1e-3)


def run(pair, request, text, **asked):
    engine = DiffusionEngine(pair.ours)
    engine.add_request(ConditionedRequest(request, text, **asked))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


@pytest.mark.drawn(2)
def test_previews_approach_the_image_and_do_not_change_it(pair, make_request):
    request, text = make_request(num_inference_steps=8, num_images=2), pair.conditioning(3)
    silent = run(pair, request, text)
    told = run(pair, request, text, num_previews=3)
    assert len(silent) == 1
    assert [(output.step_index, output.preview_index) for output in told] == [(2, 0), (4, 1), (6, 2), (8, None)]
    assert np.array_equal(silent[-1].images, told[-1].images)
    previews = [output.preview for output in told[:-1]]
    assert all(preview.shape == (2, 32, 32, 3) and preview.dtype == np.uint8 for preview in previews)
    distances = [np.abs(preview.astype(int) - told[-1].images.astype(int)).mean() for preview in previews]
    assert distances[-1] < distances[0] or distances[0] < 1


def tiny_vae_of(pair):
    own = pair.ours._codec.vae
    depth = len(own.config.block_out_channels)
    return diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8,) * depth,
        decoder_block_out_channels=(8,) * depth,
        num_encoder_blocks=(1,) * depth,
        num_decoder_blocks=(1,) * depth,
        latent_channels=own.config.latent_channels,
    ).eval()


@pytest.mark.drawn(2)
def test_a_small_vae_makes_the_previews_alone(pair, make_request, monkeypatch):
    """As diffusers' small VAE decodes the latents that a step expects, at their own scale; the image is the other's."""
    tiny, own = tiny_vae_of(pair), pair.ours
    modules = {own.family.denoiser_name: own.denoiser, "vae": own._codec.vae, "preview_vae": tiny}
    ours = create_pipeline(type(pair.stock).__name__, pair.folder, modules)
    request, text = make_request(num_inference_steps=4, num_images=2), pair.conditioning(3)
    expected, decodes = [], []
    decode = tiny.decode
    monkeypatch.setattr(tiny, "decode", lambda latents, **more: decodes.append(latents) or decode(latents, **more))
    for pipeline in (ours, own):
        state = pipeline.start_request(request, text)
        state.preview_at = (2,)
        while state.step_index < 2:
            pipeline.step([state])
        expected.append(state.expected)
        (preview,) = pipeline.decode_previews([state])
        while not state.done:
            pipeline.step([state])
        if pipeline is ours:
            latents, count = decodes[-1], len(decodes)  # before, its memory is planned
            unpacked = own.family.latents.unpack(expected[0], own._codec.size(request.height, request.width))
            assert torch.equal(latents, unpacked)
            stock = ((decode(unpacked).sample.detach() / 2 + 0.5).clamp(0, 1) * 255).round().byte().numpy()
            assert np.array_equal(preview, stock.transpose(0, 2, 3, 1))
            (image,) = pipeline.decode([state])
    assert torch.equal(*expected)
    assert np.array_equal(image, own.decode([state])[0])
    assert len(decodes) == count


@pytest.mark.drawn(by="pair")
@pytest.mark.parametrize("begins", ["noise", "image", "mask"])
def test_a_small_vae_may_be_the_decoder_and_its_images_change_by_no_company(pair, make_request, begins):
    modules = {pair.ours.family.denoiser_name: pair.ours.denoiser, "vae": tiny_vae_of(pair)}
    ours = create_pipeline(type(pair.stock).__name__, pair.folder, modules)
    picture = seeded_rng().integers(0, 256, (32, 32, 3), dtype="uint8")
    options = {} if begins == "noise" else {"init_image": picture, "strength": 0.7}
    options |= {"mask_image": picture[..., 0]} if begins == "mask" else {}
    request, text = make_request(num_inference_steps=4, **options), pair.conditioning(3)
    alone = ours.generate(request, text)
    states = [ours.start_request(make_request(num_inference_steps=4, seed=seed, **options), text) for seed in (5, 6)]
    states.insert(1, ours.start_request(request, text))
    while not states[0].done:
        ours.step(states)
    assert np.array_equal(ours.decode(states)[1], alone)


@pytest.mark.drawn(2)
def test_each_request_gets_as_many_previews_as_it_asked_for(pair, make_request, monkeypatch):
    engine, sizes = DiffusionEngine(pair.ours), []
    decode = pair.ours._codec.decode
    monkeypatch.setattr(
        pair.ours._codec, "decode", lambda latents, **options: sizes.append(len(latents)) or decode(latents, **options)
    )
    for seed in range(3):
        request = make_request(seed=seed, request_id=str(seed), num_inference_steps=4)
        engine.add_request(ConditionedRequest(request, pair.conditioning(seed), num_previews=seed))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert sorted((one.request_id, one.step_index) for one in outputs if one.preview is not None) == [
        ("1", 2),
        ("2", 1),
        ("2", 3),
    ]
    assert max(sizes) <= 3
    assert sum(sizes) == 3 + 3  # previews and images


@pytest.mark.drawn(2)
def test_a_preview_that_fails_costs_the_request_nothing(pair, make_request, monkeypatch):
    request, text = make_request(num_inference_steps=4), pair.conditioning(3)
    expected = run(pair, request, text)[-1].images
    monkeypatch.setattr(pair.ours, "decode_previews", lambda states: 1 / 0)
    outputs = run(pair, request, text, num_previews=2)
    assert len(outputs) == 1
    assert np.array_equal(outputs[0].images, expected)


def test_the_latents_of_a_solver_are_left_alone():
    solver = diffusers.EulerDiscreteScheduler()
    solver.set_timesteps(5)
    before = copy.deepcopy({name: value for name, value in vars(solver).items() if isinstance(value, torch.Tensor)})
    latents = torch.randn(1, 4, 4, 4)
    kept = latents.clone()
    expected_latents(solver, 2, latents, torch.randn(1, 4, 4, 4))
    assert torch.equal(latents, kept)
    assert all(torch.equal(value, before[name]) for name, value in vars(solver).items() if name in before)
