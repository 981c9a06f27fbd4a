"""Poolings of tokens into one vector, beside plain loops over the tokens that there are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from deployments.engines.text.known import ACTIVATIONS, POOLINGS, SOFTMAX, ScoringRule
from deployments.engines.text.sentence_layers import Pooling, scores_of

LENGTHS = (4, 1, 2)


def pooled(mode: str, rows: np.ndarray) -> np.ndarray:
    numbers = np.arange(1, len(rows) + 1)[:, None]
    means = {
        "cls": rows[0],
        "lasttoken": rows[-1],
        "max": rows.max(0),
        "mean": rows.sum(0) / len(rows),
        "mean_sqrt_len_tokens": rows.sum(0) / math.sqrt(len(rows)),
        "weightedmean": (rows * numbers).sum(0) / numbers.sum(),
    }
    return np.asarray(means[mode])


@pytest.mark.parametrize("mode", POOLINGS)
def test_a_pooling_reads_the_tokens_that_there_are(mode: str) -> None:
    hidden = seeded_rng().normal(size=(len(LENGTHS), max(LENGTHS), 5)).astype(np.float32)
    mask = np.array([[place < length for place in range(max(LENGTHS))] for length in LENGTHS], np.int64)
    found = Pooling((mode,))(torch.from_numpy(hidden), torch.from_numpy(mask))
    expected = np.stack([pooled(mode, row[:length]) for row, length in zip(hidden, LENGTHS, strict=True)])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    both = Pooling((mode, "cls"), normalize=True)(torch.from_numpy(hidden), torch.from_numpy(mask)).numpy()
    joined = np.concatenate([expected, hidden[:, 0]], -1)
    np.testing.assert_allclose(both, joined / np.linalg.norm(joined, axis=-1, keepdims=True), rtol=1e-5, atol=1e-6)
    empty = Pooling((mode,))(torch.from_numpy(hidden[:1]), torch.zeros(1, max(LENGTHS), dtype=torch.int64))
    assert empty.shape == (1, 5)


def test_scores_are_activated_as_their_rule_says() -> None:
    logits = np.array([1.0, -2.0, 0.5], np.float32)
    gelu = [value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in logits]
    formulas = logits, np.tanh(logits), np.maximum(logits, 0), gelu, 1 / (1 + np.exp(-logits))
    softmax = np.exp(logits) / np.exp(logits).sum()
    for name, values in (*zip(ACTIVATIONS, formulas, strict=True), (SOFTMAX, softmax)):
        found = scores_of(torch.from_numpy(logits).half(), ScoringRule(name, ()))
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.numpy(), values, rtol=1e-5, atol=1e-6)
