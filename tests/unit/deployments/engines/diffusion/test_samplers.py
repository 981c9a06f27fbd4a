"""Samplers over given levels equal k-diffusion's formulas, written here as plain loops over the model's own forward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from scipy import integrate

from configs.options import Sampler, SamplerName
from deployments.engines.diffusion.checkpoints import conditioning_of, restore_checkpoint, save_checkpoint
from deployments.engines.diffusion.families.base import Rows
from deployments.engines.diffusion.samplers import SAMPLERS
from deployments.engines.records.protocol import EngineError

Denoise = Callable[[torch.Tensor, float], torch.Tensor]
ADDED, FLOW = "stable_diffusion", "stable_diffusion_3"
SIGMAS = {ADDED: (14.614643, 6.0, 2.4, 0.9, 0.3, 0.0), FLOW: (1.0, 0.88, 0.7, 0.45, 0.2, 0.0)}
LEFT_OVER = {ADDED: (5.0, 3.1, 1.2), FLOW: (0.8, 0.6, 0.4)}


class Loop:
    """A model as k-diffusion sees it: latents with noise of a level -> latents without."""

    def __init__(
        self, pair: Any, conditioning: dict[str, torch.Tensor], cfg: float, cfg_norm: float | None = None
    ) -> None:
        self.pipeline, self.conditioning, self.cfg, self.cfg_norm = pair.ours, conditioning, cfg, cfg_norm
        self.is_flow = pair.ours.family.class_name in ("FluxPipeline", "StableDiffusion3Pipeline")
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        shares = torch.cumprod(1 - betas, 0)
        self.table = ((1 - shares) / shares).sqrt()

    def __call__(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        outputs = [self._output(x, sigma, prefix) for prefix in ("", "negative_")[: 1 if self.cfg == 1 else 2]]
        output = outputs[0] if self.cfg == 1 else outputs[1] + self.cfg * (outputs[0] - outputs[1])
        denoised = x - sigma * output
        if self.cfg_norm is not None:
            norms = [one.norm(dim=1, keepdim=True) for one in (x - sigma * outputs[0], denoised)]
            denoised = denoised * (norms[0] / (norms[1] + 1e-8)).clamp(0, 1) * self.cfg_norm
        return denoised

    def _output(self, x: torch.Tensor, sigma: float, prefix: str) -> torch.Tensor:
        time = self.time(sigma)
        read = x if self.is_flow else x / (sigma**2 + 1) ** 0.5
        prompt = self.conditioning[f"{prefix}prompt_embeds"]
        pooled = self.conditioning.get(f"{prefix}pooled_prompt_embeds")
        count = len(x)
        rows = Rows(
            self.pipeline.family.latents.pack(read),
            torch.full([count], time),
            prompt.expand(count, -1, -1),
            torch.full([count], 1.0),
            None if pooled is None else pooled.expand(count, -1),
        )
        size = self.pipeline._codec.size(32, 32)
        with torch.no_grad():
            found = self.pipeline.family.network.predict_noise(self.pipeline.denoiser, rows, size)
        return self.pipeline.family.latents.unpack(found, size)

    def time(self, sigma: float) -> float:
        return 1000 * sigma if self.is_flow else float((self.table.log() - math.log(sigma)).abs().argmin())

    def noised(self, latents: torch.Tensor, noise: torch.Tensor, sigma: float) -> torch.Tensor:
        return sigma * noise + (1 - sigma) * latents if self.is_flow else latents + sigma * noise


def slope(x, sigma, denoised):
    return (x - denoised) / sigma


def ancestral(loop, sigma, following, eta):
    """Return the level below, and how x there is scaled and noised to be at the following one."""
    if loop.is_flow:
        down = following * (1 + (following / sigma - 1) * eta)
        ratio = (1 - following) / (1 - down)
        return down, ratio, (following**2 - down**2 * ratio**2) ** 0.5
    up = min(following, eta * (following**2 * (sigma**2 - following**2) / sigma**2) ** 0.5)
    return (following**2 - up**2) ** 0.5, 1.0, up


def euler(loop, x, sigmas, draw, eta):
    for sigma, following in itertools.pairwise(sigmas):
        x = x + slope(x, sigma, loop(x, sigma)) * (following - sigma)
    return x


def euler_ancestral(loop, x, sigmas, draw, eta):
    for sigma, following in itertools.pairwise(sigmas):
        denoised = loop(x, sigma)
        if following == 0:
            return denoised
        down, ratio, up = ancestral(loop, sigma, following, eta)
        x = x + slope(x, sigma, denoised) * (down - sigma)
        x = x * ratio + (draw() * up if eta else 0)
    return x


def heun(loop, x, sigmas, draw, eta):
    for sigma, following in itertools.pairwise(sigmas):
        first = slope(x, sigma, loop(x, sigma))
        there = x + first * (following - sigma)
        if following:
            first = (first + slope(there, following, loop(there, following))) / 2
        x = x + first * (following - sigma)
    return x


def dpm_2(loop, x, sigmas, draw, eta):
    for sigma, following in itertools.pairwise(sigmas):
        first = slope(x, sigma, loop(x, sigma))
        if following == 0:
            return x + first * (following - sigma)
        middle = math.exp((math.log(sigma) + math.log(following)) / 2)
        there = x + first * (middle - sigma)
        x = x + slope(there, middle, loop(there, middle)) * (following - sigma)
    return x


def dpm_2_ancestral(loop, x, sigmas, draw, eta):
    for sigma, following in itertools.pairwise(sigmas):
        first = slope(x, sigma, loop(x, sigma))
        if following == 0:
            return x + first * (following - sigma)
        down, ratio, up = ancestral(loop, sigma, following, eta)
        middle = math.exp((math.log(sigma) + math.log(down)) / 2)
        there = x + first * (middle - sigma)
        x = x + slope(there, middle, loop(there, middle)) * (down - sigma)
        x = x * ratio + draw() * up
    return x


def dpmpp_2s_ancestral(loop, x, sigmas, draw, eta):
    for sigma, following in itertools.pairwise(sigmas):
        denoised = loop(x, sigma)
        if following == 0:
            return x + slope(x, sigma, denoised) * (following - sigma)
        down, ratio, up = ancestral(loop, sigma, following, eta)
        if not loop.is_flow:
            start, end = -math.log(sigma), -math.log(down)
            middle, h = math.exp(-(start + end) / 2), end - start
            there = middle / sigma * x - math.expm1(-h / 2) * denoised
            x = down / sigma * x - math.expm1(-h) * loop(there, middle)
        else:
            middle = 0.9999
            if sigma != 1:
                start, end = (math.log((1 - one) / one) for one in (sigma, down))
                middle = 1 / (math.exp(start + (end - start) / 2) + 1)
            there = middle / sigma * x + (1 - middle / sigma) * denoised
            x = down / sigma * x + (1 - down / sigma) * loop(there, middle)
        x = x * ratio + draw() * up
    return x


def lms(loop, x, sigmas, draw, eta):
    slopes: list[torch.Tensor] = []
    for i in range(len(sigmas) - 1):
        denoised = loop(x, sigmas[i])
        slopes = [*slopes, slope(x, sigmas[i], denoised)][-4:]
        if sigmas[i + 1] == 0:
            return denoised
        order = min(i + 1, 4)

        def polynomial(tau, j, i=i, order=order):
            return math.prod((tau - sigmas[i - k]) / (sigmas[i - j] - sigmas[i - k]) for k in range(order) if k != j)

        for j, one in enumerate(reversed(slopes)):
            x = x + one * integrate.quad(polynomial, sigmas[i], sigmas[i + 1], args=(j,))[0]
    return x


def dpmpp_2m(loop, x, sigmas, draw, eta):
    old = None
    for i, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        denoised = loop(x, sigma)
        if following == 0:
            return denoised
        h, found = math.log(sigma) - math.log(following), denoised
        if old is not None:
            r = (math.log(sigmas[i - 1]) - math.log(sigma)) / h
            found = (1 + 1 / (2 * r)) * denoised - (1 / (2 * r)) * old
        x = following / sigma * x - math.expm1(-h) * found
        old = denoised
    return x


def res_multistep(loop, x, sigmas, draw, eta):
    old = None
    for i, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        denoised = loop(x, sigma)
        if following == 0 or old is None:
            x = x + slope(x, sigma, denoised) * (following - sigma)
        else:
            t, t_next, t_before = (-math.log(one) for one in (sigma, following, sigmas[i - 1]))
            h = t_next - t
            c2 = (t_before - t) / h
            phi1 = math.expm1(-h) / -h
            phi2 = (phi1 - 1) / -h
            x = math.exp(-h) * x + h * ((phi1 - phi2 / c2) * denoised + phi2 / c2 * old)
        old = denoised
    return x


def lcm(loop, x, sigmas, draw, eta):
    for sigma, following in itertools.pairwise(sigmas):
        x = loop(x, sigma)
        if following > 0:
            x = loop.noised(x, draw(), following)
    return x


def uni_pc(loop, x, sigmas, draw, eta, variant="bh1"):
    """In the form of the paper: latents that keep their variance, and its signal and noise."""
    times = [*sigmas[:-1], sigmas[-1] or 0.001]

    def alpha(t):
        return (1 / (t * t + 1)) ** 0.5

    def std(t):
        return t * alpha(t)

    def model(y, t):
        return loop(y / alpha(t), t)

    steps = len(times) - 1
    most = min(3, steps - 1)
    y = x * alpha(times[0])
    known, known_times = [model(y, times[0])], [times[0]]
    for step in range(1, steps + 1):
        order = step if step < most else min(most, steps + 1 - step)
        t, before, first = times[step], known_times[-1], known[-1]
        h = math.log(alpha(t) / std(t)) - math.log(alpha(before) / std(before))
        ratios = [
            (math.log(alpha(one) / std(one)) - math.log(alpha(before) / std(before))) / h
            for one in known_times[-2 : -order - 1 : -1]
        ]
        slopes = [(one - first) / ratio for one, ratio in zip(known[-2 : -order - 1 : -1], ratios, strict=True)]
        scale = -h if variant == "bh1" else math.expm1(-h)
        matrix = torch.tensor([[ratio**row for ratio in (*ratios, 1.0)] for row in range(order)], dtype=torch.float64)
        aims, phi, factorial = [], math.expm1(-h) / -h - 1, 1
        for i in range(1, order + 1):
            aims.append(phi * factorial / scale)
            factorial *= i + 1
            phi = phi / -h - 1 / factorial
        vector = torch.tensor(aims, dtype=torch.float64)
        base = std(t) / std(before) * y - alpha(t) * math.expm1(-h) * first
        rho = [0.5][: order - 1] if order <= 2 else torch.linalg.solve(matrix[:-1, :-1], vector[:-1]).tolist()
        predicted = base - alpha(t) * scale * sum(a * b for a, b in zip(rho, slopes, strict=True))
        if step == steps:
            y = predicted
            break
        found = model(predicted, t)
        rho = [0.5] if order == 1 else torch.linalg.solve(matrix, vector).tolist()
        y = base - alpha(t) * scale * sum(a * b for a, b in zip(rho, [*slopes, found - first], strict=True))
        known, known_times = [*known, found], [*known_times, t]
    return y / alpha(times[-1])


REFERENCE = {
    "euler": euler,
    "ddim": euler,
    "euler_ancestral": euler_ancestral,
    "heun": heun,
    "dpm_2": dpm_2,
    "dpm_2_ancestral": dpm_2_ancestral,
    "dpmpp_2s_ancestral": dpmpp_2s_ancestral,
    "lms": lms,
    "dpmpp_2m": dpmpp_2m,
    "res_multistep": res_multistep,
    "lcm": lcm,
    "uni_pc": uni_pc,
    "uni_pc_bh2": partial(uni_pc, variant="bh2"),
}


def sampled(pair: Any, conditioning: Any, request: Any) -> torch.Tensor:
    """Return the latents that the engine hands out."""
    state = pair.ours.start_request(request, conditioning)
    while not state.done:
        pair.ours.step([state])
    (found,) = pair.ours.decode([state])
    assert isinstance(found, torch.Tensor), found
    return found


def drawer(seed: int, shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return lambda: torch.randn(shape, generator=generator)


def shape_of(pair: Any, count: int = 2) -> tuple[int, ...]:
    return (count, *pair.ours.family.latents.noise_shape(pair.ours.denoiser.config, pair.ours._codec.size(32, 32)))


def expected_latents(pair, conditioning, sampler, latents, seed, mask=None):
    """Return the latents that the plain loop makes, in the VAE's space."""
    family, vae, loop = pair.ours.family, pair.ours._codec.vae, Loop(pair, conditioning, sampler.cfg, sampler.cfg_norm)
    shape = latents.shape
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if not sampler.adds_noise:
        noise = torch.zeros(shape)
    scaled = family.latents.scale(latents, vae) if latents.any() else latents
    first = sampler.sigmas[0]
    x = loop.noised(scaled, noise, first)
    if not loop.is_flow and first >= float(loop.table[-1]) * (1 - 1e-5):
        x = scaled + noise * (1 + first**2) ** 0.5
    model: Denoise = loop
    if mask is not None:

        def masked(x, sigma):
            part = mask(loop, sigma) if callable(mask) else mask
            return loop(x * part + loop.noised(scaled, noise, sigma) * (1 - part), sigma) * part + scaled * (1 - part)

        masked.is_flow, masked.noised = loop.is_flow, loop.noised  # type: ignore[attr-defined]
        model = masked
    x = REFERENCE[sampler.name](model, x, list(sampler.sigmas), drawer(seed, shape), sampler.eta)
    if loop.is_flow and sampler.sigmas[-1]:
        x = x / (1 - sampler.sigmas[-1])
    return family.latents.unscale(x, vae)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


