"""Sigmas, timesteps and solvers that a request chooses are those of the stock pipelines."""

from __future__ import annotations

import diffusers
import numpy as np
import pytest

from deployments.engines.protocol import EngineError


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": "PixelScheduler"}, "scheduler 'PixelScheduler': .*known: .*EulerDiscreteScheduler"),
        ({"scheduler": "FlowMatchHeunDiscreteScheduler"}, "expected one that fits the model's"),
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
