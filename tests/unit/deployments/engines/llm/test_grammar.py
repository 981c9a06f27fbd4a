"""JSON schemas: whatever the model, every answer parses and validates, checked by an independent validator."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field

from deployments.engines.llm import grammar
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.schemas import MAX_SCHEMA_CHARS, left_out_of, prepare_schema
from deployments.engines.records.protocol import ComputationFailed, EngineError, SamplingParams, TextRequest

VOCABULARY_SIZE = 260  # of conftest's models
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
    begun = engine.grammars.compile_schema(POINT)
    first, second = engine.encode_text("{x")
    other = begun.fork()
    begun.advance(first)
    with pytest.raises(ComputationFailed, match="the grammar ends"):
        begun.advance(second)
    with pytest.raises(ComputationFailed, match="the grammar ends"):
        begun.fill_mask(np.zeros(len(engine.tokenizer) // 32 + 1, np.int32))
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
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "members of oneOf may overlap; use anyOf"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "one of 4 constants at most"),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3}, "no document fits"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused(engine: LLMEngine, schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        engine.grammars.compile_schema(schema)


def test_a_large_schema_is_refused_before_anything_grows_with_it() -> None:
    """Members times properties, and orders of constants, are more than what was sent."""
    tags = {f"p{number}": {"const": 1} for number in range(1500)}
    union = {"oneOf": [{"properties": tags}, *({"properties": {"q": {}}} for _ in range(1000))]}
    begin = time.process_time()
    assert prepare_schema(union) == union
    unique = {"type": "array", "items": {"enum": [1, 2, 3, 4]}, "uniqueItems": True}
    prepare_schema({"prefixItems": [unique] * 850})
    assert time.process_time() - begin < 5  # of tenths
    with pytest.raises(EngineError, match="characters; expected 65536 at most"):
        prepare_schema({"enum": ["x" * MAX_SCHEMA_CHARS]})


def optional(count: int) -> dict[str, Any]:
    properties = {f"p{number}": {"type": "integer"} for number in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


@pytest.mark.drawn
@pytest.mark.parametrize(
    "schema",
    [
        optional(1500),
        {"type": "object", "properties": {"a": optional(1500)}, "required": ["a"], "additionalProperties": False},
        {"type": "string", "pattern": "^(a?){500}a{500}$"},
    ],
)
def test_a_schema_that_compiles_and_cannot_run_is_refused_before_the_prompt_is_computed(
    engine: LLMEngine, schema: dict[str, Any]
) -> None:
    with pytest.raises(EngineError, match="too complex to be kept to"):
        engine.grammars.compile_schema(schema)


def test_a_schema_that_becomes_too_complex_on_the_way_is_the_clients_mistake(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar, "_rehearse", lambda text: None)
    engine.add_request(constrained(engine, "r", optional(1500), max_tokens=50))
    failures: dict[str, Exception] = {}
    while engine.has_work:
        engine.step()
        failures |= engine.failures
    assert isinstance(failures["r"], EngineError)
    assert "too complex to be kept to" in str(failures["r"])
    assert not any(record.exc_info for record in caplog.records)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: Annotated[str, Field(pattern="^[a-z]{1,3}$")]


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    sizes: set[Literal["s", "m", "l"]]
    website: Annotated[str, Field(pattern="^[a-z]{2}$", json_schema_extra={"format": "iri"})]


@pytest.mark.parametrize("num_answers", [1, pytest.param(12, marks=pytest.mark.long)])
def test_what_pydantic_writes_of_unions_and_sets_is_kept_to(
    engine: LLMEngine, run_all: Callable[..., Any], num_answers: int
) -> None:
    schema = Owner.model_json_schema()
    assert "oneOf" in json.dumps(schema)
    assert "uniqueItems" in json.dumps(schema)
    seed = random.randrange(1000)
    print("seed", seed)
    for number in range(num_answers):
        request = constrained(engine, str(number), schema, temperature=2.0, seed=seed + number, max_tokens=400)
        outcome = run_all(engine, [request])[str(number)]
        if outcome.finish_reason == "stop":
            Owner.model_validate_json(outcome.text)
            Draft202012Validator(schema).validate(json.loads(outcome.text))


@pytest.mark.parametrize(
    ("schema", "documents", "others"),
    [
        (
            {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 1},
            ["[1]", "[2,1]", "[3,1,2]"],
            ["[]", "[1,1]", "[2,1,2]", "[1,2,3,1]"],
        ),
        (
            {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
            ["[]", "[true,false]", "[false]"],
            ["[true,true]"],
        ),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, ["[7,7]"], ["7"]),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1}, ["[7]"], ["[7,7]"]),
        ({"type": "string", "format": "color"}, ['"no color"'], ["3"]),
        (
            {"type": "object", "properties": {"format": {"const": "color"}}, "additionalProperties": False},
            ['{"format":"color"}', "{}"],
            ['{"format":"other"}'],
        ),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"a": {"const": value}}, "additionalProperties": False}
                    for value in (1, 2)
                ]
            },
            ['{"a":1}', '{"a":2}'],
            ["{}", '{"a":3}'],
        ),
    ],
)
def test_what_the_standard_says_of_rare_words(
    engine: LLMEngine, schema: dict[str, Any], documents: list[str], others: list[str]
) -> None:
    """The validator judges the examples as well: {} fits both members of that oneOf, so it is none of its documents."""

    def fits(document: str) -> bool:
        constraint = engine.grammars.compile_schema(schema)
        try:
            for token in engine.encode_text(document):
                constraint.advance(token)
        except ComputationFailed:
            return False
        mask = np.zeros(-(-VOCABULARY_SIZE // 32), np.int32)
        constraint.fill_mask(mask)
        return constraint.is_complete or bool(mask[0] >> 1 & 1)  # token 1 ends a text

    for document, expected in [*((one, True) for one in documents), *((one, False) for one in others)]:
        assert Draft202012Validator(schema).is_valid(json.loads(document)) is expected, document
        assert fits(document) is expected, document


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

        is_free = False

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


@pytest.mark.parametrize(
    ("schema", "left_out", "fits", "misfits"),
    [
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer"}, (), ["7"], ['"a"']),
        ({"$schema": "nowhere", "type": "object", "propertyNames": {"type": "string"}}, (), ["{}"], ["1"]),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, ("propertyNames",), ['{"b": 1}'], ["1"]),
        ({"type": "string", "pattern": "^(?=a)b"}, ("pattern '^(?=a)b'",), ['"x"'], ["1"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, (), ["7", "-7"], ['"a"', "1.5"]),
        (
            {"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "integer"}}, "required": ["b"]},
            (),
            ['{"b": 1}'],
            ['{"a": 1, "b": 1}'],
        ),
        (
            {"type": ["array", "null"], "uniqueItems": True, "items": {"enum": ["x", "y"]}},
            (),
            ["null", "[]", '["x"]', '["y", "x"]'],
            ['["x", "x"]', "1"],
        ),
    ],
)
def test_what_no_grammar_keeps_to_is_left_out_by_its_name(
    schema: dict[str, Any], left_out: tuple[str, ...], fits: list[str], misfits: list[str]
) -> None:
    assert left_out_of(schema) == left_out
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(prepare_schema(schema)))
    for text, expected in [*((one, True) for one in fits), *((one, False) for one in misfits)]:
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        taken = matcher.try_consume_tokens(list(text.encode()))
        assert (taken == len(text.encode()) and matcher.is_accepting()) is expected, text