def with_sampler(make_request, sampler: Sampler, **changes: Any):
    return make_request(
        sampler=sampler, num_inference_steps=sampler.num_steps, num_images=2, output="latent", **changes
    )


def test_each_sampler_has_a_formula_here() -> None:
    assert set(REFERENCE) == set(SAMPLERS) == set(get_args(SamplerName))


@pytest.mark.drawn(over="model")
@pytest.mark.parametrize("model", [ADDED, FLOW])
@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_a_sampler_equals_its_formula(request, make_request, name, model):
    pair, rng = request.getfixturevalue(model), seeded_rng()
    conditioning = pair.conditioning(seed=int(rng.integers(1000)), negative=True)
    seed, shape = int(rng.integers(2**40)), shape_of(pair)
    for sigmas, latents in [
        (SIGMAS[model], torch.zeros(shape)),
        (LEFT_OVER[model], torch.from_numpy(rng.standard_normal(shape, np.float32))),
    ]:
        sampler = Sampler(name=name, sigmas=sigmas, cfg=float(rng.uniform(0.5, 3)))
        given = latents.numpy() if latents.any() else None
        found = sampled(pair, conditioning, with_sampler(make_request, sampler, seed=seed, latents=given))
        assert_near(found, expected_latents(pair, conditioning, sampler, latents, seed))


