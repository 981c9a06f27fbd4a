"""Completions of one request, prompts that begin alike, and prompts cut into chunks: the tokens are the same."""

from __future__ import annotations

import pytest
import torch

from deployments.engines.records.protocol import EngineError, TextRequest


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("qwen3", 3, head_dim=16)


def run_many(engine, requests):
    """Tokens by request and completion."""
    for request in requests:
        engine.add_request(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    ended = []
    while engine.has_work:
        for delta in engine.step():
            tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            if delta.is_last:
                ended.append(delta.request_id)
        assert not engine.failures
    assert sorted(ended) == sorted(request.request_id for request in requests)
    return tokens


@pytest.mark.parametrize("length", [5, 16, 33])
def test_completions_are_those_of_requests_of_their_own(length, model, prompt_of, request_of):
    sampling = request_of("r", prompt_of(length), max_tokens=30, temperature=1.0, seed=9).sampling
    engine = model.engine()
    many = run_many(engine, [TextRequest("r", prompt_of(length), sampling, n=4)])
    assert len(set(map(tuple, many.values()))) == 4
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    alone = run_many(model.engine(), [TextRequest("r", prompt_of(length), sampling)])
    assert many["r", 0] == alone["r", 0]
    fewer = run_many(model.engine(), [TextRequest("r", prompt_of(length), sampling, n=2)])
    assert many["r", 1] == fewer["r", 1]


def test_completions_come_through_preemption(model, prompt_of, request_of):
    sampling = request_of("r", (1,), max_tokens=40, temperature=1.0, seed=9).sampling
    requests = [TextRequest(str(i), prompt_of(20 + i), sampling, n=3) for i in range(3)]
    roomy, tight = model.engine(), model.engine(kv_cache_bytes=2 * 2 * 16 * 2 * 16 * 4 * 12)
    assert tight.stats().num_blocks == 12
    assert run_many(tight, requests) == run_many(roomy, requests)
    assert tight.stats().num_preemptions > 0
    assert tight.stats().num_free_blocks == 12


def test_completions_that_find_no_seat_are_those_that_find_one(model, prompt_of, request_of):
    sampling = request_of("r", (1,), max_tokens=12, temperature=1.0, seed=9).sampling
    requests = [TextRequest(str(i), prompt_of(20 + i), sampling, n=4) for i in range(3)]
    few = model.engine(max_num_seqs=4)
    assert run_many(few, requests) == run_many(model.engine(max_num_seqs=16), requests)
    assert few.stats().num_free_blocks == few.stats().num_blocks


def test_too_many_completions_are_refused(model, prompt_of):
    engine = model.engine(max_num_seqs=2)
    with pytest.raises(EngineError, match="n is 3; expected 1 to 2"):
        engine.add_request(TextRequest("r", prompt_of(5), n=3))


def test_an_aborted_request_leaves_nothing_before_and_after_it_forks(model, prompt_of, request_of):
    for steps in (0, 1, 3):
        engine = model.engine(max_num_batched_tokens=16)
        engine.add_request(TextRequest("r", prompt_of(20), request_of("r", (1,), max_tokens=9).sampling, n=3))
        for _ in range(steps):
            engine.step()
        engine.abort("r")
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        assert not engine.has_work
        assert engine.step() == []


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_prefix_hit_gives_the_same_tokens(is_deterministic, model, prompt_of, request_of):
    """A conversation: each turn begins with the turns before it and their answers."""
    cached = model.engine(is_deterministic=is_deterministic, max_num_batched_tokens=64)
    prompt = prompt_of(50)
    for turn in range(4):
        options = {"max_tokens": 20, "temperature": 0.8, "seed": turn, "num_logprobs": 3}
        requests = [request_of("r", prompt, **options)]
        expected, found = [], []
        for engine, deltas in ((model.engine(max_num_batched_tokens=33), expected), (cached, found)):
            engine.add_request(requests[0])
            while engine.has_work:
                deltas += engine.step()
        assert [delta.token_ids for delta in found] == [delta.token_ids for delta in expected]
        if is_deterministic:  # bit for bit
            assert [delta.logprob for delta in found] == [delta.logprob for delta in expected]
        assert (found[0].num_cached_tokens > 0) == (turn > 0)
        if turn and not is_deterministic:
            assert found[0].num_cached_tokens >= len(prompt) - 20 - 16 - 5  # the answer is found, too
        prompt = (*prompt, *(token for delta in found for token in delta.token_ids), *prompt_of(5, turn))


@pytest.mark.drawn
@pytest.mark.parametrize("budget", [16, 24, 64, 100, 512])
def test_cuts_and_preemption_change_no_bit(budget, model, prompt_of, request_of):
    """On a processor whose matrix products treat rows alike, which `test_parity` looks at."""
    prompts = [prompt_of(length) for length in (70, 130, 9, 64, 65)]
    requests = [request_of(str(i), prompt, max_tokens=25, num_logprobs=2) for i, prompt in enumerate(prompts)]

    def logprobs(engine, given):
        for request in given:
            engine.add_request(request)
        found: dict[str, list] = {}
        while engine.has_work:
            for delta in engine.step():
                found.setdefault(delta.request_id, []).append(delta.logprob)
        return found

    alone = {}
    for request in requests:
        alone |= logprobs(model.engine(), [request])
    tight = model.engine(max_num_batched_tokens=budget, kv_cache_bytes=2 * 2 * 16 * 2 * 16 * 4 * 20)
    together = logprobs(tight, requests)
    if budget >= 64:
        assert tight.stats().num_preemptions > 0
    weight = model.tensors["lm_head.weight"]
    rows = torch.randn(64, 32)
    assert torch.equal(rows[:4] @ weight.T, (rows @ weight.T)[:4]) is False or together == alone
