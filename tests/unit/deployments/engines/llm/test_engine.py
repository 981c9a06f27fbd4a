"""The engine as a caller sees it: text, ends, aborts, limits, failures."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import ComputationFailed, EngineError, SamplingParams, TextRequest

SMALL_CACHE = 10 * 2 * 2 * 16 * 2 * 8 * 4  # 10 blocks of the tiny Llama


def clean_text(tokenizer, prompt, token_ids):
    """The text that a whole completion adds to its prompt."""
    before = tokenizer.decode(list(prompt), skip_special_tokens=True)
    return tokenizer.decode([*prompt, *token_ids], skip_special_tokens=True)[len(before) :]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama", 0)


def test_deltas_add_up(model, run_all, request_of):
    engine = model.engine()
    prompt = engine.encode_text("Hello there")
    outcome = run_all(engine, [request_of("r", prompt, max_tokens=30)])["r"]
    assert outcome.finish_reason == "length"
    assert [delta.num_completion_tokens for delta in outcome.deltas] == list(range(1, 31))
    assert {delta.num_prompt_tokens for delta in outcome.deltas} == {len(prompt)}
    assert outcome.text == clean_text(engine.tokenizer, prompt, outcome.token_ids)
    assert not engine.has_work
    assert engine.step() == []


def test_max_tokens_is_clipped_to_what_fits(model, run_all, request_of, prompt_of):
    engine = model.engine(max_model_len=40)
    outcome = run_all(engine, [request_of("r", prompt_of(33), max_tokens=1000)])["r"]
    assert len(outcome.token_ids) == 7
    assert outcome.finish_reason == "length"
    assert outcome.token_ids == model.greedy(prompt_of(33), 7)


@pytest.mark.parametrize("as_list", [False, True])
def test_eos_of_the_generation_config_ends_the_text(as_list, model, run_all, request_of, prompt_of, tmp_path):
    expected = model.greedy(prompt_of(9), 12)
    eos = expected[5]
    end = expected.index(eos) + 1
    folder = shutil.copytree(model.folder, tmp_path / "eos")
    value = [eos, 1] if as_list else eos
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    engine = LLMEngine(folder, model.tensors, LLMEngineConfig())
    requests = [
        request_of("ends", prompt_of(9), max_tokens=12),
        request_of("ignores", prompt_of(9), max_tokens=12, ignore_eos=True),
        request_of("at the limit", prompt_of(9), max_tokens=end),
    ]
    outcomes = run_all(engine, requests)
    assert outcomes["ends"].token_ids == expected[:end]
    assert outcomes["ends"].finish_reason == "stop"
    assert outcomes["ends"].text == clean_text(engine.tokenizer, prompt_of(9), expected[: end - 1])
    assert outcomes["ignores"].token_ids == expected
    assert outcomes["ignores"].finish_reason == "length"
    assert outcomes["at the limit"].finish_reason == "stop"


def test_eos_falls_back_to_the_config(model, run_all, request_of, prompt_of, tmp_path):
    expected = model.greedy(prompt_of(9), 12)
    folder = shutil.copytree(model.folder, tmp_path / "eos")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": expected[3]}
    (folder / "config.json").write_text(json.dumps(config))
    outcome = run_all(
        LLMEngine(folder, model.tensors, LLMEngineConfig()), [request_of("r", prompt_of(9), max_tokens=12)]
    )["r"]
    assert outcome.token_ids == expected[: expected.index(expected[3]) + 1]


def test_stop_strings_across_token_borders(tiny, run_all, request_of, prompt_of):
    engine = tiny("llama", 1).engine()  # one token per byte: any string of two characters crosses a border
    free = run_all(engine, [request_of("r", prompt_of(5), max_tokens=40)])["r"]
    stop = free.text[6:9]
    at = free.text.index(stop)
    requests = [
        request_of("stops", prompt_of(5), max_tokens=40, stop=(stop, "never in this text")),
        request_of("almost", prompt_of(5), max_tokens=40, stop=(free.text[-4:] + "!",)),
    ]
    outcomes = run_all(engine, requests)
    assert outcomes["stops"].text == free.text[:at]
    assert outcomes["stops"].finish_reason == "stop"
    assert len(outcomes["stops"].token_ids) < 40
    assert outcomes["almost"].text == free.text  # what was held back comes at the end
    assert outcomes["almost"].finish_reason == "length"


def test_only_rows_that_a_token_is_drawn_of_go_through_the_head(model, prompt_of, request_of, monkeypatch):
    engine = model.engine(max_num_batched_tokens=64)
    module, multiple, rows = engine._runner._model.module, engine._runner._row_multiple, []
    plain = module.logits
    monkeypatch.setattr(module, "logits", lambda hidden: rows.append(len(hidden)) or plain(hidden))
    engine.add_request(request_of("long", prompt_of(150), max_tokens=6))
    assert engine.step() == []
    assert rows == []
    for name, length in (("short", 9), ("other", 20)):
        engine.add_request(request_of(name, prompt_of(length), max_tokens=6))
    while engine.has_work:
        rows.clear()
        num_drawn = len(engine.step())
        assert rows == [-(-num_drawn // multiple) * multiple]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_abort_frees_all_blocks(steps, model, request_of, prompt_of):
    engine = model.engine()
    for i, length in enumerate((5, 40, 17)):
        engine.add_request(request_of(str(i), prompt_of(length), max_tokens=50))
    for _ in range(steps):
        engine.step()
    engine.abort("1")
    engine.abort("1")
    engine.abort("never heard of")
    assert {delta.request_id for delta in engine.step()} == {"0", "2"}
    engine.abort("0")
    engine.abort("2")
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert (engine.has_work, engine.stats().num_running, engine.stats().num_waiting) == (False, 0, 0)
    engine.add_request(request_of("1", prompt_of(5), max_tokens=3))  # the id is free again


def test_abort_in_the_middle_of_a_long_prompt(model, run_all, request_of, prompt_of):
    engine = model.engine(max_num_batched_tokens=16)
    engine.add_request(request_of("long", prompt_of(100)))
    assert engine.step() == []
    assert engine.stats().num_free_blocks < engine.stats().num_blocks
    engine.abort("long")
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert run_all(engine, [request_of("r", prompt_of(9), max_tokens=4)])["r"].token_ids == model.greedy(
        prompt_of(9), 4
    )


def test_preemption_gives_the_same_tokens(model, run_all, request_of, prompt_of):
    requests = [request_of(f"greedy {i}", prompt_of(length), max_tokens=60) for i, length in enumerate((20, 30, 9, 25))]
    requests.append(request_of("seeded", prompt_of(14), max_tokens=60, temperature=1.0, seed=3))
    join_at = (0, 0, 1, 3, 4)
    roomy = model.engine()
    tight = model.engine(kv_cache_bytes=SMALL_CACHE, max_num_batched_tokens=64)
    assert tight.stats().num_blocks == 10
    expected, found = run_all(roomy, requests, join_at), run_all(tight, requests, join_at)
    assert roomy.stats().num_preemptions == 0
    assert tight.stats().num_preemptions >= 2
    assert {i: o.token_ids for i, o in found.items()} == {i: o.token_ids for i, o in expected.items()}
    assert {i: o.text for i, o in found.items()} == {i: o.text for i, o in expected.items()}
    assert tight.stats().num_free_blocks == 10


def test_the_same_seed_gives_the_same_text_in_any_company(model, run_all, request_of, prompt_of):
    options = {"max_tokens": 25, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 11}
    alone = run_all(model.engine(), [request_of("r", prompt_of(9), **options)])["r"]
    company = [request_of(f"c{i}", prompt_of(3 + 11 * i), max_tokens=20, temperature=1.0) for i in range(5)]
    batched = run_all(model.engine(), [*company, request_of("r", prompt_of(9), **options)], (0, 0, 2, 5, 9, 3))["r"]
    other = run_all(model.engine(), [request_of("r", prompt_of(9), **(options | {"seed": 12}))])["r"]
    assert batched.token_ids == alone.token_ids
    assert batched.text == alone.text
    assert other.token_ids != alone.token_ids


def test_top_k_1_equals_greedy(model, run_all, request_of, prompt_of):
    outcome = run_all(model.engine(), [request_of("r", prompt_of(9), max_tokens=20, temperature=2.0, top_k=1)])["r"]
    assert outcome.token_ids == model.greedy(prompt_of(9), 20)


def test_seats_are_limited(model, request_of, prompt_of):
    engine = model.engine(max_num_seqs=2)
    for i in range(3):
        engine.add_request(request_of(str(i), prompt_of(5), max_tokens=4))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 1)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((), {}, "empty"),
        (tuple([5] * 256), {}, "256 tokens; expected fewer than 256"),
        ((5, 260), {}, "token id 260 .* 0 to 259"),
        ((-1,), {}, "token id -1"),
        ((5,), {"max_tokens": 0}, "max_tokens is 0"),
        ((5,), {"temperature": -0.1}, "temperature is -0.1"),
        ((5,), {"temperature": float("nan")}, "temperature is nan"),
        ((5,), {"top_p": 0.0}, "top_p is 0.0"),
        ((5,), {"top_p": 1.1}, "top_p is 1.1"),
        ((5,), {"top_k": -1}, "top_k is -1"),
        ((5,), {"seed": 2**64}, "seed is 18446744073709551616"),
        ((5,), {"stop": ("",)}, "stop is"),
    ],
)
def test_bad_requests_are_refused(prompt, sampling, message, model):
    engine = model.engine()
    with pytest.raises(EngineError, match=message):
        engine.add_request(TextRequest("r", prompt, SamplingParams(**sampling)))
    assert not engine.has_work


def test_a_duplicate_id_is_refused(model, request_of):
    engine = model.engine()
    engine.add_request(request_of("twice", (5,)))
    with pytest.raises(EngineError, match="'twice'"):
        engine.add_request(request_of("twice", (6,)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_bytes": 100}, "kv_cache_bytes is 100"),
        ({"max_model_len": 257}, "257, expected 2 to 256"),
        ({"max_model_len": 1}, "1, expected 2 to 256"),
        ({"max_model_len": 200, "kv_cache_bytes": SMALL_CACHE}, "max_model_len 200 needs"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
    ],
)
def test_bad_limits_are_refused(options, message, model):
    with pytest.raises(EngineError, match=message):
        model.engine(**options)


def test_the_cache_bounds_the_length(model):
    assert model.engine().max_model_len == 256
    assert model.engine(kv_cache_bytes=SMALL_CACHE).max_model_len == 160


def test_chat_and_text_are_encoded_as_the_tokenizer_does(model):
    engine = model.engine()
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "?"},
    ]
    expected = engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert engine.chats.encode(chat) == tuple(expected)
    assert engine.encode_text("Hi é") == tuple(engine.tokenizer("Hi é")["input_ids"])
    with pytest.raises(EngineError, match="unknown role robot"):
        engine.chats.encode([{"role": "robot", "content": "beep"}])


def test_half_a_surrogate_pair_is_refused_wherever_it_comes_from(model):
    engine = model.engine()
    message = [{"role": "user", "content": "Hi \ud83d"}]
    for encode in (lambda: engine.encode_text("a \udc00 b"), lambda: engine.chats.encode(message)):
        with pytest.raises(EngineError, match="an unpaired surrogate"):
            encode()
    assert engine.encode_text("\U0001f44d")  # a whole pair in JSON is one character here


def test_a_tokenizer_without_template_refuses_chat(model, make_byte_tokenizer, tmp_path):
    folder = shutil.copytree(model.folder, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    make_byte_tokenizer(chat_template=None).save_pretrained(folder)
    with pytest.raises(EngineError, match="no chat template"):
        LLMEngine(folder, model.tensors, LLMEngineConfig()).chats.encode([{"role": "user", "content": "Hi"}])


class FailingRunner:
    """Fails whenever a certain request is in the step."""

    def __init__(self, runner, request_id):
        self.runner, self.request_id = runner, request_id

    def run(self, chunks, check):
        if any(chunk.sequence.request_id == self.request_id for chunk in chunks):
            raise RuntimeError("the model is broken")
        return self.runner.run(chunks, check)


def test_a_failing_request_ends_alone(model, request_of, prompt_of, monkeypatch):
    engine = model.engine()
    for request_id, length in (("good", 9), ("bad", 20), ("also good", 5)):
        engine.add_request(request_of(request_id, prompt_of(length), max_tokens=6))
    first = {delta.request_id: delta for delta in engine.step()}
    monkeypatch.setattr(engine, "_runner", FailingRunner(engine._runner, "bad"))
    second = {delta.request_id: delta for delta in engine.step()}
    assert set(second) == {"good", "also good"}
    assert isinstance(engine.failures["bad"], ComputationFailed)
    assert str(engine.failures["bad"]) == "the model failed after 1 tokens: the model is broken"
    tokens = {i: [*first[i].token_ids, *second[i].token_ids] for i in ("good", "also good")}
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
    assert tokens == {"good": model.greedy(prompt_of(9), 6), "also good": model.greedy(prompt_of(5), 6)}
    assert engine.failures == {}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_logits_that_are_not_finite_end_the_request(model, request_of, prompt_of):
    broken = dict(model.tensors)
    broken["model.norm.weight"] = broken["model.norm.weight"] * float("nan")
    engine = LLMEngine(model.folder, broken, LLMEngineConfig())
    engine.add_request(request_of("r", prompt_of(4), temperature=1.0))
    assert engine.step() == []
    assert isinstance(engine.failures["r"], ComputationFailed)
    assert "after 0 tokens: the logits are not finite" in str(engine.failures["r"])
    assert not engine.has_work


def test_text_that_cannot_be_made_ends_its_request_alone(model, request_of, prompt_of, monkeypatch):
    engine = model.engine()
    for request_id, length in (("good", 9), ("bad", 20), ("also good", 5)):
        engine.add_request(request_of(request_id, prompt_of(length), max_tokens=3))
    monkeypatch.setattr(engine._requests["bad"][0].decoder, "feed", lambda token_id: 1 / 0)
    first = {delta.request_id: delta for delta in engine.step()}
    assert {name: delta.finish_reason for name, delta in first.items()} == {"good": None, "also good": None}
    assert isinstance(engine.failures["bad"], ComputationFailed)
    assert "after 1 tokens: division by zero" in str(engine.failures["bad"])
    tokens = {name: list(first[name].token_ids) for name in ("good", "also good")}
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
    assert tokens == {"good": model.greedy(prompt_of(9), 3), "also good": model.greedy(prompt_of(5), 3)}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


class SpoilingRunner:
    """The logits of a certain request are not finite; counts forwards, and has room for so many chunks."""

    def __init__(self, runner, request_id=None, room=10**6):
        self.runner, self.request_id, self.room = runner, request_id, room
        self.sizes = []
        self.failed = 0

    def run(self, chunks, check):
        self.sizes.append(len(chunks))
        if len(chunks) > self.room:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        logits = self.runner.run(chunks, check).clone()
        last = [chunk for chunk in chunks if chunk.is_last]
        for row, chunk in enumerate(last):
            if chunk.sequence.request_id == self.request_id:
                logits[row] = float("nan")
        return logits


def test_logits_of_one_request_that_are_not_finite_end_it_alone(model, request_of, prompt_of, monkeypatch):
    """And nobody's forward runs again for it."""
    engine = model.engine()
    for request_id, length in (("good", 9), ("bad", 20), ("also good", 5)):
        engine.add_request(request_of(request_id, prompt_of(length), max_tokens=6))
    runner = SpoilingRunner(engine._runner, "bad")
    monkeypatch.setattr(engine, "_runner", runner)
    tokens = {"good": [], "bad": [], "also good": []}
    failures = []
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
        failures += engine.failures
    assert runner.sizes == [3, 2, 2, 2, 2, 2]
    assert failures == ["bad"]
    expected = {"good": model.greedy(prompt_of(9), 6), "bad": [], "also good": model.greedy(prompt_of(5), 6)}
    assert tokens == expected
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_step_that_finds_no_memory_is_tried_once(model, run_all, request_of, prompt_of, monkeypatch):
    engine = model.engine()
    requests = [request_of(str(i), prompt_of(5 + i), max_tokens=20) for i in range(16)]
    requests.append(request_of("seeded", prompt_of(14), max_tokens=20, temperature=1.0, seed=3))
    expected = run_all(model.engine(), requests)
    runner = SpoilingRunner(engine._runner, room=8)
    monkeypatch.setattr(engine, "_runner", runner)
    found = run_all(engine, requests)
    assert {i: o.token_ids for i, o in found.items()} == {i: o.token_ids for i, o in expected.items()}
    assert runner.failed == 2, "once for prompts, once for tokens"
    assert len(runner.sizes) - runner.failed == 20 * 3
