"""Forms of noise beside plain formulas of floats."""

from __future__ import annotations

import math
import re

import pytest
import torch
from diffusers import DDIMScheduler
from kit.seeding import seeded_random

from deployments.engines.diffusion.noise_forms import AddedNoise, MixedNoise, NoiseForm, noise_form
from deployments.engines.records.protocol import EngineError

LEVELS = torch.linspace(0.03, 14.6, 1000, dtype=torch.float64)
KINDS = ("epsilon", "v_prediction", "sample")


def drawn(number: int) -> list[float]:
    rng = seeded_random()
    return [rng.uniform(0.05, 0.95) for _ in range(number)]


def close(found: torch.Tensor | float, expected: float) -> bool:
    return float(found) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_added_noise_is_taken_out_by_what_the_model_predicts(kind: str) -> None:
    form = AddedNoise(LEVELS, kind)
    image, noise, level = drawn(3)
    x = torch.tensor(image + noise * level, dtype=torch.float64)
    # The image and the noise on a circle: x0 cos + noise sin, whose tangent is v.
    cosine, sine = 1 / math.hypot(1, level), level / math.hypot(1, level)
    predicted = {"epsilon": noise, "sample": image, "v_prediction": cosine * noise - sine * image}[kind]
    output = torch.tensor(predicted, dtype=torch.float64)
    assert close(form.clean(x, level, output), image)
    assert close(form.output(x, level, torch.tensor(image, dtype=torch.float64)), predicted)
    assert close(form.read(x, level), x.item() * cosine)


def test_a_step_may_fall_below_the_next_level_and_rise_again() -> None:
    added, mixed = AddedNoise(LEVELS, "epsilon"), MixedNoise()
    image, noise, other, eta = drawn(4)
    following, level = sorted(drawn(2))
    below = added.below(level, following, eta)
    up = eta * following * math.sqrt(level**2 - following**2) / level
    assert close(below, math.sqrt(following**2 - min(up, following) ** 2))
    assert close(added.below(level, following, 1e9), 0.0)
    x = torch.tensor(image + below * noise, dtype=torch.float64)
    drawn_noise = torch.tensor(other, dtype=torch.float64)
    added_variance = following**2 - below**2
    assert close(added.risen(x, drawn_noise, below, following), x.item() + other * math.sqrt(added_variance))

    below = mixed.below(level, following, eta)
    assert close(below, following + (following / level - 1) * eta * following)
    x = torch.tensor(image * (1 - below) + noise * below, dtype=torch.float64)
    share = (1 - following) / (1 - below)
    expected = image * (1 - following) + share * below * noise + other * math.sqrt(following**2 - (share * below) ** 2)
    assert close(mixed.risen(x, drawn_noise, below, following), expected)


@pytest.mark.parametrize("form", [AddedNoise(LEVELS, "epsilon"), MixedNoise()])
def test_the_middle_is_that_of_signal_to_noise(form: NoiseForm) -> None:
    def log_ratio(level: float) -> float:
        return -math.log(level) if isinstance(form, AddedNoise) else math.log((1 - level) / level)

    level, following = drawn(2)
    middle = form.middle(level, following)
    assert log_ratio(middle) == pytest.approx((log_ratio(level) + log_ratio(following)) / 2, abs=1e-9)


def test_noise_is_begun_and_left_as_the_form_has_it() -> None:
    added, mixed = AddedNoise(LEVELS, "epsilon"), MixedNoise()
    image, noise, level = (torch.tensor(one, dtype=torch.float64) for one in drawn(3))
    at = level.item()
    assert close(added.first(image, noise, at), (image + noise * at).item())
    for highest in (14.6, 14.7, 14.6 * (1 - 5e-6)):
        assert close(added.first(image, noise, highest), (image + noise * math.hypot(1, highest)).item())
    assert close(added.first(image, noise, 14.6 * (1 - 2e-5)), (image + noise * (14.6 * (1 - 2e-5))).item())
    assert close(added.last(image, at), image.item())
    assert close(mixed.first(image, noise, at), (image * (1 - at) + noise * at).item())
    assert close(mixed.last(image, at), image.item() / (1 - at))
    assert close(mixed.last(image, 0.0), image.item())
    assert (mixed.middle(1.0, 0.5), mixed.middle(1.5, 0.5)) == (0.9999, 0.9999)
    assert added.timestep(float(LEVELS[7]) * 1.0001) == 7


def test_a_solvers_own_form_is_found_or_refused() -> None:
    solver = DDIMScheduler(prediction_type="v_prediction")
    form = noise_form(solver)
    assert (type(form), form.kind) == (AddedNoise, "v_prediction")
    shares = solver.alphas_cumprod.double()
    for place in (0, 500, 999):
        assert form.timestep(float(((1 - shares[place]) / shares[place]).sqrt())) == place
    with pytest.raises(EngineError, match="neither that of Stable Diffusion nor a flow's"):
        noise_form(DDIMScheduler(rescale_betas_zero_snr=True))
    with pytest.raises(EngineError, match=re.escape("predicts 'wind', expected one of epsilon, v_prediction, sample")):
        AddedNoise(LEVELS, "wind")
