"""Embeddings by language models, against the hidden states of transformers."""

from __future__ import annotations

import pytest
import torch

from deployments.engines.llm.pooling import PooledStates
from deployments.engines.protocol import ComputationFailed, EngineError, TextRequest


def embed(engine, prompts, pooling, beside=()):
    """The embedding of each prompt, computed in the company of the requests `beside`."""
    for request in beside:
        engine.add_request(request)
    for i, prompt in enumerate(prompts):
        engine.add_request(TextRequest(f"e{i}", prompt, pooling=pooling))
    found = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.request_id.startswith("e"):
                assert delta.is_last
                assert (delta.token_ids, delta.num_completion_tokens, delta.finish_reason) == ((), 0, "stop")
                found[delta.request_id] = delta.embedding
        assert not engine.failures
    return [found[f"e{i}"] for i in range(len(prompts))]


def stock(model, prompt, pooling):
    """Return the embedding by transformers' hidden states of the last layer."""
    states = model.stock.model(torch.tensor([prompt])).last_hidden_state[0].double()
    vector = states.mean(0) if pooling == "mean" else states[-1]
    return (vector / vector.norm()).float()


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_they_are_those_of_transformers(family, pooling, tiny, prompt_of):
    model = tiny(family, 0)
    prompts = [prompt_of(length, seed=length) for length in (1, 9, 70, 200)]
    found = embed(model.engine(max_num_batched_tokens=64), prompts, pooling)
    for prompt, vector in zip(prompts, found, strict=True):
        torch.testing.assert_close(torch.from_numpy(vector), stock(model, prompt, pooling), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_neither_cuts_nor_company_nor_the_cache_change_a_bit(pooling, tiny, prompt_of, request_of, run_all):
    model = tiny("llama", 0)
    prompts = [prompt_of(length, seed=1) for length in (3, 40, 130)]
    alone = [embed(model.engine(is_deterministic=True), [prompt], pooling)[0] for prompt in prompts]
    texts = [request_of(f"t{i}", prompt_of(20 + i), max_tokens=30) for i in range(3)]
    for options in ({"max_num_batched_tokens": 17}, {"max_prefill_beside_decode": 5}, {}):
        engine = model.engine(is_deterministic=True, **options)
        for _ in range(2):  # the second time, from what is cached
            found = embed(engine, prompts, pooling, texts)
            assert all((one == other).all() for one, other in zip(found, alone, strict=True))
        assert engine._num_free_blocks == engine.num_blocks
        outcome = run_all(engine, [request_of("r", prompts[1], max_tokens=5)])["r"]
        assert outcome.token_ids == model.greedy(prompts[1], 5)
        assert outcome.deltas[0].num_cached_tokens == 32, "what an embedding computed serves completions"


def test_a_chunk_that_is_computed_again_counts_once():
    states = torch.randn(10, 4)
    pooled = PooledStates(10, "mean")
    pooled.note(0, states[:6])
    pooled.note(0, states[:6])
    pooled.note(4, states[4:])
    expected = torch.nn.functional.normalize(states.double().mean(0), dim=0).float()
    torch.testing.assert_close(torch.from_numpy(pooled.vector()), expected)
    bad = PooledStates(1, "last")
    bad.note(0, torch.full((1, 4), float("nan")))
    with pytest.raises(ComputationFailed, match="not finite"):
        bad.vector()


def test_what_is_no_embedding_is_refused(tiny, prompt_of):
    engine = tiny("llama", 0).engine()
    with pytest.raises(EngineError, match="n is 2 for an embedding"):
        engine.add_request(TextRequest("r", prompt_of(5), n=2, pooling="mean"))
    with pytest.raises(EngineError, match="expected fewer than 256"):
        engine.add_request(TextRequest("r", prompt_of(256), pooling="mean"))