@pytest.mark.drawn(over="model")
@pytest.mark.parametrize("model", [ADDED, FLOW, "flux"])
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_guidance_is_bounded_by_the_length_of_what_the_prompt_finds(request, make_request, model, cfg):
    pair, rng = request.getfixturevalue(model), seeded_rng()
    conditioning, latents = pair.conditioning(negative=True), torch.zeros(shape_of(pair))
    levels, strength = SIGMAS[ADDED if model == ADDED else FLOW], float(rng.uniform(0.8, 1.2))
    sampler = Sampler(name="euler", sigmas=levels, cfg=cfg, cfg_norm=strength)
    found = sampled(pair, conditioning, with_sampler(make_request, sampler))
    assert_near(found, expected_latents(pair, conditioning, sampler, latents, make_request().seed))
    free = sampler.model_copy(update={"cfg_norm": None})
    assert not torch.allclose(found, sampled(pair, conditioning, with_sampler(make_request, free)), atol=1e-3)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", [ADDED, FLOW, "flux", "sdxl"])
def test_the_vectors_of_a_negative_prompt_may_be_zeros(request, make_request, model):
    pair = request.getfixturevalue(model)
    conditioning = pair.conditioning(negative=True)
    sampler = Sampler(name="euler", sigmas=SIGMAS[ADDED if model in (ADDED, "sdxl") else FLOW], cfg=3.0)
    zeros = {name: one * 0 if name.startswith("negative_") else one for name, one in conditioning.items()}
    zeroing = sampler.model_copy(update={"zeroes_negative": True})
    found = sampled(pair, conditioning, with_sampler(make_request, zeroing))
    assert torch.equal(found, sampled(pair, zeros, with_sampler(make_request, sampler)))
    assert not torch.allclose(found, sampled(pair, conditioning, with_sampler(make_request, sampler)), atol=1e-4)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", [ADDED, FLOW, "flux", "sdxl"])
