"""Log probabilities of a prompt's own tokens, against transformers: whatever is cached, cut, preempted or adapted."""

from __future__ import annotations

import pytest
import torch
from unit.deployments.engines.llm.test_llm_loras import save_lora

from deployments.engines.llm import model_runner
from deployments.engines.records.protocol import SamplingParams, TextLora, TextRequest
from weights.operations.adapters import load_adapter


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama", 3)


def ask(id_: str, prompt, *, n: int = 1, num_logprobs: int = 3, max_tokens: int = 2, loras=()) -> TextRequest:
    params = SamplingParams(max_tokens=max_tokens, num_logprobs=num_logprobs)
    return TextRequest(id_, tuple(prompt), params, n=n, loras=loras, scores_prompt=True)


def check_scores(stock, prompt, found, num_best: int = 3) -> None:
    rows = stock(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    assert [one.token_id for one in found] == list(prompt)
    assert found[0].logprob is None
    assert found[0].best == ()
    for row, one in zip(rows[:-1], found[1:], strict=True):
        assert one.logprob == pytest.approx(row[one.token_id].item(), abs=1e-4)
        values, ids = row.topk(num_best)
        assert [token for token, _ in one.best] == ids.tolist()
        assert [value for _, value in one.best] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [16, 100, 512])
def test_they_are_those_of_transformers_however_a_prompt_is_cut(budget, model, run_all, prompt_of):
    prompts = [prompt_of(length) for length in (1, 2, 17, 130, 64, 65)]
    requests = [ask(str(i), prompt) for i, prompt in enumerate(prompts)]
    outcomes = run_all(model.engine(max_num_batched_tokens=budget), requests, (0, 0, 1, 1, 2, 3))
    for i, prompt in enumerate(prompts):
        first, *others = outcomes[str(i)].deltas
        check_scores(model.stock, prompt, first.prompt_logprobs)
        assert not any(other.prompt_logprobs for other in others)
        assert outcomes[str(i)].token_ids == model.greedy(prompt, 2)


def test_a_prompt_that_is_cached_is_scored_again_and_cached_again(model, run_all, prompt_of):
    engine, prompt = model.engine(), prompt_of(50)
    plain = TextRequest("plain", prompt, SamplingParams(max_tokens=1))
    assert run_all(engine, [plain])["plain"].deltas[0].num_cached_tokens == 0
    (delta,) = run_all(engine, [ask("scored", prompt, max_tokens=1)])["scored"].deltas
    check_scores(model.stock, prompt, delta.prompt_logprobs)
    assert delta.num_cached_tokens == 0
    assert run_all(engine, [plain])["plain"].deltas[0].num_cached_tokens == 48
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_completions_of_one_prompt_each_have_them(model, prompt_of):
    engine, prompt = model.engine(), prompt_of(33)
    engine.add_request(ask("r", prompt, n=3))
    firsts: dict[int, tuple] = {}
    while engine.has_work:
        for delta in engine.step():
            firsts.setdefault(delta.index, delta.prompt_logprobs)
    assert set(firsts) == {0, 1, 2}
    for found in firsts.values():
        check_scores(model.stock, prompt, found)


def test_preemption_loses_none(model, run_all, prompt_of):
    prompts = [prompt_of(length) for length in (60, 90, 40)]
    tight = model.engine(max_num_batched_tokens=32, kv_cache_bytes=2 * 2 * 16 * 2 * 8 * 4 * 14)
    outcomes = run_all(tight, [ask(str(i), prompt, max_tokens=40) for i, prompt in enumerate(prompts)])
    assert tight.stats().num_preemptions > 0
    for i, prompt in enumerate(prompts):
        check_scores(model.stock, prompt, outcomes[str(i)].deltas[0].prompt_logprobs)


def test_those_of_a_lora_are_peft_s_beside_rows_without_one(model, run_all, prompt_of, tmp_path):
    adapted = save_lora(tmp_path, model, ["lm_head", "q_proj", "down_proj"], 1)
    lora = TextLora("lora", load_adapter(tmp_path))
    prompts = [prompt_of(length) for length in (20, 45, 80)]
    requests = [ask(str(i), prompt, loras=(lora,) if i else ()) for i, prompt in enumerate(prompts)]
    outcomes = run_all(model.engine(max_num_batched_tokens=64), requests)
    for i, prompt in enumerate(prompts):
        check_scores(adapted if i else model.stock, prompt, outcomes[str(i)].deltas[0].prompt_logprobs)


def test_only_a_few_rows_of_logits_are_in_memory_at_once(model, run_all, prompt_of, monkeypatch):
    monkeypatch.setattr(model_runner, "ROWS_AT_ONCE", 16)
    engine, sizes = model.engine(), []
    head = engine._runner._model.module.lm_head
    handle = head.register_forward_hook(lambda _module, args, _output: sizes.append(len(args[0])))
    prompt = prompt_of(130)
    (delta,) = run_all(engine, [ask("r", prompt, max_tokens=1)])["r"].deltas
    handle.remove()
    check_scores(model.stock, prompt, delta.prompt_logprobs)
    assert max(sizes) <= 16
