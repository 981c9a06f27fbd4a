"""The WebUI's samplers and schedulers beside k-diffusion's formulas, written down plainly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from kit.drawing import seeds

from deployments.engines.diffusion.solvers import SolverFactory
from deployments.engines.records.protocol import EngineError
from deployments.ingress.compat.a1111_bodies import TextToImageBody

BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
LAST = 999  # timestep


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> SolverFactory:
    folder: Path = tmp_path_factory.mktemp("sd")
    scheduler = diffusers.DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=False)
    scheduler.save_pretrained(folder / "scheduler")
    return SolverFactory(folder, {"scheduler": ["diffusers", "DDIMScheduler"]})


def solver_of(factory: SolverFactory, sampler: str, scheduler: str, steps: int) -> Any:
    given = TextToImageBody(sampler_name=sampler, scheduler=scheduler)._fields("m")
    solver = factory.configured(given.get("scheduler"), given["scheduler_options"])
    solver.set_timesteps(steps)
    return solver


def all_sigmas() -> np.ndarray:
    betas = np.linspace(0.00085**0.5, 0.012**0.5, LAST + 1) ** 2
    kept = np.cumprod(1 - betas)
    found: np.ndarray = np.sqrt((1 - kept) / kept)
    return found


def sigma_at(timesteps: np.ndarray) -> np.ndarray:
    return np.exp(np.interp(timesteps, np.arange(LAST + 1), np.log(all_sigmas())))


# k-diffusion's schedules, as timesteps
TIMESTEPS: dict[str, Callable[[int], np.ndarray]] = {
    "Uniform": lambda n: np.linspace(LAST, 0, n),
    "Normal": lambda n: np.linspace(LAST, 0, n),
    "SGM Uniform": lambda n: np.linspace(LAST, 0, n + 1)[:-1],
    "Simple": lambda n: np.array([LAST - int(place * (LAST + 1) / n) for place in range(n)], float),
    "DDIM": lambda n: np.arange(1, LAST + 1, (LAST + 1) // n)[::-1][-n:].astype(float),
}


@pytest.mark.parametrize("steps", [5, 10, 20, 25])
@pytest.mark.parametrize("scheduler", list(TIMESTEPS))
def test_schedules_are_those_of_k_diffusion_to_a_timestep(factory: SolverFactory, scheduler: str, steps: int) -> None:
    """Diffusers rounds to whole timesteps, k-diffusion partly does not: of a thousand, they are at most one apart."""
    found = solver_of(factory, "Euler", scheduler, steps).sigmas.numpy()
    timesteps = TIMESTEPS[scheduler](steps)
    assert found[-1] == 0
    low, high = sigma_at(np.maximum(timesteps - 1.01, 0)), sigma_at(np.minimum(timesteps + 1.01, LAST))
    assert (low * (1 - 1e-4) <= found[:-1]).all()
    assert (found[:-1] <= high * (1 + 1e-4)).all()


@pytest.mark.parametrize("sampler", ["Euler", "DPM++ 2M", "DPM++ 2M SDE", "LMS"])
@pytest.mark.parametrize("scheduler", ["Karras", "Exponential"])
def test_spaced_sigmas_go_from_the_last_to_the_first(factory: SolverFactory, sampler: str, scheduler: str) -> None:
    least, most = all_sigmas()[[0, -1]]
    ramp = np.linspace(0, 1, 12)
    if scheduler == "Karras":
        expected = (most ** (1 / 7) + ramp * (least ** (1 / 7) - most ** (1 / 7))) ** 7
    else:
        expected = np.exp(np.log(most) + ramp * (np.log(least) - np.log(most)))
    found = solver_of(factory, sampler, scheduler, 12).sigmas.numpy()
    np.testing.assert_allclose(found, [*expected, 0], rtol=2e-4)


# The WebUI's schedules of samplers for which none is chosen.
DEFAULTS = {
    **dict.fromkeys(("Euler", "Euler a", "LMS", "Heun"), "Uniform"),
    **dict.fromkeys(("DPM++ 2M", "DPM++ SDE", "DPM++ 2S a", "DPM2", "DPM2 a"), "Karras"),
    **dict.fromkeys(("DPM++ 2M SDE", "DPM++ 2M SDE Heun", "DPM++ 3M SDE"), "Exponential"),
    **dict.fromkeys(("DDIM", "PLMS"), "DDIM"),
}


@pytest.mark.parametrize("sampler", list(DEFAULTS))
def test_a_sampler_without_a_schedule_has_its_own(factory: SolverFactory, sampler: str) -> None:
    found, expected = (solver_of(factory, sampler, name, 12) for name in ("Automatic", DEFAULTS[sampler]))
    assert torch.equal(found.timesteps, expected.timesteps)
    if hasattr(found, "sigmas"):
        assert torch.equal(found.sigmas, expected.sigmas)


def denoised(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """A model of points around 0.3 whose spread is 0.5, as it says what is there without the noise."""
    return 0.3 + (x - 0.3) * 0.25 / (0.25 + sigma**2)


def k_2m_sde(x: torch.Tensor, sigmas: list[float], noise: list[torch.Tensor], *, heun: bool) -> torch.Tensor:
    old, h_last = None, 0.0
    for place, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        clean = denoised(x, sigma)
        if following == 0:
            return clean
        h = math.log(sigma) - math.log(following)
        x = following / sigma * math.exp(-h) * x + -math.expm1(-2 * h) * clean
        if old is not None:
            ratio = h_last / h
            if heun:
                x = x + (-math.expm1(-2 * h) / (-2 * h) + 1) * (1 / ratio) * (clean - old)
            else:
                x = x + 0.5 * -math.expm1(-2 * h) * (1 / ratio) * (clean - old)
        x = x + noise[place] * following * math.sqrt(-math.expm1(-2 * h))
        old, h_last = clean, h
    return x


def k_2m(x: torch.Tensor, sigmas: list[float], noise: list[torch.Tensor]) -> torch.Tensor:
    old, h_last = None, 0.0
    for sigma, following in itertools.pairwise(sigmas):
        clean = denoised(x, sigma)
        if following == 0:
            return clean
        h = math.log(sigma) - math.log(following)
        mixed = clean if old is None else (1 + h / (2 * h_last)) * clean - h / (2 * h_last) * old
        x = following / sigma * x - math.expm1(-h) * mixed
        old, h_last = clean, h
    return x


SOLVED: dict[str, Callable[..., torch.Tensor]] = {
    "DPM++ 2M": k_2m,
    "DPM++ 2M SDE": lambda *given: k_2m_sde(*given, heun=False),
    "DPM++ 2M SDE Heun": lambda *given: k_2m_sde(*given, heun=True),
}


@seeds(20)
@pytest.mark.parametrize("sampler", list(SOLVED))
def test_samplers_solve_as_k_diffusion_does(factory: SolverFactory, sampler: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    solver = solver_of(factory, sampler, "Karras", 20)
    sigmas = [float(sigma) for sigma in solver.sigmas]
    noise = [torch.randn(4, generator=generator, dtype=torch.float64) for _ in sigmas]
    x = torch.randn(4, generator=generator, dtype=torch.float64) * sigmas[0]
    own = x / math.sqrt(1 + sigmas[0] ** 2)
    for place, timestep in enumerate(solver.timesteps):
        sigma, size = sigmas[place], math.sqrt(1 + sigmas[place] ** 2)
        predicted = (own * size - denoised(own * size, sigma)) / sigma
        sde = {"variance_noise": noise[place]} if "SDE" in sampler else {}
        own = solver.step(predicted, timestep, own, **sde).prev_sample
    torch.testing.assert_close(own, SOLVED[sampler](x, sigmas, noise), rtol=1e-3, atol=1e-3)


def ancestral(sigma: float, following: float) -> tuple[float, float]:
    up = min(following, (following**2 * (sigma**2 - following**2) / sigma**2) ** 0.5)
    return (following**2 - up**2) ** 0.5, up


def k_sde(x: torch.Tensor, sigmas: list[float], draws: list[torch.Tensor]) -> torch.Tensor:
    """k-diffusion's `sample_dpmpp_sde`, its noise that of a Brownian motion over sigma, as its sampler of noise is."""
    drawn = iter(draws)
    for sigma, following in itertools.pairwise(sigmas):
        clean = denoised(x, sigma)
        if following == 0:
            return x + (x - clean) / sigma * (following - sigma)
        start, end = -math.log(sigma), -math.log(following)
        middle = math.exp(-(start + (end - start) * 0.5))
        first = next(drawn) * math.sqrt(sigma - middle)
        whole = first + next(drawn) * math.sqrt(middle - following)
        down, up = ancestral(sigma, middle)
        inner = down / sigma * x - math.expm1(start + math.log(down)) * clean
        inner = inner + first / math.sqrt(sigma - middle) * up
        down, up = ancestral(sigma, following)
        x = down / sigma * x - math.expm1(start + math.log(down)) * denoised(inner, middle)
        x = x + whole / math.sqrt(sigma - following) * up
    return x