def test_noise_left_over_is_removed_by_a_second_request(request, make_request, model):
    """As KSamplerAdvanced hands latents on: the second request adds no noise, and both together are one."""
    pair = request.getfixturevalue(model)
    conditioning = pair.conditioning(negative=True)
    levels = SIGMAS[ADDED if model in (ADDED, "sdxl") else FLOW]
    whole = Sampler(name="euler", sigmas=levels, cfg=2.0)
    first = whole.model_copy(update={"sigmas": levels[:4]})
    second = whole.model_copy(update={"sigmas": levels[3:], "adds_noise": False})
    handed = sampled(pair, conditioning, with_sampler(make_request, first))
    ended = sampled(pair, conditioning, with_sampler(make_request, second, latents=handed.numpy()))
    assert_near(ended, sampled(pair, conditioning, with_sampler(make_request, whole)))


@pytest.mark.drawn
@pytest.mark.parametrize("model", [ADDED, FLOW, "flux"])
def test_a_soft_mask_keeps_a_part(request, make_request, model):
    pair, rng = request.getfixturevalue(model), seeded_rng()
    conditioning, shape = pair.conditioning(), shape_of(pair)
    latents = torch.from_numpy(rng.standard_normal(shape, np.float32))
    mask = rng.random((1, 64, 48), np.float32)
    sampler = Sampler(name="dpmpp_2m", sigmas=SIGMAS[ADDED if model == ADDED else FLOW][1:])
    request = with_sampler(make_request, sampler, latents=latents.numpy(), noise_mask=mask)
    small = torch.nn.functional.interpolate(torch.from_numpy(mask)[None], size=shape[2:], mode="bilinear").expand(shape)
    expected = expected_latents(pair, conditioning, sampler, latents, request.seed, small)
    assert_near(sampled(pair, conditioning, request), expected)
    none = replace(request, noise_mask=np.zeros((2, 8, 8), np.float32))
    assert_near(sampled(pair, conditioning, none), latents)
    differential = sampler.model_copy(update={"masks_until": 0.05})

    def painted(loop: Loop, sigma: float) -> torch.Tensor:
        first, last, here = (loop.time(one) for one in (sampler.sigmas[0], 0.05, sigma))
        return (small >= (here - last) / (first - last)).float()

    expected = expected_latents(pair, conditioning, differential, latents, request.seed, painted)
    assert_near(sampled(pair, conditioning, replace(request, sampler=differential)), expected)


