"""Schedules equal ComfyUI's formulas, written here with torch and scipy, and diffusers' where the two are the same."""

from __future__ import annotations

import math

import diffusers
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from scipy import special, stats

from deployments.workflows import schedules
from deployments.workflows.records import Refused
from deployments.workflows.schedules import SCHEDULES, added_levels, flow_levels, last_part, levels_of, schedule
from deployments.workflows.values import Shift


class Discrete:
    """Stable Diffusion's levels, in torch."""

    def __init__(self):
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        kept = torch.cumprod(1 - betas, 0)
        self.sigmas = ((1 - kept) / kept) ** 0.5

    def timestep(self, sigma):
        return float((sigma.log() - self.sigmas.log()).abs().argmin())

    def sigma(self, time):
        low, high = math.floor(time), math.ceil(time)
        share = time - low
        return float(((1 - share) * self.sigmas[low].log() + share * self.sigmas[high].log()).exp())


class Flow:
    """A flow's levels by mu, whose exponential is the shift."""

    def __init__(self, shift, size):
        self.mu = math.log(shift)
        self.sigmas = torch.tensor([self.sigma(i / size) for i in range(1, size + 1)], dtype=torch.float64)

    def timestep(self, sigma):
        return float(sigma)

    def sigma(self, time):
        return math.exp(self.mu) / (math.exp(self.mu) + (1 / time - 1))


MODELS = {
    "added": (added_levels({}), Discrete()),
    "sd3": (flow_levels(3.0, 1000), Flow(3.0, 1000)),
    "flux": (flow_levels(math.exp(1.15), 10_000), Flow(math.exp(1.15), 10_000)),
    "schnell": (flow_levels(1.0, 1000), Flow(1.0, 1000)),
}


def normal(model, steps, is_sgm=False):
    start, end = model.timestep(model.sigmas[-1]), model.timestep(model.sigmas[0])
    times = torch.linspace(start, end, steps + is_sgm, dtype=torch.float64)
    return [model.sigma(float(one)) for one in (times[:-1] if is_sgm else times)]


def simple(model, steps):
    return [float(model.sigmas[-(1 + int(i * (len(model.sigmas) / steps)))]) for i in range(steps)]


def ddim_uniform(model, steps):
    return [float(model.sigmas[i]) for i in range(1, len(model.sigmas), len(model.sigmas) // steps)][::-1]


def karras(model, steps):
    low, high = float(model.sigmas[0]) ** (1 / 7), float(model.sigmas[-1]) ** (1 / 7)
    return [(high + x * (low - high)) ** 7 for x in np.linspace(0, 1, steps)]


def exponential(model, steps):
    low, high = float(model.sigmas[0]), float(model.sigmas[-1])
    return [high * (low / high) ** x for x in np.linspace(0, 1, steps)]


def kl_optimal(model, steps):
    low, high = math.atan(model.sigmas[0]), math.atan(model.sigmas[-1])
    return [math.tan(i / (steps - 1) * low + (1 - i / (steps - 1)) * high) for i in range(steps)]


def beta(model, steps):
    places = np.rint(stats.beta.ppf(1 - np.linspace(0, 1, steps, endpoint=False), 0.6, 0.6) * (len(model.sigmas) - 1))
    found, last = [], -1
    for place in places:
        if place != last:
            found.append(float(model.sigmas[int(place)]))
        last = place
    return found


def linear_quadratic(model, steps):
    high = float(model.sigmas[-1])
    if steps == 1:
        return [high]
    line = steps // 2
    curve = steps - line
    delta = line - 0.025 * steps
    a, b = delta / (line * curve**2), 0.025 / line - 2 * delta / curve**2
    done = [0.025 * i / line if i < line else a * i * i + b * i + a * line * line for i in range(steps)]
    return [high * (1 - one) for one in done]


FORMULAS = {
    "normal": normal,
    "sgm_uniform": lambda model, steps: normal(model, steps, is_sgm=True),
    "simple": simple,
    "ddim_uniform": ddim_uniform,
    "karras": karras,
    "exponential": exponential,
    "kl_optimal": kl_optimal,
    "beta": beta,
    "linear_quadratic": linear_quadratic,
}


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_a_schedule_equals_its_formula(name, model):
    assert set(FORMULAS) == set(SCHEDULES)
    ours, reference = MODELS[model]
    for steps in {2, 4, 20, int(seeded_rng().integers(2, 60))}:
        found = schedule(name, ours, steps)
        assert found[-1] == 0
        np.testing.assert_allclose(found[:-1], FORMULAS[name](reference, steps), rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "options"), [("karras", "use_karras_sigmas"), ("exponential", "use_exponential_sigmas")]
)
def test_stable_diffusions_levels_are_those_of_diffusers(name, options):
    solver = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", **{options: True}
    )
    solver.set_timesteps(12)
    np.testing.assert_allclose(schedule(name, MODELS["added"][0], 12), solver.sigmas, rtol=1e-4)


