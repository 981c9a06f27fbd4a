"""Small rules of language models: rows of heads, windows of attention, states that live in modules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from deployments.engines.llm.footprints import StepTwin
from deployments.engines.llm.loras import _interleaved
from deployments.engines.llm.models import own_cache
from deployments.engines.llm.models.own_cache import SequenceState, _in_modules
from deployments.engines.llm.perplexity import _Attend


@pytest.mark.parametrize("shape", [(12,), (12, 5)])
def test_rows_of_halves_become_neighbouring_pairs(shape: tuple[int, ...]) -> None:
    rows, heads = torch.from_numpy(seeded_rng().normal(size=shape)), 2
    found, size = _interleaved(rows, heads), shape[0] // heads
    for head in range(heads):
        for place in range(size // 2):
            for half in (0, 1):
                own = rows[head * size + half * size // 2 + place]
                assert torch.equal(found[head * size + 2 * place + half], own)


@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_a_window_has_so_many_tokens_the_last_one_included(window: int) -> None:
    rng = seeded_rng()
    length, heads, size = 7, 2, 4
    q, k, v = (rng.normal(size=(length, heads, size)).astype(np.float32) for _ in range(3))
    found = _Attend((5, window))(1, *(torch.from_numpy(one) for one in (q, k, v)))
    for token in range(length):
        first = max(0, token + 1 - window) if window else 0
        for head in range(heads):
            scores = k[first : token + 1, head] @ q[token, head] / math.sqrt(size)
            shares = np.exp(scores - scores.max())
            expected = shares / shares.sum() @ v[first : token + 1, head]
            np.testing.assert_allclose(found[token, head].numpy(), expected, rtol=1e-4, atol=1e-5)


class Keeping(torch.nn.Module):
    """A module with a state beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: object = None
        self.inner = torch.nn.Linear(1, 1)


def test_a_sequences_states_are_in_the_modules_for_as_long_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_cache, "IN_MODULES", {"Keeping": ("kept",)})
    module, one, other = Keeping(), SequenceState(), SequenceState()
    for state, name in ((one, "one"), (other, "other")):
        with _in_modules(module, state):
            assert module.kept is None
            module.kept = name
        assert module.kept is None
    with _in_modules(module, one):
        assert module.kept == "one"
    with pytest.raises(KeyError), _in_modules(module, other):
        raise KeyError
    assert module.kept is None
    assert (one.in_modules, other.in_modules) == (["one"], ["other"])
    with _in_modules(module.inner, SequenceState()) as _:
        pass


@pytest.mark.parametrize(
    ("num_tokens", "spans"),
    [(0, []), (3, [(7, 10)]), (10, [(0, 10)]), (20, [(0, 10)] * 2), (25, [(0, 10), (0, 10), (5, 10)])],
)
def test_planned_prompts_are_the_ends_of_the_longest(num_tokens: int, spans: list[tuple[int, int]]) -> None:
    assert StepTwin._prompts(num_tokens, 10) == spans
