from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from deployments.engines.llm.sampling import sampler
from deployments.engines.llm.sampling.sampler import SampledToken, sample
from deployments.engines.llm.sampling.token_picker import TokenPicker
from deployments.engines.native.building import built_library
from deployments.engines.native.library import Kernels, load_kernels
from deployments.engines.records.protocol import ComputationFailed, SamplingParams
from weights.platform.private_folder import cache_folder


def plain_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0):
    """Probabilities by the textbook, token by token, each filter over what the one before left."""
    values = [value / temperature for value in logits.tolist()]
    best = max(values)
    kept = {token: math.exp(value - best) for token, value in enumerate(values)}

    def shares():
        total = math.fsum(kept.values())
        return {token: weight / total for token, weight in kept.items()}

    def first(score, enough):
        order, left, mass = sorted(kept, key=score), {}, 0.0
        share = shares()
        for token in order:
            if mass >= enough:
                break
            left[token] = kept[token]
            mass += share[token]
        return left

    if top_k:
        kept = {token: kept[token] for token in sorted(kept, key=lambda token: -kept[token])[:top_k]}
    if top_p < 1:
        kept = first(lambda token: -kept[token], top_p)
    if min_p:
        most = max(kept.values())
        kept = {token: weight for token, weight in kept.items() if weight >= min_p * most}
    if typical_p < 1:
        share = shares()
        entropy = -math.fsum(p * math.log(p) for p in share.values() if p)
        kept = first(lambda token: abs(-math.log(share[token]) - entropy), typical_p)
    return shares()


