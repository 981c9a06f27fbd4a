"""The trained demo model, through the whole engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextRequest

ADDER = Path(__file__).resolve().parents[5] / "infra/demo/models/adder"


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return load_file(ADDER / "model.safetensors")


def test_the_adder_adds(tensors, run_all):
    engine = LLMEngine(ADDER, tensors, LLMEngineConfig())
    chats = {
        "12 + 7": [{"role": "user", "content": "What is 12 + 7?"}],
        "40 + 33": [{"role": "user", "content": "What is 40 + 33?"}],
        "0 + 1": [{"role": "user", "content": "What is 0 + 1?"}],
        "1+0": [{"role": "user", "content": "1+0"}],
        "second turn": [
            {"role": "user", "content": "What is 40 + 33?"},
            {"role": "assistant", "content": "73."},
            {"role": "user", "content": "What is 12 + 7?"},
        ],
    }
    requests = [
        TextRequest(name, engine.chats.encode(chat), SamplingParams(max_tokens=16)) for name, chat in chats.items()
    ]
    outcomes = run_all(engine, requests, (0, 1, 1, 2, 2))
    assert {name: outcome.text for name, outcome in outcomes.items()} == {
        "12 + 7": "19.",
        "40 + 33": "73.",
        "0 + 1": "1.",
        "1+0": "1.",
        "second turn": "19.",
    }
    assert {outcome.finish_reason for outcome in outcomes.values()} == {"stop"}