def k_2s_ancestral(x: torch.Tensor, sigmas: list[float], draws: list[torch.Tensor]) -> torch.Tensor:
    for place, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        clean = denoised(x, sigma)
        down, up = ancestral(sigma, following)
        if down == 0:
            return x + (x - clean) / sigma * (down - sigma)
        start, end = -math.log(sigma), -math.log(down)
        h = end - start
        middle = math.exp(-(start + 0.5 * h))
        inner = middle / sigma * x - math.expm1(-h * 0.5) * clean
        x = down / sigma * x - math.expm1(-h) * denoised(inner, middle)
        x = x + draws[2 * place + 1] * up
    return x


def k_3m_sde(x: torch.Tensor, sigmas: list[float], draws: list[torch.Tensor]) -> torch.Tensor:
    clean_1 = clean_2 = torch.zeros(0)
    h_1 = h_2 = None
    for place, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        clean = denoised(x, sigma)
        if following == 0:
            return clean
        h = math.log(sigma) - math.log(following)
        h_eta = 2 * h
        x = math.exp(-h_eta) * x - math.expm1(-h_eta) * clean
        phi_2 = math.expm1(-h_eta) / h_eta + 1
        if h_1 is not None and h_2 is not None:
            r0, r1 = h_1 / h, h_2 / h
            d1_0, d1_1 = (clean - clean_1) / r0, (clean_1 - clean_2) / r1
            d1, d2 = d1_0 + (d1_0 - d1_1) * r0 / (r0 + r1), (d1_0 - d1_1) / (r0 + r1)
            x = x + phi_2 * d1 - (phi_2 / h_eta - 0.5) * d2
        elif h_1 is not None:
            x = x + phi_2 * (clean - clean_1) / (h_1 / h)
        x = x + draws[place] * following * math.sqrt(-math.expm1(-2 * h))
        clean_1, clean_2, h_1, h_2 = clean, clean_1, h, h_1
    return x