def test_noise_is_that_of_a_place_in_a_longer_batch(stable_diffusion, make_request):
    pair, conditioning = stable_diffusion, stable_diffusion.conditioning()
    sampler = Sampler(name="euler", sigmas=SIGMAS[ADDED], noise_seed=2**64 - 1)
    whole = sampled(pair, conditioning, replace(with_sampler(make_request, sampler), num_images=4))
    picked = sampler.model_copy(update={"picks": (3, 1)})
    assert_near(sampled(pair, conditioning, with_sampler(make_request, picked)), whole[[3, 1]])


def test_the_last_step_tells_what_was_clean(stable_diffusion, make_request):
    pair, conditioning = stable_diffusion, stable_diffusion.conditioning()
    sampler = Sampler(name="heun", sigmas=LEFT_OVER[ADDED])
    request = replace(with_sampler(make_request, sampler), output="latent_and_clean")
    both = sampled(pair, conditioning, request)
    assert both.shape == (4, *shape_of(pair)[1:])
    assert_near(both[:2], sampled(pair, conditioning, replace(request, output="latent")))
    first = sampled(pair, conditioning, with_sampler(make_request, sampler.model_copy(update={"sigmas": (5.0, 3.1)})))
    loop, vae = Loop(pair, conditioning, 1.0), pair.ours._codec.vae
    clean = loop(pair.ours.family.latents.scale(first, vae), 3.1)
    assert_near(both[2:], pair.ours.family.latents.unscale(clean, vae))


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_a_sampler_goes_on_from_a_checkpoint(request, make_request, name):
    pair = request.getfixturevalue(FLOW)
    conditioning, request = pair.conditioning(), with_sampler(make_request, Sampler(name=name, sigmas=SIGMAS[FLOW]))
    state = pair.ours.start_request(request, conditioning)
    for _ in range(3):
        pair.ours.step([state])
    checkpoint = save_checkpoint(state, conditioning)
    assert checkpoint is not None
    moved = pair.ours.start_request(request, conditioning_of(checkpoint))
    restore_checkpoint(moved, checkpoint)
    while not moved.done:
        pair.ours.step([moved])
    (found,) = pair.ours.decode([moved])
    assert torch.equal(found, sampled(pair, conditioning, request))


