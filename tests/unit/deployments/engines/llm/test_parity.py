"""Greedy tokens and logits against transformers, on the same weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch.nn import functional as F

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.llm.scheduler import Scheduler
from deployments.engines.llm.sequences.block_manager import BlockPool
from deployments.engines.llm.sequences.sequence import Sequence
from deployments.engines.nn.batch_invariant import settled_rows

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 8}

CASES = {
    "llama-0": ("llama", 0, {}),
    "llama-1": ("llama", 1, {}),
    "llama-2-one-kv-head": ("llama", 2, {"num_key_value_heads": 1}),
    "llama-3-no-gqa": ("llama", 3, {"num_key_value_heads": 4}),
    "llama-tied": ("llama", 4, {"tie_word_embeddings": True}),
    "llama-head-dim": ("llama", 5, {"head_dim": 12}),
    "llama-biases": ("llama", 6, {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", 7, {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", 8, {"rope_parameters": LINEAR}),
    "llama-yarn-rope": ("llama", 9, {"rope_parameters": YARN}),
    "qwen2-0": ("qwen2", 0, {}),
    "qwen2-tied": ("qwen2", 1, {"tie_word_embeddings": True}),
    "qwen3-0": ("qwen3", 0, {"head_dim": 16}),
    "qwen3-tied": ("qwen3", 1, {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral-window": ("mistral", 0, {"sliding_window": 16, "head_dim": 8}),
    "mistral-wide-window": ("mistral", 1, {"sliding_window": 75, "head_dim": 8}),
    "mistral-no-window": ("mistral", 2, {"sliding_window": None, "head_dim": 8}),
    "qwen2-windows": ("qwen2", 2, {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "mixtral": ("mixtral", 0, {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20}),
    "qwen3_moe": ("qwen3_moe", 0, {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe-sparse": ("qwen3_moe", 1, {**EXPERTS, "decoder_sparse_step": 2}),
}
LENGTHS = (1, 3, 17, 33, 70, 5)
JOIN_AT = (0, 0, 2, 2, 5, 9)
NUM_TOKENS = (20, 8, 12, 16, 6, 9)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers_in_a_ragged_batch(case, tiny, run_all, prompt_of, request_of):
    family, seed, overrides = CASES[case]
    model = tiny(family, seed, **overrides)
    prompts = [prompt_of(length, seed) for length in LENGTHS]
    requests = [
        request_of(str(i), prompt, max_tokens=num_tokens)
        for i, (prompt, num_tokens) in enumerate(zip(prompts, NUM_TOKENS, strict=True))
    ]
    outcomes = run_all(model.engine(), requests, JOIN_AT)
    for request, prompt, num_tokens in zip(requests, prompts, NUM_TOKENS, strict=True):
        assert outcomes[request.request_id].token_ids == model.greedy(prompt, num_tokens)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", ["llama-0", "qwen2-0", "qwen3-0"])
def test_greedy_tokens_equal_transformers_alone(case, tiny, run_all, prompt_of, request_of):
    family, seed, overrides = CASES[case]
    model = tiny(family, seed, **overrides)
    for length, num_tokens in zip(LENGTHS, NUM_TOKENS, strict=True):
        prompt = prompt_of(length, seed)
        outcomes = run_all(model.engine(), [request_of("r", prompt, max_tokens=num_tokens)])
        assert outcomes["r"].token_ids == model.greedy(prompt, num_tokens)


@pytest.mark.parametrize("budget", [7, 16, 40])
def test_prompts_longer_than_the_budget_run_in_chunks(budget, tiny, run_all, prompt_of, request_of):
    model = tiny("llama", 0)
    prompts = [prompt_of(length) for length in (50, 12, 71)]
    requests = [request_of(str(i), prompt, max_tokens=6) for i, prompt in enumerate(prompts)]
    outcomes = run_all(model.engine(max_num_batched_tokens=budget), requests, (0, 0, 3))
    for request, prompt in zip(requests, prompts, strict=True):
        assert outcomes[request.request_id].token_ids == model.greedy(prompt, 6)


def test_an_old_config_with_rope_scaling_is_understood(tiny, run_all, prompt_of, request_of, tmp_path):
    model = tiny("llama", 8, rope_parameters=LINEAR)
    folder = shutil.copytree(model.folder, tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    (folder / "config.json").write_text(json.dumps(config))
    outcomes = run_all(
        LLMEngine(folder, model.tensors, LLMEngineConfig()), [request_of("r", prompt_of(17), max_tokens=9)]
    )
    assert outcomes["r"].token_ids == model.greedy(prompt_of(17), 9)


@pytest.mark.drawn
@pytest.mark.parametrize("case", ["mistral-window", "qwen2-windows", "mixtral", "qwen3_moe"])
def test_windows_and_experts_do_not_let_company_in(case, tiny, run_all, prompt_of, request_of):
    family, seed, overrides = CASES[case]
    model = tiny(family, seed, **overrides)
    prompts = [prompt_of(length, 7) for length in (100, 40, 3, 70)]
    requests = [request_of(str(i), prompt, max_tokens=30, num_logprobs=1) for i, prompt in enumerate(prompts)]
    together = run_all(model.engine(max_num_batched_tokens=24), requests, (0, 1, 4, 9))
    for request in requests:
        alone = run_all(model.engine(), [request])[request.request_id]
        for ours, theirs in zip(alone.deltas, together[request.request_id].deltas, strict=True):
            assert ours.logprob == theirs.logprob  # the same floats, bit for bit


def runner_logits(model, prompts, budget=2048):
    """The logits after each prompt, computed in one engine step, or more where the budget asks for it."""
    loaded = create_model(load_config(model.folder), model.tensors, torch.device("cpu"))
    scheduler = Scheduler(BlockPool(64), max_num_seqs=64, max_num_batched_tokens=budget)
    runner = ModelRunner(loaded, 64)
    for i, prompt in enumerate(prompts):
        scheduler.add_sequence(Sequence(str(i), list(prompt), len(prompt)))
    found = {}
    while scheduler.num_waiting:
        chunks = scheduler.schedule().chunks
        rows = iter(runner.run(chunks))
        for chunk in chunks:
            scheduler.complete(chunk, None)
            if chunk.is_last:
                found[chunk.sequence.request_id] = next(rows)
                scheduler.finish(chunk.sequence)
        assert next(rows, None) is None, "a row for each token that has logits"
    return torch.stack([found[str(i)] for i in range(len(prompts))])


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_close_to_transformers(case, tiny, prompt_of):
    family, seed, overrides = CASES[case]
    model = tiny(family, seed, **overrides)
    prompts = [prompt_of(length, seed) for length in (1, 9, 40)]
    expected = torch.stack([model.stock(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    for budget in (2048, 16):
        torch.testing.assert_close(runner_logits(model, prompts, budget), expected, atol=2e-5, rtol=1e-4)


def test_bfloat16_logits_are_close_to_transformers(tiny, prompt_of):
    model = tiny("llama", 1)
    halved = type(model)(model.folder, model.stock, {n: t.bfloat16() for n, t in model.tensors.items()})
    prompts = [prompt_of(length) for length in (1, 9, 40)]
    logits = runner_logits(halved, prompts)
    assert logits.dtype is torch.float32
    expected = torch.stack([model.stock(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    torch.testing.assert_close(logits, expected, atol=0.1, rtol=0.05)


def test_logits_do_not_depend_on_company(tiny, prompt_of):
    """Bit for bit where this CPU's matrix product treats rows alike in every batch; to rounding elsewhere."""
    model = tiny("qwen3", 0, head_dim=16)
    weight, rows = model.tensors["lm_head.weight"], torch.randn(64, 32)
    is_exact = all(
        torch.equal(F.linear(rows[:n], weight), F.linear(rows, weight)[:n])
        for n in range(settled_rows(), 64, settled_rows())
    )
    prompts = [prompt_of(length) for length in (1, 2, 15, 16, 17, 40)]
    together = runner_logits(model, prompts)
    for prompt, row in zip(prompts, together, strict=True):
        alone = runner_logits(model, [prompt])[0]
        torch.testing.assert_close(alone, row, atol=0 if is_exact else 1e-5, rtol=0)
