"""Sigmas, timesteps and solvers that a request chooses are those of the stock pipelines."""

from __future__ import annotations

import diffusers
import numpy as np
import pytest
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers

from deployments.engines.diffusion.known_solvers import OF_BETAS, solvers_for
from deployments.engines.diffusion.stochastic_solvers import SOLVERS
from deployments.engines.records.protocol import EngineError


@pytest.mark.parametrize("name", ["sdxl", "flux", "stable_diffusion_3"])
def test_sigmas(request, make_request, name):
    pair = request.getfixturevalue(name)
    sigmas = (10.0, 4.0, 1.5, 0.3) if name == "sdxl" else (1.0, 0.8, 0.45, 0.1)
    job = make_request(num_inference_steps=4, sigmas=sigmas, guidance_scale=2.0)
    conditioning = pair.conditioning(negative=True)
    ours = pair.assert_equals_stock(job, conditioning, sigmas=list(sigmas))
    plain = pair.ours.generate(make_request(num_inference_steps=4, guidance_scale=2.0), conditioning)
    assert np.abs(ours.astype(int) - plain.astype(int)).max() > 4


@pytest.mark.parametrize("name", ["sdxl", "stable_diffusion"])
def test_timesteps_and_another_solver(request, make_request, name):
    pair, timesteps = request.getfixturevalue(name), (900, 600, 320, 40)
    job = make_request(scheduler="DPMSolverMultistepScheduler", num_inference_steps=4, timesteps=timesteps)
    conditioning, own = pair.conditioning(), pair.stock.scheduler
    pair.stock.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(own.config)
    try:
        pair.assert_equals_stock(job, conditioning, timesteps=list(timesteps))
    finally:
        pair.stock.scheduler = own


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "solver", "options"),
    [
        ("sdxl", "LCMScheduler", {}),
        ("stable_diffusion", "LCMScheduler", {"original_inference_steps": 20}),
        ("sdxl", "TCDScheduler", {}),
        ("sdxl", "EulerDiscreteScheduler", {"use_karras_sigmas": True}),
        ("sdxl", "EulerDiscreteScheduler", {"timestep_spacing": "trailing", "use_beta_sigmas": True}),
        ("stable_diffusion", "DPMSolverMultistepScheduler", {"use_karras_sigmas": True, "solver_order": 3}),
        ("sdxl", "DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "use_exponential_sigmas": True}),
        ("sdxl", "EulerDiscreteScheduler", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}),
        ("sdxl", "UniPCMultistepScheduler", FLOW | {"flow_shift": 3.0}),
        ("flux", "FlowMatchEulerDiscreteScheduler", {"use_karras_sigmas": True, "shift": 2.0}),
        ("stable_diffusion_3", "FlowMatchHeunDiscreteScheduler", {"shift": 2}),
    ],
)
def test_a_solver_and_its_options_by_request(request, make_request, name, solver, options):
    pair = request.getfixturevalue(name)
    job = make_request(scheduler=solver, scheduler_options=options, num_inference_steps=4, guidance_scale=3.0)
    conditioning, own = pair.conditioning(negative=True), pair.stock.scheduler
    pair.stock.scheduler = getattr(diffusers, solver).from_config(own.config, **options)
    try:
        ours = pair.assert_equals_stock(job, conditioning)
    finally:
        pair.stock.scheduler = own
    plain = pair.ours.generate(make_request(num_inference_steps=4, guidance_scale=3.0), conditioning)
    assert np.abs(ours.astype(int) - plain.astype(int)).max() > 2


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ["flux", "stable_diffusion_3"])
@pytest.mark.parametrize("solver", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"])
def test_flows_take_the_names_of_solvers_of_noise(request, make_request, name, solver):
    """A UI names Euler whatever the model is."""
    pair = request.getfixturevalue(name)
    job = make_request(scheduler=solver, num_inference_steps=4)
    own = pair.stock.scheduler
    if solver != "EulerDiscreteScheduler":
        pair.stock.scheduler = getattr(diffusers, solver).from_config(
            own.config, **FLOW, flow_shift=own.config.get("shift", 1.0)
        )
    try:
        pair.assert_equals_stock(job, pair.conditioning())
    finally:
        pair.stock.scheduler = own


def test_every_solver_that_a_message_names_runs(sdxl, stable_diffusion_3, make_request):
    for pair in (sdxl, stable_diffusion_3):
        with pytest.raises(EngineError) as refusal:
            pair.ours.start_request(make_request(scheduler="PixelScheduler"), pair.conditioning())
        known = str(refusal.value).partition("known: ")[2].rstrip(")").split(", ")
        assert type(pair.stock.scheduler).__name__ in known
        assert len(known) >= 3
        assert sorted(solvers_for(pair.stock.scheduler.config)) == known
        for solver in known:
            images = pair.ours.generate(make_request(scheduler=solver, num_inference_steps=2), pair.conditioning())
            assert images.shape[0] == 1, solver


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": "PixelScheduler"}, "scheduler 'PixelScheduler': .*known: .*EulerDiscreteScheduler"),
        ({"scheduler": "FlowMatchHeunDiscreteScheduler"}, "expected one that fits the model's"),
        ({"scheduler": "LCMScheduler", "num_inference_steps": 60}, "LCMScheduler cannot make this schedule"),
        (
            {"scheduler_options": {"use_karras": True}},
            r"EulerDiscreteScheduler has no 'use_karras' .*use_karras_sigmas",
        ),
        ({"scheduler_options": {"use_karras_sigmas": 1}}, "use_karras_sigmas is 1, expected true or false"),
        ({"scheduler_options": {"timestep_spacing": "even"}}, "timestep_spacing is 'even', expected one of leading"),
        (
            {"scheduler": "UniPCMultistepScheduler", "scheduler_options": {"solver_order": 10**9}},
            "solver_order is 1000000000, expected a whole number from 1 to 3",
        ),
        (
            {"scheduler_options": {"use_karras_sigmas": True, "use_beta_sigmas": True}},
            "EulerDiscreteScheduler cannot be configured so: Only one of",
        ),
        ({"sigmas": (1.0, 0.5)}, "sigmas: 2 of them for 3 steps"),
        ({"sigmas": (1.0, 0.5, 0.7)}, "sigmas: expected numbers of 0 or more that do not rise"),
        ({"sigmas": (1.0, float("nan"), 0.7)}, "sigmas: expected numbers"),
        ({"sigmas": (1.0, 0.5, 0.1), "timesteps": (3, 2, 1)}, "either sigmas or timesteps"),
        ({"scheduler": "PNDMScheduler", "timesteps": (3, 2, 1)}, "PNDMScheduler cannot make this schedule"),
    ],
)
def test_what_is_refused(sdxl, make_request, changes, message):
    with pytest.raises(EngineError, match=message):
        sdxl.ours.start_request(make_request(**changes), sdxl.conditioning())


def test_the_solvers_of_betas_are_those_that_diffusers_swaps_and_our_own() -> None:
    swapped = {*KarrasDiffusionSchedulers.__members__, "LCMScheduler", "TCDScheduler"} - {"EDMEulerScheduler"}
    assert {*swapped, *SOLVERS} == OF_BETAS
    assert solvers_for({}) == []
    assert solvers_for({"_class_name": "EDMEulerScheduler"}) == ["EDMEulerScheduler"]
    assert solvers_for({"_class_name": "DDIMScheduler", "use_flow_sigmas": True})[0] == "DDIMScheduler"