def test_requests_with_and_without_a_sampler_share_forwards(stable_diffusion_3, make_request):
    """And each is what it is alone."""
    pair, conditioning = stable_diffusion_3, stable_diffusion_3.conditioning()
    requests = [
        with_sampler(make_request, Sampler(name="heun", sigmas=SIGMAS[FLOW]), request_id="a"),
        make_request(num_inference_steps=9, request_id="b"),
    ]
    states = [pair.ours.start_request(request, conditioning) for request in requests]
    works = [pair.ours.step_work(state) for state in states]
    assert works[0].keys == works[1].keys
    while not states[0].done:
        pair.ours.step(states)
    latents, images = pair.ours.decode(states)
    assert torch.equal(latents, sampled(pair, conditioning, requests[0]))
    assert images.dtype == np.uint8


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"sampler": None}, "output is of a request with a sampler"),
        (
            {"sampler": None, "output": "image", "latents": np.zeros((2, 4, 8, 8), np.float32)},
            "latents is of a request",
        ),
        ({"sampler": Sampler(name="euler", sigmas=(1.0, 1.0, 0.0))}, "each lower"),
        ({"sampler": Sampler(name="euler", sigmas=(1.0, -1.0, -2.0))}, "0 or more"),
        ({"num_inference_steps": 3}, "2 steps for 3"),
        ({"sampler": Sampler(name="euler", sigmas=(2.0, 1.0, 0.0), picks=(1,))}, "1 of them for 2 images"),
        ({"noise_mask": np.zeros((3, 8, 8), np.float32)}, "3 of them for 2 images"),
        ({"scheduler": "DDIMScheduler"}, "in place of scheduler"),
        ({"init_image": np.zeros((32, 32, 3), np.uint8)}, "in place of init_image"),
        ({"latents": np.zeros((2, 4, 9, 8), np.float32)}, "latents: their shape is"),
    ],
)
def test_what_a_sampler_cannot_do_is_refused(stable_diffusion, make_request, changes, shown):
    request = with_sampler(make_request, Sampler(name="euler", sigmas=(2.0, 1.0, 0.0)))
    with pytest.raises(EngineError, match=shown):
        stable_diffusion.ours.start_request(replace(request, **changes), stable_diffusion.conditioning())