def test_the_normal_schedule_of_a_flow_is_the_one_of_diffusers():
    solver = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    solver.set_timesteps(9)
    np.testing.assert_allclose(schedule("normal", MODELS["sd3"][0], 9), solver.sigmas, rtol=1e-5, atol=1e-6)


def test_quantiles_are_those_of_scipy():
    for a, b in [(0.6, 0.6), *seeded_rng().uniform(0.2, 8, (5, 2))]:
        x = np.linspace(0, 1, 41)
        np.testing.assert_allclose(schedules._beta_share(x, a, b), special.betainc(a, b, x), atol=1e-9)


def test_a_part_of_a_schedule_is_its_end():
    levels = MODELS["flux"][0]
    assert last_part("simple", levels, 8, 0.4) == schedule("simple", levels, 20)[-9:]
    assert last_part("simple", levels, 8, 1.0) == schedule("simple", levels, 8)
    assert last_part("simple", levels, 8, 0.0) == ()
    with pytest.raises(Refused, match="1001 steps"):
        last_part("karras", levels, 8, 1e-9)


@pytest.mark.parametrize(
    ("class_name", "variant", "shift", "expected"),
    [
        ("StableDiffusion3Pipeline", {}, None, Flow(3.0, 1000)),
        ("FluxPipeline", {"guidance_embeds": True}, None, Flow(math.exp(1.15), 10_000)),
        ("FluxPipeline", {"guidance_embeds": False}, None, Flow(1.0, 1000)),
        ("QwenImagePipeline", {}, Shift("ModelSamplingAuraFlow", 3.1), Flow(3.1, 1000)),
        (
            "FluxPipeline",
            {},
            Shift("ModelSamplingFlux", base_shift=0.5, max_shift=1.15, width=1024, height=1024),
            Flow(math.exp(1.15), 10_000),
        ),
        (
            "FluxPipeline",
            {},
            Shift("ModelSamplingFlux", base_shift=0.5, max_shift=1.15, width=256, height=256),
            Flow(math.exp(0.5), 10_000),
        ),
    ],
)
def test_a_model_has_its_own_levels_or_those_of_a_node(class_name, variant, shift, expected):
    np.testing.assert_allclose(levels_of(class_name, variant, {}, shift).table, expected.sigmas, rtol=1e-12)


def test_levels_that_are_not_known_are_refused():
    for arguments, shown in [
        (("PixArtAlphaPipeline", {}, {}, None), "PixArtAlphaPipeline"),
        (("StableDiffusionPipeline", {}, {}, Shift("ModelSamplingSD3", 3.0)), "flow models"),
        (("StableDiffusionPipeline", {}, {"rescale_betas_zero_snr": True}, None), "not computed"),
        (("FluxPipeline", {}, {}, Shift("ModelSamplingSD3", 0.0)), "more than 0"),
    ]:
        with pytest.raises(Refused, match=shown):
            levels_of(*arguments)


def test_flux_2_shifts_by_size_and_steps():
    for steps, width, height in [(20, 1024, 1024), (4, 512, 768), (28, 2048, 1024)]:
        count = round(width * height / 256)
        p, q = 1.6927e-4 * count + 0.45666666, 8.73809524e-5 * count + 1.89833333
        slope = (p - q) / 190
        mu = p if count > 4300 else slope * steps + (p - 200 * slope)
        expected = [0 if t == 0 else math.exp(mu) / (math.exp(mu) + 1 / t - 1) for t in np.linspace(1, 0, steps + 1)]
        np.testing.assert_allclose(schedules.flux_2(steps, width, height), expected, rtol=1e-9)


def test_turbo_has_its_ten_times():
    levels, model = MODELS["added"]
    expected = [model.sigma(time) for time in (999, 899, 799)]
    np.testing.assert_allclose(schedules.turbo(levels, 3, 1.0), [*expected, 0])
    np.testing.assert_allclose(schedules.turbo(levels, 2, 0.5)[:2], [model.sigma(499), model.sigma(399)])


def test_numbers_of_a_text():
    assert schedules.manual("1.0, .98 0.5;-2 1e-3") == (1.0, 0.98, 0.5, -2.0, 1.0, -3.0)
    with pytest.raises(Refused):
        schedules.manual("1" * 200_000)
