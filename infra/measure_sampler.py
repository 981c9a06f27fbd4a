"""Milliseconds that drawing a token of each of 16 rows of 128,256 logits takes, by what the requests wish.

`python infra/measure_sampler.py`. *Flat* logits leave ten thousands of tokens likely, *peaked* ones a single one.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from deployments.engines.llm.sampling import sampler
from deployments.engines.llm.sampling.token_picker import TokenPicker
from deployments.engines.records.protocol import SamplingParams

NUM_ROWS, VOCABULARY, REPETITIONS = 16, 128_256, 15
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-k 5,000": {"temperature": 1.0, "top_k": 5000},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "typical 0.9": {"temperature": 1.0, "typical_p": 0.9},
    "all of them": {"temperature": 0.8, "top_k": 100, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    "top-p and penalties": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "greedy, 20 log probabilities": {"num_logprobs": 20},
}


def sampled_ms(logits: torch.Tensor, wish: dict[str, Any]) -> float:
    """Return the median over some draws for requests that have drawn 500 tokens already."""
    pickers = [TokenPicker.create(SamplingParams(seed=i, **wish), range(500)) for i in range(NUM_ROWS)]
    times = []
    for _ in range(REPETITIONS):
        given = logits.clone()
        begin = time.perf_counter()
        sampler.sample(given, pickers)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(2)
    random = torch.Generator().manual_seed(0)
    flat = torch.randn(NUM_ROWS, VOCABULARY, generator=random) * 0.5
    peaked = torch.randn(NUM_ROWS, VOCABULARY, generator=random) * 2
    peaked[:, 77] += 18
    print("| wish | flat ms | peaked ms |\n|---|---|---|")
    for name, wish in WISHES.items():
        print(f"| {name} | {sampled_ms(flat, wish):.2f} | {sampled_ms(peaked, wish):.2f} |", flush=True)


if __name__ == "__main__":
    main()
