from __future__ import annotations

from collections import Counter

import pytest
import torch

from deployments.engines.llm.sampler import TokenPicker, _filter_logits, sample
from deployments.engines.protocol import ComputationFailed, SamplingParams


def plain_distribution(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Probabilities by the textbook, token by token."""
    probabilities = torch.softmax(logits.double() / temperature, 0).tolist()
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    if top_k:
        order = order[:top_k]
    total = sum(probabilities[token] for token in order)
    kept, mass = {}, 0.0
    for token in order:
        if mass >= top_p:
            break
        kept[token] = probabilities[token] / total
        mass += kept[token]
    return {token: probability / sum(kept.values()) for token, probability in kept.items()}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.9, "top_k": 7, "top_p": 0.6},
        {"temperature": 1.0, "top_k": 1000, "top_p": 0.3},
        {"temperature": 1.0, "top_p": 1e-9},
    ],
)
def test_the_distribution_is_the_plain_formula(seed, params):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 2
    token_ids, probabilities = _filter_logits(logits, SamplingParams(**params))
    expected = plain_distribution(logits, **params)
    assert token_ids.tolist() == sorted(expected)
    normalized = (probabilities / probabilities.sum()).tolist()
    assert normalized == pytest.approx([expected[token] for token in sorted(expected)], rel=1e-6)


def test_draws_follow_the_distribution():
    logits = torch.tensor([2.0, -1.0, 0.5, 1.0, 0.0, -8.0])
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    expected = plain_distribution(logits, top_p=0.9)
    picker, num_draws = TokenPicker.create(params), 4000
    counts = Counter(token for _ in range(num_draws) for token in sample(logits[None], [picker]))
    assert set(counts) == set(expected)
    for token, probability in expected.items():
        deviation = (probability * (1 - probability) / num_draws) ** 0.5
        assert abs(counts[token] / num_draws - probability) < 4 * deviation


def test_rows_keep_their_own_stream():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2, 3)]
    alone = []
    for row, param in enumerate(params):
        picker = TokenPicker.create(param)
        alone.append([sample(logits[row : row + 1], [picker])[0] for _ in range(20)])
    pickers = [TokenPicker.create(param) for param in params]
    together = [sample(logits, pickers) for _ in range(20)]
    assert [list(column) for column in zip(*together, strict=True)] == alone


def test_greedy_and_top_k_1_take_the_first_maximum():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    for params in (SamplingParams(), SamplingParams(temperature=5.0, top_k=1)):
        assert sample(logits, [TokenPicker.create(params)]) == [1]


def test_without_a_seed_two_streams_differ():
    logits = torch.zeros(1, 1000)
    first, second = (TokenPicker.create(SamplingParams(temperature=1.0)) for _ in range(2))
    assert [sample(logits, [first]) for _ in range(5)] != [sample(logits, [second]) for _ in range(5)]


def test_tiny_temperatures_are_almost_greedy():
    logits = torch.tensor([[1.0, 80.0, 79.0]])
    assert sample(logits, [TokenPicker.create(SamplingParams(temperature=1e-30, seed=0))]) == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_row_before_any_draw(bad):
    logits = torch.zeros(3, 10)
    logits[1, 3] = bad
    pickers = [TokenPicker.create(SamplingParams(temperature=1.0, seed=0)) for _ in range(3)]
    before = pickers[1].generator.get_state()
    first, failed, last = sample(logits, pickers)
    assert isinstance(failed, ComputationFailed)
    assert "not finite" in str(failed)
    assert torch.equal(pickers[1].generator.get_state(), before)
    alone = TokenPicker.create(SamplingParams(temperature=1.0, seed=0))
    assert [first] == [last] == sample(logits[:1], [alone])