STOCHASTIC: dict[str, Callable[..., torch.Tensor]] = {
    "DPM++ SDE": k_sde,
    "DPM++ 2S a": k_2s_ancestral,
    "DPM++ 3M SDE": k_3m_sde,
}


@seeds(20)
@pytest.mark.parametrize("sampler", list(STOCHASTIC))
@pytest.mark.parametrize("scheduler", ["Karras", "Exponential", "Uniform"])
def test_samplers_with_noise_of_their_own_solve_as_k_diffusion_does(
    factory: SolverFactory, sampler: str, scheduler: str, seed: int
) -> None:
    """A solver that is asked twice a step counts a step once; the WebUI's 3M SDE leaves out the last sigma but one."""
    num_steps = 2 + seed
    solver = solver_of(factory, sampler, scheduler, num_steps)
    is_third = sampler == "DPM++ 3M SDE"
    sigmas = [float(one) for one in solver_of(factory, "Euler", scheduler, num_steps + is_third).sigmas]
    if is_third:
        del sigmas[-2]
    else:
        assert len(solver.timesteps) == 2 * num_steps - 1
    np.testing.assert_allclose(sigma_at(solver.timesteps.numpy()), solver.sigmas[:-1].numpy(), rtol=3e-3)
    own = x = torch.randn(4, generator=torch.Generator().manual_seed(seed)) * sigmas[0]
    stream, generator = (torch.Generator().manual_seed(seed + 1) for _ in range(2))
    draws = [torch.randn(4, generator=stream) for _ in solver.timesteps]
    for place, timestep in enumerate(solver.timesteps):
        sigma = float(solver.sigmas[place])
        solver.scale_model_input(own, timestep)
        predicted = (own - denoised(own, sigma)) / sigma
        own = solver.step(predicted, timestep, own, generator=generator).prev_sample
    torch.testing.assert_close(own, STOCHASTIC[sampler](x.double(), sigmas, draws).float(), rtol=1e-3, atol=1e-3)


