"""JSON schemas: whatever the model, every answer parses and validates, checked by an independent validator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.grammar import MAX_SCHEMA_CHARS
from deployments.engines.protocol import ComputationFailed, EngineError, SamplingParams, TextRequest

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    POINT,
    {"type": "array", "items": POINT, "minItems": 1, "maxItems": 2},
    {"enum": ["red", "green", 3, None]},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "size": {"enum": [1, 2]},
                    "left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
                "required": ["size", "left"],
                "additionalProperties": False,
            }
        },
    },
)


@pytest.fixture
def engine(tiny: Callable[..., Any]) -> LLMEngine:
    made: LLMEngine = tiny(seed=random.randrange(100), max_position_embeddings=512).engine(max_num_seqs=16)
    return made


def constrained(engine: LLMEngine, name: str, schema: dict[str, Any], *, n: int = 1, **sampling: Any) -> TextRequest:
    prompt = engine.encode_text(f"a request of {name}")
    return TextRequest(name, prompt, SamplingParams(**sampling), n, engine.grammars.compile_schema(schema))


def test_every_answer_is_a_document_of_its_own_schema(engine: LLMEngine, run_all: Callable[..., Any]) -> None:
    seed = random.randrange(1000)
    requests = [
        constrained(engine, f"{number} {temperature}", schema, temperature=temperature, seed=seed, max_tokens=400)
        for number, schema in enumerate(SCHEMAS)
        for temperature in (0.0, 1.5)
    ]
    free = TextRequest("free", engine.encode_text("free"), SamplingParams(max_tokens=20, temperature=0))
    outcomes = run_all(engine, [*requests, free], [*(number % 5 for number in range(len(requests))), 2])
    num_whole = 0
    for request, schema in zip(requests, [schema for schema in SCHEMAS for _ in range(2)], strict=True):
        outcome = outcomes[request.request_id]
        if outcome.finish_reason == "stop":
            Draft202012Validator(schema).validate(json.loads(outcome.text))
            num_whole += 1
        else:  # only spaces and trees may go on for long
            assert outcome.finish_reason == "length"
    assert num_whole >= len(requests) // 2
    run_all(engine, [free])
    assert not engine.has_work


def test_completions_of_one_prompt_keep_to_the_schema_each(engine: LLMEngine) -> None:
    engine.add_request(constrained(engine, "r", POINT, n=8, temperature=2.0, seed=random.randrange(99), max_tokens=300))
    texts, reasons = [""] * 8, [""] * 8
    while engine.has_work:
        for delta in engine.step():
            texts[delta.index] += delta.text
            reasons[delta.index] = delta.finish_reason or ""
    whole = [text for text, reason in zip(texts, reasons, strict=True) if reason == "stop"]
    assert len(whole) >= 4
    for text in whole:
        Draft202012Validator(POINT).validate(json.loads(text))
    assert len(set(texts)) > 1


@pytest.mark.parametrize("vocab_size", [240, 300])  # fewer and more than the 260 of the tokenizer
def test_models_may_have_another_number_of_tokens_than_their_tokenizer(
    vocab_size: int, tiny: Callable[..., Any], run_all: Callable[..., Any]
) -> None:
    engine = tiny(seed=3, vocab_size=vocab_size).engine()
    request = constrained(engine, "r", {"enum": ["red", "green"]}, temperature=2.0, seed=1, max_tokens=100)
    assert json.loads(run_all(engine, [request])["r"].text) in ("red", "green")


def test_a_token_that_the_grammar_does_not_go_on_with_is_told(engine: LLMEngine) -> None:
    grammar = engine.grammars.compile_schema(POINT)
    first, second = engine.encode_text("{x")
    other = grammar.fork()
    grammar.advance(first)
    with pytest.raises(ComputationFailed, match="the grammar ends"):
        grammar.advance(second)
    other.advance(first)  # where it was forked from went on without it


def test_the_end_of_an_answer_inside_a_document_is_told(engine: LLMEngine, run_all: Callable[..., Any]) -> None:
    outcomes = run_all(engine, [constrained(engine, "short", POINT, max_tokens=4, temperature=0)])
    assert (outcomes["short"].finish_reason, len(outcomes["short"].token_ids)) == ("length", 4)
    stopped = run_all(engine, [constrained(engine, "stop", POINT, max_tokens=400, temperature=0, stop=('"on"', '"x"'))])
    assert stopped["stop"].finish_reason == "stop"
    assert stopped["stop"].text.strip() == "{"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_that_could_go_on_ends_with_an_end_token_or_at_its_bound(
    engine: LLMEngine, run_all: Callable[..., Any], ignore_eos: bool
) -> None:
    schema = {"type": "integer"}  # more digits may follow each
    request = constrained(engine, "r", schema, max_tokens=30, temperature=1.0, seed=1, ignore_eos=ignore_eos)
    outcome = run_all(engine, [request])["r"]
    assert isinstance(json.loads(outcome.text), int)
    assert outcome.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible"),
        ({"type": "thing"}, "cannot be compiled: .*thing"),
        ({"enum": []}, "empty"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "string", "pattern": "("}, "regex parse error: unclosed group"),
        ({"$ref": "#"}, "no document fits"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no document fits"),
        ({"enum": ["\ud800"]}, "cannot be compiled"),
        ({"type": "object", "properties": {"a": {"not": {"type": "integer"}}}}, "not"),
        ({"enum": ["x" * MAX_SCHEMA_CHARS]}, "characters; expected"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused(engine: LLMEngine, schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        engine.grammars.compile_schema(schema)


@pytest.mark.parametrize("depth", [200, 3000])
def test_a_schema_that_nests_without_end_is_refused(engine: LLMEngine, depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(EngineError, match="schema"):
        engine.grammars.compile_schema(schema)


def test_a_mask_that_lets_nothing_through_is_the_requests_failure(engine: LLMEngine) -> None:
    class Nothing:
        is_complete = False

        def fork(self) -> Nothing:
            return self

        def fill_mask(self, mask: Any) -> None:
            mask[:] = 0

        def advance(self, token_id: int) -> None: ...

    prompt = engine.encode_text("x")
    engine.add_request(TextRequest("none", prompt, SamplingParams(max_tokens=5), 1, Nothing()))
    engine.add_request(TextRequest("free", prompt, SamplingParams(max_tokens=5)))
    deltas, failures = [], {}
    while engine.has_work:
        deltas += engine.step()
        failures |= engine.failures
    assert isinstance(failures.pop("none"), ComputationFailed)
    assert not failures
    assert [delta.request_id for delta in deltas] == ["free"] * 5


@pytest.mark.parametrize("option", ["frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"])
def test_options_that_change_logits_work_on_those_of_a_model(
    engine: LLMEngine, run_all: Callable[..., Any], option: str
) -> None:
    value: Any = ((70, 100.0),) if option == "logit_bias" else 1.5
    prompt = engine.encode_text("hello")
    outcome = run_all(engine, [TextRequest("r", prompt, SamplingParams(max_tokens=9, **{option: value}))])["r"]
    assert (outcome.finish_reason, len(outcome.token_ids)) == ("length", 9)
    assert option != "logit_bias" or set(outcome.token_ids) == {70}
