"""The lengths that a model reads: scaled rotary frequencies, prompts that are too long, texts to embed that are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors
from unit.deployments.engines.llm.conftest import build, byte_tokenizer

from deployments.engines.records.protocol import EngineError, PromptTooLong, SamplingParams, TextRequest
from deployments.records import EmbeddingRequest
from deployments.records.errors import InvalidRequest
from deployments.services.text_prompts import embedding_requests


@pytest.mark.parametrize(
    ("family", "rope", "longest"),
    [
        ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}, 256),
        ("llama", {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, 256),
        ("llama", {"rope_type": "default", "rope_theta": 1e4}, 64),
        ("qwen2", {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}, 64),
    ],
)
def test_scaled_frequencies_reach_as_far_as_their_scaling(
    family: str, rope: dict[str, Any], longest: int, tmp_path: Path, run_all: Callable[..., Any]
) -> None:
    model = build(tmp_path, family, 0, max_position_embeddings=64, rope_parameters=rope)
    engine = model.engine(kv_cache_bytes=2**22)
    assert engine.max_model_len == longest
    prompt = tuple(4 + (7 * i) % 250 for i in range(longest - 4))
    (outcome,) = run_all(engine, [TextRequest("r", prompt, SamplingParams(max_tokens=4, temperature=0.0))]).values()
    assert list(outcome.token_ids) == model.greedy(prompt, 4)
    with pytest.raises(EngineError, match=f"expected 2 to {longest}"):
        model.engine(kv_cache_bytes=2**22, max_model_len=longest + 1)


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_agents_read(tiny: Callable[..., Any]) -> None:
    engine = tiny(max_position_embeddings=64).engine()
    expected = r"prompt is too long: 64 tokens > 63 maximum .*maximum context length is 64 tokens"
    with pytest.raises(PromptTooLong, match=expected):
        engine.add_request(TextRequest("r", tuple(range(4, 68))))
    engine.add_request(TextRequest("r", tuple(range(4, 68)), pooling="last"))  # of which nothing is to be written


def test_a_prompt_that_the_cache_is_too_small_for_names_the_setting(tiny: Callable[..., Any]) -> None:
    model = tiny(max_position_embeddings=4096)
    engine = next(
        one for one in (model.engine(kv_cache_bytes=2**size) for size in range(13, 24)) if one.max_model_len > 64
    )
    most = engine.max_model_len
    assert most < 4096
    with pytest.raises(PromptTooLong, match=f"is {most} tokens, as kv_cache_bytes allows of its 4096"):
        engine.add_request(TextRequest("r", (4,) * most))


@pytest.mark.parametrize("size", [10, 62, 63, 64, 150])
def test_a_text_to_embed_keeps_its_end_token_when_it_is_cut(size: int, tmp_path: Path) -> None:
    model = build(tmp_path, "qwen3", 0, max_position_embeddings=64, head_dim=16)
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save_pretrained(model.folder)
    engine = model.engine()
    text = "The quick brown fox jumps. " * 10
    text = text[:size]
    (request,), warnings = embedding_requests(engine, EmbeddingRequest(model="m", input=(text,)))
    expected = tokenizer(text, truncation=True, max_length=64)["input_ids"]
    assert list(request.prompt_token_ids) == expected
    assert len(warnings) == (size > 63)
    engine.add_request(request)
    (vector,) = [delta.embedding for _ in range(8) if engine.has_work for delta in engine.step() if delta.is_last]
    with torch.no_grad():
        state = model.stock.model(torch.tensor([expected])).last_hidden_state[0, -1]
    np.testing.assert_allclose(vector, torch.nn.functional.normalize(state, dim=0).numpy(), atol=1e-5)
    refused = EmbeddingRequest(model="m", input=(text,), long_text="error")
    if size > 63:
        with pytest.raises(InvalidRequest, match=r"input 0 has .* tokens, and the model takes 64"):
            embedding_requests(engine, refused)