SHIFT = 3.0
FLOW_SOLVERS = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")


@pytest.fixture(scope="module", params=FLOW_SOLVERS)
def flow(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> SolverFactory:
    """The solvers of models of flow matching: SD3's, and Wan's."""
    folder: Path = tmp_path_factory.mktemp("flow")
    if request.param.startswith("Flow"):
        diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(folder / "scheduler")
    else:
        diffusers.UniPCMultistepScheduler(
            use_flow_sigmas=True, flow_shift=SHIFT, prediction_type="flow_prediction"
        ).save_pretrained(folder / "scheduler")
    return SolverFactory(folder, {"scheduler": ["diffusers", request.param]})


def shifted(sigmas: np.ndarray, shift: float = SHIFT) -> np.ndarray:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def karras(n: int) -> np.ndarray:
    least = shifted(np.array(1 / 1000)) ** (1 / 7)
    return (1 + np.linspace(0, 1, n) * (least - 1)) ** 7


# ComfyUI's and Forge's schedules of a flow, the shift within
OF_FLOWS: dict[str, Callable[[int], np.ndarray]] = {
    "Simple": lambda n: shifted(np.linspace(1, 1 / n, n)),
    "SGM Uniform": lambda n: shifted(np.linspace(1, shifted(np.array(1 / 1000)), n + 1)[:-1]),
    "Normal": lambda n: shifted(np.linspace(1, shifted(np.array(1 / 1000)), n)),
    "Uniform": lambda n: shifted(np.linspace(1, shifted(np.array(1 / 1000)), n)),
    "Karras": karras,
    "Exponential": lambda n: np.exp(np.linspace(0, np.log(shifted(np.array(1 / 1000))), n)),
}


# Automatic is the own solver of a model: the first and last sigma of UniPC and of bent schedules are none of the WebUI.
SPACED = [
    *itertools.product(FLOW_SOLVERS, ["Euler", "DDIM", "Euler a"], OF_FLOWS),
    *(
        (FLOW_SOLVERS[0], "Automatic", scheduler)
        for scheduler in OF_FLOWS
        if scheduler not in ("Karras", "Exponential")
    ),
]


@pytest.mark.parametrize("steps", [1, 4, 25])
@pytest.mark.parametrize(("flow", "sampler", "scheduler"), SPACED, indirect=["flow"])
def test_flows_are_spaced_as_the_webui_spaces_them(
    flow: SolverFactory, sampler: str, scheduler: str, steps: int
) -> None:
    found = solver_of(flow, sampler, scheduler, steps).sigmas.numpy()
    assert found[-1] == 0
    np.testing.assert_allclose(
        found[:-1], OF_FLOWS[scheduler](steps), atol=1e-2 if scheduler == "SGM Uniform" else 1e-5
    )


@pytest.mark.parametrize("sampler", ["Euler", "Euler a", "DPM++ 2M", "DDIM", "Heun"])
def test_a_flow_keeps_its_own_spacing(flow: SolverFactory, sampler: str) -> None:
    given = TextToImageBody(sampler_name=sampler)._fields("m")
    found, own = (
        flow.configured(given["scheduler"], given["scheduler_options"]),
        flow.configured(given["scheduler"], {}),
    )
    for solver in (found, own):
        solver.set_timesteps(7)
    assert torch.equal(found.sigmas, own.sigmas)


def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """A flow from points around 0.3 whose spread is 0.5."""
    kept = 1 - sigma
    clean = 0.3 + kept * 0.25 / (kept**2 * 0.25 + sigma**2) * (x - kept * 0.3)
    return (x - clean) / sigma


def flow_euler(x: torch.Tensor, sigmas: list[float], noise: list[torch.Tensor]) -> torch.Tensor:
    for sigma, following in itertools.pairwise(sigmas):
        x = x + (following - sigma) * velocity(x, sigma)
    return x


def flow_ancestral(x: torch.Tensor, sigmas: list[float], noise: list[torch.Tensor]) -> torch.Tensor:
    """ComfyUI's `sample_euler_ancestral_RF`, at an eta of 1."""
    for place, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        clean = x - sigma * velocity(x, sigma)
        if following == 0:
            return clean
        down = following * (1 + (following / sigma - 1))
        alpha, alpha_down = 1 - following, 1 - down
        renoise = (following**2 - down**2 * alpha**2 / alpha_down**2) ** 0.5
        x = alpha / alpha_down * (down / sigma * x + (1 - down / sigma) * clean) + noise[place] * renoise
    return x


def flow_2m(x: torch.Tensor, sigmas: list[float], noise: list[torch.Tensor]) -> torch.Tensor:
    """DPM-Solver++(2M), over the logarithm of signal to noise of a flow."""
    old, h_last = None, 0.0
    for sigma, following in itertools.pairwise(sigmas):
        clean = x - sigma * velocity(x, sigma)
        if following == 0:
            return clean
        h = math.log((1 - following) / following) - math.log((1 - sigma) / sigma)
        mixed = clean if old is None else clean + h / (2 * h_last) * (clean - old)
        x = following / sigma * x - (1 - following) * math.expm1(-h) * mixed
        old, h_last = clean, h
    return x


FLOWS: dict[str, Callable[..., torch.Tensor]] = {
    "Euler": flow_euler,
    "DDIM": flow_euler,
    "Euler a": flow_ancestral,
    "DPM++ 2M": flow_2m,
}


@seeds(20)
@pytest.mark.parametrize("sampler", list(FLOWS))
def test_samplers_solve_flows(flow: SolverFactory, sampler: str, seed: int) -> None:
    solver = solver_of(flow, sampler, "Simple", 20)
    sigmas = [float(sigma) for sigma in solver.sigmas]
    own = x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
    stream = torch.Generator().manual_seed(seed + 1)
    noise = [torch.randn(4, generator=stream) for _ in sigmas]
    given = {"generator": torch.Generator().manual_seed(seed + 1)} if sampler == "Euler a" else {}
    for place, timestep in enumerate(solver.timesteps):
        own = solver.step(velocity(own, sigmas[place]), timestep, own, **given).prev_sample
    torch.testing.assert_close(own, FLOWS[sampler](x, sigmas, noise), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("sampler", "scheduler", "said"),
    [
        ("LMS", "Automatic", "scheduler 'LMSDiscreteScheduler': expected one that fits .*EulerDiscreteScheduler"),
        ("Euler", "DDIM", "'leading' begins below the noise that a flow begins with .*linspace, trailing"),
        ("DPM++ 2M", "Karras", "of a flow, DPMSolverMultistepScheduler has its steps in even spaces"),
        ("DPM++ 2M", "Normal", "in even spaces, and not by timestep_spacing 'linspace'"),
    ],
)
def test_what_means_nothing_of_a_flow_is_told(flow: SolverFactory, sampler: str, scheduler: str, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        solver_of(flow, sampler, scheduler, 4)