@pytest.fixture(params=["native", "torch"])
def arithmetic(request, monkeypatch):
    """The compiled kernels, and what stands in for them."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "load_kernels", lambda: None)
    elif load_kernels() is None:
        pytest.skip("no compiled kernels here")


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "top_k": 7, "top_p": 0.6},
    {"temperature": 1.0, "top_k": 1000, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "typical_p": 0.5},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8},
]


def next_draw(picker: TokenPicker) -> float:
    """The number that the picker draws next, without drawing it."""
    copy = torch.Generator()
    copy.set_state(picker.generator.get_state())
    return float(torch.rand(1, generator=copy, dtype=torch.float64))


def picked(logits, *pickers: TokenPicker) -> list[int]:
    outcomes = sample(logits.clone(), pickers)
    assert all(isinstance(outcome, SampledToken) for outcome in outcomes)
    return [outcome.token_id for outcome in outcomes if isinstance(outcome, SampledToken)]


@pytest.mark.drawn(17)
@pytest.mark.parametrize("size", [40, 1000, 20_000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.usefixtures("arithmetic")
def test_a_draw_is_where_it_falls_in_the_plain_distribution(size, filters):
    generator = torch.Generator().manual_seed(size)
    for spread in (1.0, 4.0):
        logits = torch.randn(1, size, generator=generator) * spread
        expected = plain_distribution(logits[0].double(), **filters)
        token_ids = sorted(expected)
        sums = np.cumsum([expected[token] for token in token_ids])
        picker = TokenPicker.create(SamplingParams(seed=3, **filters))
        for _ in range(25):
            draw = next_draw(picker)
            (token,) = picked(logits, picker)
            lowest, highest = (min(np.searchsorted(sums, draw + e, "right"), len(sums) - 1) for e in (-1e-5, 1e-5))
            assert token in token_ids[lowest : highest + 1]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.usefixtures("arithmetic")
def test_the_filters_keep_what_those_of_transformers_keep(filters):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1)) * 2
    kept = logits.clone()
    ids = torch.zeros(1, 1, dtype=torch.long)
    kept = TemperatureLogitsWarper(filters["temperature"])(ids, kept)
    for name, warper in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
        ("typical_p", TypicalLogitsWarper),
    ):
        if name in filters:
            kept = warper(filters[name])(ids, kept)
    allowed = set(kept[0].isfinite().nonzero()[:, 0].tolist())
    assert allowed == set(plain_distribution(logits[0].double(), **filters))
    picker = TokenPicker.create(SamplingParams(seed=0, **filters))
    assert {picked(logits, picker)[0] for _ in range(300)} <= allowed


@pytest.mark.usefixtures("arithmetic")
def test_tokens_as_good_as_the_last_one_stay():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    picker = TokenPicker.create(SamplingParams(temperature=1.0, top_k=2, seed=0))
    assert {picked(logits, picker)[0] for _ in range(200)} == {1, 2, 3, 4}
    many = torch.zeros(1, 10_000)  # as good as each other, more than any number of candidates
    picker = TokenPicker.create(SamplingParams(temperature=1.0, top_k=2, seed=0))
    assert max(picked(many, picker)[0] for _ in range(200)) > 9000


def random_params(generator: np.random.Generator, number: int) -> SamplingParams:
    def either(value: Any, other: Any) -> Any:
        return value if generator.random() < 0.5 else other

    return SamplingParams(
        temperature=either(0.0, float(generator.uniform(0.05, 2)))
        if number % 4 == 0
        else float(generator.random() + 0.1),
        top_k=either(0, int(generator.integers(1, 400))),
        top_p=either(1.0, float(generator.uniform(0.1, 1))),
        min_p=either(0.0, float(generator.uniform(0, 0.3))),
        typical_p=either(1.0, float(generator.uniform(0.1, 1))),
        repetition_penalty=either(1.0, float(generator.uniform(0.5, 2))),
        frequency_penalty=either(0.0, float(generator.uniform(-2, 2))),
        presence_penalty=either(0.0, float(generator.uniform(-2, 2))),
        logit_bias=either((), ((5, 3.0), (7, -100.0))),
        seed=number,
        num_logprobs=either(None, int(generator.integers(0, 20))),
    )


def hard_logits(generator: np.random.Generator, size: int) -> list[np.ndarray]:
    """Rows with ties, forbidden tokens, one outlier, all but equal values, and huge ones."""
    coarse = generator.integers(-4, 5, size).astype(np.float32)
    outlier, forbidden = generator.normal(0, 1, (2, size))
    outlier[size // 3] = 60
    forbidden[generator.random(size) < 0.9] = -np.inf
    close = 1 + generator.random(size) * 1e-6
    huge = generator.choice([-3.3e36, 1.0, 3.3e36, 3.2e36], size)
    return [np.asarray(row, np.float32) for row in (coarse, outlier, forbidden, close, huge, np.zeros(size))]


@pytest.mark.drawn(2)
@pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("size", [7, 300, 5003, 20_011])
def test_the_kernels_draw_what_torch_draws(size, monkeypatch):
    generator = np.random.default_rng(size)
    drawn = []
    rows = hard_logits(generator, size) + list(generator.normal(0, 2, (6, size)).astype(np.float32))
    logits = torch.from_numpy(np.stack(rows))
    settings = [random_params(generator, 4 * number + 1) for number in range(8)]
    older = Kernels(built_library(cache_folder() / "native"), frozenset({"avx2", "fma", "f16c"}))
    for kernels in (load_kernels(), older, None):
        monkeypatch.setattr(sampler, "load_kernels", lambda kernels=kernels: kernels)
        found = []
        for params in settings:
            plain = SamplingParams(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                typical_p=params.typical_p,
                seed=params.seed,
            )
            pickers = [TokenPicker.create(plain, index=index) for index in range(len(rows))]
            found += [picked(logits, *pickers) for _ in range(4)]
        drawn.append(found)
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels here")
def test_a_sample_that_misleads_is_found_out(monkeypatch):
    """The tokens that the sample sees, 16 of each 512, are of another kind than all others."""
    size = 16_384
    generator = np.random.default_rng(5)
    is_seen = np.arange(size) % 512 < 16
    rows = []
    for seen, unseen in ((5.0, 0.0), (0.0, 5.0), (-20.0, 0.0), (8.0, -8.0)):
        row = generator.normal(0, 0.3, size) + np.where(is_seen, seen, unseen)
        row[77] = 6.0  # the greatest of one block
        rows.append(row.astype(np.float32))
    logits = torch.from_numpy(np.stack(rows))
    filters = [{"top_p": 0.3}, {"top_p": 0.95}, {"typical_p": 0.4}, {"typical_p": 0.9}, {"top_k": 600}, {"top_k": 9000}]
    drawn = []
    for kernels in (load_kernels(), None):
        monkeypatch.setattr(sampler, "load_kernels", lambda kernels=kernels: kernels)
        found = []
        for one in filters:
            pickers = [TokenPicker.create(SamplingParams(temperature=1.0, seed=4, **one), index=i) for i in range(4)]
            found += [picked(logits, *pickers) for _ in range(6)]
        drawn.append(found)
    assert drawn[0] == drawn[1]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("size", [50, 1280, 6000, 9001])
@pytest.mark.usefixtures("arithmetic")
def test_a_row_does_not_depend_on_its_company(size):
    generator = np.random.default_rng(size)
    all_params = [random_params(generator, number) for number in range(24)]
    prompts = [tuple(generator.integers(0, size, 30).tolist()) for _ in all_params]
    steps = [torch.from_numpy(generator.normal(0, 3, (24, size)).astype(np.float32)) for _ in range(4)]
    alone = []
    for row, (params, prompt) in enumerate(zip(all_params, prompts, strict=True)):
        picker, outcomes = TokenPicker.create(params, prompt), []
        for logits in steps:
            outcomes += sample(logits[row : row + 1].clone(), [picker])
            picker.advance(outcomes[-1].token_id)
        alone.append(outcomes)
    pickers = [TokenPicker.create(params, prompt) for params, prompt in zip(all_params, prompts, strict=True)]
    for number, logits in enumerate(steps):
        order = generator.permutation(24).tolist()
        together = sample(logits[order].clone(), [pickers[row] for row in order])
        for place, row in enumerate(order):
            assert together[place] == alone[row][number]
            pickers[row].advance(together[place].token_id)


def test_penalties_and_bias_are_the_plain_formulas():
    generator = np.random.default_rng(0)
    for number in range(30):
        logits = torch.from_numpy(generator.normal(0, 2, (1, 40)).astype(np.float32))
        prompt = generator.integers(0, 40, 8).tolist()
        completion = generator.integers(0, 40, 12).tolist()
        repetition, frequency, presence = generator.uniform(0.5, 2), *generator.uniform(-2, 2, 2)
        bias = {int(token): float(generator.uniform(-5, 5)) for token in generator.integers(0, 40, 4)}
        params = SamplingParams(
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
            logit_bias=tuple(bias.items()),
            seed=number,
        )
        picker = TokenPicker.create(params, prompt)
        for token in completion:
            picker.advance(token)
        expected = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + completion]), logits.clone())[0]
        for token in range(40):
            count = completion.count(token)
            expected[token] += bias.get(token, 0.0) - count * frequency - (count > 0) * presence
        changed = logits.clone()
        assert [o.token_id for o in sample(changed, [picker]) if isinstance(o, SampledToken)] == [
            int(expected.argmax())
        ]
        torch.testing.assert_close(changed[0], expected, atol=1e-5, rtol=1e-5)


def test_a_token_that_lies_too_many_deviations_below_the_best_is_never_drawn():
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(5)) * 4
    values = logits[0].numpy().astype(np.float64)
    expected = {token for token in range(40) if values[token] >= values.max() - 1.5 * values.std()}
    assert 3 < len(expected) < 30
    cut = TokenPicker.create(SamplingParams(temperature=50.0, seed=1, top_n_sigma=1.5, num_logprobs=0))
    whole = TokenPicker.create(SamplingParams(temperature=50.0, seed=1))
    drawn = []
    for _ in range(600):
        changed = logits.clone()
        drawn.append(sample(changed, [cut, whole]))
        assert torch.equal(changed[1], logits[1])
    assert {first.token_id for first, _ in drawn} == expected
    assert {second.token_id for _, second in drawn} == set(range(40))
    scores = torch.log_softmax(logits[0].double(), -1)
    assert drawn[0][0].logprob.logprob == pytest.approx(float(scores[drawn[0][0].token_id]), abs=1e-5)


def test_deviations_are_those_of_the_tokens_that_a_constraint_leaves():
    logits = torch.tensor([[9.0, 8.0, 0.0, -1.0, -200.0]])
    banned = SamplingParams(seed=0, temperature=1.0, top_n_sigma=1.0, logit_bias=((0, -float("inf")),))
    changed = logits.clone()
    sample(changed, [TokenPicker.create(banned)])
    left = np.array([8.0, 0.0, -1.0, -200.0])
    assert np.isfinite(changed[0].numpy()).tolist() == [False, *(left >= 8.0 - left.std()).tolist()]


def test_log_probabilities_are_those_of_the_model_whatever_is_done_to_it():
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2)) * 3
    expected = torch.log_softmax(logits.double(), -1)
    params = [
        SamplingParams(num_logprobs=5),
        SamplingParams(temperature=0.3, top_k=3, seed=1, num_logprobs=0, logit_bias=((11, 50.0),)),
        SamplingParams(temperature=1.5, seed=1),
    ]
    greedy, biased, silent = sample(logits.clone(), [TokenPicker.create(one) for one in params])
    assert greedy.logprob.token_id == greedy.token_id == int(logits[0].argmax())
    assert greedy.logprob.logprob == pytest.approx(float(expected[0].max()), abs=1e-5)
    values, ids = expected[0].topk(5)
    assert [token for token, _ in greedy.logprob.best] == ids.tolist()
    assert [value for _, value in greedy.logprob.best] == pytest.approx(values.tolist(), abs=1e-5)
    assert biased.token_id == 11
    assert biased.logprob.logprob == pytest.approx(float(expected[1, 11]), abs=1e-5)
    assert biased.logprob.best == ()
    assert silent.logprob is None


class OnlyThese:
    is_free = False

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed
        self.came: list[int] = []

    def fill_mask(self, mask) -> None:
        for token in self.allowed:
            mask[token // 32] |= np.int32(np.uint32(1 << (token % 32)).view(np.int32))

    def advance(self, token_id: int) -> None:
        self.came.append(token_id)


def test_a_constraint_leaves_its_tokens_only():
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    constraint = OnlyThese(31, 64, 99)
    free = TokenPicker.create(SamplingParams())
    bound = TokenPicker.create(SamplingParams(temperature=3.0, seed=1), constraint=constraint)
    found = {tuple(picked(logits, free, bound)) for _ in range(60)}
    assert found == {(int(logits[0].argmax()), token) for token in (31, 64, 99)}
    bound.advance(64)
    assert constraint.came == [64]
    (failed,) = sample(logits[:1].clone(), [TokenPicker.create(SamplingParams(), constraint=OnlyThese())])
    assert isinstance(failed, ComputationFailed)
    assert "fits the grammar" in str(failed)


@pytest.mark.drawn
@pytest.mark.parametrize("size", [200, 9001])
@pytest.mark.usefixtures("arithmetic")
def test_all_options_together_are_the_plain_formulas_one_after_the_other(size):
    """Penalties, biases, what a grammar allows, and filters, all drawn at random; eight rows in one call."""
    generator = np.random.default_rng(size)
    for _ in range(6):
        rows = generator.normal(0, 2, (8, size)).astype(np.float32)
        pickers, expected = [], []
        for number, logits in enumerate(rows):
            prompt, completion = (generator.integers(0, size, count).tolist() for count in (30, 12))
            repetition, frequency, presence = generator.uniform(0.7, 1.5), *generator.uniform(-1, 1, 2)
            bias = {int(token): float(generator.uniform(-5, 5)) for token in generator.integers(0, size, 4)}
            allowed = sorted(set(generator.integers(0, size, size // 2).tolist()))
            filters = {
                "temperature": float(generator.uniform(0.3, 1.5)),
                "top_k": int(generator.choice([0, 3, 40, 500])),
                "top_p": float(generator.choice([1.0, 0.5, 0.9])),
                "min_p": float(generator.choice([0.0, 0.01])),
                "typical_p": float(generator.choice([1.0, 0.7])),
            }
            params = SamplingParams(
                repetition_penalty=repetition,
                frequency_penalty=frequency,
                presence_penalty=presence,
                logit_bias=tuple(bias.items()),
                seed=number,
                **filters,
            )
            constraint = OnlyThese(*allowed) if number % 2 else None
            picker = TokenPicker.create(params, prompt, constraint=constraint)
            for token in completion:
                picker.advance(token)
            pickers.append(picker)
            wanted = torch.from_numpy(logits)[None].double()
            wanted = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + completion]), wanted)[0]
            for token in {*completion, *bias}:
                count = completion.count(token)
                wanted[token] += bias.get(token, 0.0) - count * frequency - (count > 0) * presence
            ids = allowed if constraint else range(size)
            found = plain_distribution(wanted[list(ids)], **filters)
            expected.append({ids[place]: share for place, share in found.items()})
        draws = [next_draw(picker) for picker in pickers]
        tokens = picked(torch.from_numpy(rows), *pickers)
        for token, draw, shares in zip(tokens, draws, expected, strict=True):
            token_ids = sorted(shares)
            sums = np.cumsum([shares[one] for one in token_ids])
            lowest, highest = (min(np.searchsorted(sums, draw + e, "right"), len(sums) - 1) for e in (-1e-4, 1e-4))
            assert token in token_ids[lowest : highest + 1]


def test_a_constraint_that_meets_logits_that_are_not_finite_is_not_blamed():
    logits = torch.full((1, 100), float("nan"))
    (failed,) = sample(logits, [TokenPicker.create(SamplingParams(), constraint=OnlyThese(3))])
    assert isinstance(failed, ComputationFailed)
    assert str(failed) == "the logits are not finite"


def test_completions_of_one_request_have_streams_of_their_own():
    logits = torch.zeros(1, 1000)
    streams = [TokenPicker.create(SamplingParams(temperature=1.0, seed=4), index=index) for index in (0, 1, 2, 1)]
    drawn = [[picked(logits, picker)[0] for _ in range(5)] for picker in streams]
    assert drawn[1] == drawn[3]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_greedy_and_top_k_1_take_the_first_maximum():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    for params in (SamplingParams(), SamplingParams(temperature=5.0, top_k=1)):
        assert picked(logits, TokenPicker.create(params)) == [1]
    long = torch.zeros(1, 1000)
    long[0, [300, 301, 700]] = 2.0
    assert picked(long, TokenPicker.create(SamplingParams())) == [300]


def test_without_a_seed_two_streams_differ():
    logits = torch.zeros(1, 1000)
    first, second = (TokenPicker.create(SamplingParams(temperature=1.0)) for _ in range(2))
    assert [picked(logits, first) for _ in range(5)] != [picked(logits, second) for _ in range(5)]


def test_tiny_temperatures_are_almost_greedy():
    logits = torch.tensor([[1.0, 80.0, 79.0]])
    for options in ({}, {"top_k": 2}, {"top_p": 0.9}):
        params = SamplingParams(temperature=1e-30, seed=0, **options)
        assert picked(logits, TokenPicker.create(params)) == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_row_before_any_draw(bad):
    logits = torch.zeros(3, 10)
    logits[1, 3] = bad
    pickers = [TokenPicker.create(SamplingParams(temperature=1.0, seed=0)) for _ in range(3)]
    before = pickers[1].generator.get_state()
    first, failed, last = sample(logits.clone(), pickers)
    assert isinstance(failed, ComputationFailed)
    assert "not finite" in str(failed)
    assert torch.equal(pickers[1].generator.get_state(), before)
    alone = TokenPicker.create(SamplingParams(temperature=1.0, seed=0))
    assert [first] == [last] == sample(logits[:1].clone(), [alone])
