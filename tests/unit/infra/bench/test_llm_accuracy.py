"""The distance of packed weights from float32 ones: the figure itself, and what the engine adds to it."""

from __future__ import annotations

import pytest
import torch

from infra.bench.command.peers import llama_cpp_python
from infra.bench.llm_accuracy import divergence, formatted_accuracy, measure_accuracy


def test_the_divergence_of_two_distributions() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [1.0, 1.0, 2.0]])
    other = torch.tensor([[0.25, 0.5, 0.25], [1.0, 1.0, 2.0]])
    expected = 0.5 * (0.5 * torch.log(torch.tensor(2.0)) - 0.25 * torch.log(torch.tensor(2.0)))
    assert divergence(reference.log() + 3, other.log() - 5) == pytest.approx(float(expected), rel=1e-6)
    assert divergence(reference, reference) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(llama_cpp_python() is None, reason="no llama-cpp-python: make judge-llama")
def test_ours_is_no_further_than_llama_cpp() -> None:
    """The bounds leave room for chance: the figures of BENCHMARKS.md are of more tokens."""
    rows = measure_accuracy(None, ["Q8_0", "Q4_K"], num_texts=4, num_tokens=64)
    for row in rows:
        assert row["atelier"]["arithmetic"] < 1.3 * row["llama.cpp"]["arithmetic"]
        assert row["atelier"]["kl"] < 1.15 * row["llama.cpp"]["kl"]
    assert "| Q4_K |" in formatted_accuracy(rows)
