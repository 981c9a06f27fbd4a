"""Tokens that are proposed from the text so far: a plain search judges what, an engine without them the answers."""

from __future__ import annotations

import random

import pytest
from kit.drawing import seeds
from kit.scripted_llm import BEGIN, save_scripted_llm

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.sequences.prompt_lookup import FIRST, LENGTHS, LONGEST_PAUSE, MOST, WINDOW, PromptLookup
from deployments.engines.records.protocol import TextRequest


def searched(tokens: list[int], most: int) -> tuple[int, ...]:
    """Return the tokens behind the last place of the last tokens, found by looking at every place."""
    for length in LENGTHS:
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                going_on = list(tokens)
                for place in range(end, end + most):
                    going_on.append(going_on[place])
                return tuple(going_on[len(tokens) :])
    return ()


@seeds(50)
def test_proposals_are_what_a_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
    subject = PromptLookup(1000)
    for _ in range(30):
        assert subject.propose(tokens, 3) == searched(tokens, 3)
        tokens += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]


def test_no_more_is_proposed_than_may_follow() -> None:
    tokens = [1, 2, 3] * 9
    assert len(PromptLookup(1000).propose(tokens, 16)) == FIRST
    assert len(PromptLookup(1000).propose(tokens, 2)) == 2
    assert len(PromptLookup(len(tokens) + 3).propose(tokens, 16)) == 2  # one is drawn in any case
    assert PromptLookup(len(tokens) + 1).propose(tokens, 16) == ()
    assert PromptLookup(1000).propose(tokens, 0) == ()


def test_as_many_are_proposed_as_were_right_and_none_for_a_while_where_none_was() -> None:
    tokens, subject = [1, 2, 3] * 20, PromptLookup(10_000)
    lengths = []
    for _ in range(4):
        lengths.append(len(subject.propose(tokens, 100)))
        subject.note(lengths[-1], lengths[-1])
    assert lengths == [FIRST, 2 * FIRST, MOST, MOST]
    subject.note(MOST, 2)
    assert len(subject.propose(tokens, 100)) == 3
    pauses = []
    for _ in range(9):
        subject.note(3, 0)
        pauses.append(0)
        while not subject.propose(tokens, 100):
            pauses[-1] += 1
    assert pauses == [1, 2, 4, 8, 16, 32, *[LONGEST_PAUSE] * 3]
    subject.note(1, 1)
    assert subject.propose(tokens, 100)


def test_the_index_of_a_long_prompt_has_its_end() -> None:
    tokens = [*range(WINDOW + 50), 7, 8, 9]
    subject = PromptLookup(10**6)
    assert subject.propose(tokens, 4) == ()
    assert len(subject._ends) <= len(LENGTHS) * WINDOW


def answers(engine, requests):
    """Return tokens, texts, log probabilities and ends by request and completion, and the number of steps."""
    for request in requests:
        engine.add_request(request)
    found: dict[tuple[str, int], list] = {}
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        for delta in engine.step():
            own = found.setdefault((delta.request_id, delta.index), [])
            own.append((delta.token_ids, delta.text, delta.finish_reason, delta.num_completion_tokens))
            if delta.logprob is not None:
                own[-1] += (delta.logprob.token_id, pytest.approx(delta.logprob.logprob, abs=1e-3))
        assert not engine.failures
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return found, num_steps


@pytest.mark.drawn
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_answers_are_the_same_in_fewer_steps(tiny, request_of, prompt_of, family):
    model = tiny(family)
    parts = [prompt_of(6, number) for number in range(3)]
    requests = []
    for number in range(6):
        prompt = tuple(token for _ in range(random.randrange(1, 5)) for token in random.choice(parts))
        options = {"max_tokens": random.randrange(1, 60), "seed": number, "num_logprobs": random.choice([None, 0])}
        if number % 3 == 2:
            options |= {"temperature": 0.3, "top_k": 3}
        if number % 3 == 1:
            options |= {"repetition_penalty": 1.05}
        sampling = request_of("r", prompt, **options).sampling
        requests.append(TextRequest(str(number), prompt, sampling, n=1 + number % 2))
    expected, num_steps = answers(model.engine(), requests)
    found, fewer = answers(model.engine(prompt_lookup=True), requests)
    assert found == expected
    assert fewer <= num_steps


def test_a_text_that_repeats_its_prompt_takes_a_fraction_of_the_steps(tmp_path, request_of):
    pieces = [f"word {number} " for number in range(120)]
    tensors = save_scripted_llm(tmp_path, pieces, "{{ messages }}" + BEGIN)
    plain, looking = (
        LLMEngine(tmp_path, tensors, LLMEngineConfig(prompt_lookup=looks_up)) for looks_up in (False, True)
    )
    prompt = [256 + number for number in range(len(pieces))]  # behind those of the bytes
    request = request_of("r", [*prompt, *plain.encode_text(BEGIN)], max_tokens=200)
    expected, num_steps = answers(plain, [request])
    assert "".join(text for _, text, *_ in expected["r", 0]) == "".join(pieces)
    found, fewer = answers(looking, [request])
    assert found == expected
    assert num_steps == 121
    assert fewer < num_steps / 2.5


def test_answers_are_the_same_where_blocks_run_out(tiny, request_of, prompt_of):
    model = tiny("qwen3", 3, head_dim=16)
    requests = [request_of(str(i), prompt_of(7, i) * 3, max_tokens=40, ignore_eos=True) for i in range(4)]
    tight = model.engine(prompt_lookup=True, kv_cache_bytes=2 * 2 * 16 * 2 * 16 * 4 * 9)
    found, _ = answers(tight, requests)
    assert tight.stats().num_preemptions > 0
    assert found == answers(model.engine(), requests)[0]


def test_a_request_that_goes_leaves_nothing(tiny, request_of, prompt_of):
    engine = tiny("llama").engine(prompt_lookup=True)
    engine.add_request(request_of("r", prompt_of(8) * 3, max_tokens=100, ignore_eos=True))
    for _ in range(9):
        engine.step()
    engine.abort("r")
    assert engine.step() == []
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
