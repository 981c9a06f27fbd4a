"""Answers that are held to an expression, to some texts or to a grammar, whatever the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.scripted_llm import BEGIN, save_scripted_llm

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.records import ChatRequest, CompletionRequest
from deployments.records.errors import InvalidRequest
from deployments.services.text_prompts import text_requests

GBNF = 'root ::= "yes " digit\ndigit ::= [0-9]'
LARK = 'start: "yes " DIGIT\nDIGIT: /[0-9]/'

EMPTY = {"anyOf": [{"type": "object", "additionalProperties": False}, {"type": "array", "maxItems": 0}]}
TAG = {"type": "tag", "begin": "<f=", "content": {"type": "json_schema", "json_schema": EMPTY}, "end": "/>"}
CALLS = {"type": "tags_with_separator", "tags": [TAG], "separator": ""}
IN_ORDER = {
    "type": "sequence",
    "elements": [
        {"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "const_string", "value": "b"}]},
        {"type": "regex", "pattern": "-[0-9]{2}"},
        {"type": "tag", "begin": "<x>", "content": {"type": "regex", "pattern": "[^<]{0,3}"}, "end": "</x>"},
    ],
}
LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=", "schema": {"const": 7}, "end": "/>"},
        {"begin": "<g=", "schema": {"const": 8}, "end": "/>"},
    ],
    "triggers": ["<"],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    folder: Path = tmp_path_factory.mktemp("model")
    tensors = save_scripted_llm(folder, ["ok"], "{{ messages }}{# </think> #}" + BEGIN + "{{ begun }}")
    return LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=2**22))


def written(engine: LLMEngine, request: Any) -> str:
    (made,), _ = text_requests(engine, request)
    engine.add_request(made)
    text = ""
    while engine.has_work:
        text += "".join(delta.text for delta in engine.step())
    assert not engine.failures
    return text


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-f]{2,4}/x"}, "[a-f]{2,4}/x"),
        ({"regex": r"^\d{3}\/\d$"}, r"\d{3}/\d"),
        ({"choice": ["red", 'the "other" one']}, 'red|the "other" one'),
        ({"grammar": GBNF}, "yes [0-9]"),
        ({"grammar": LARK}, "yes [0-9]"),
        ({"structural_tag": {"type": "structural_tag", "format": CALLS}}, r"(<f=(\{\s*\}|\[\s*\])/>)*"),
        ({"structural_tag": {"format": IN_ORDER}}, r"(a|b)-[0-9]{2}<x>[^<]*</x>"),
        (
            {"structural_tag": {"format": CALLS | {"at_least_one": True, "stop_after_first": True}}},
            r"<f=(\{\s*\}|\[\s*\])/>",
        ),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 5}}, "[345]"),
    ],
)
def test_an_answer_keeps_to_its_form(engine: LLMEngine, form: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        options = {"model": "m", "temperature": 2.0, "seed": seed, "max_tokens": 60, "top_k": 0, "answer_grammar": form}
        chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **options})
        assert re.fullmatch(pattern, written(engine, chat))
        assert re.fullmatch(pattern, written(engine, CompletionRequest.model_validate({"prompt": "a", **options})))
    thinking = chat.model_copy(update={"chat_template_kwargs": {"begun": "<think>\n"}, "max_tokens": 40})
    (made,), use = text_requests(engine, thinking)
    assert use is not None
    assert use.begun == "<think>"
    assert made.constraint is not None


@pytest.mark.parametrize("form", [{"regex": "(a"}, {"grammar": "root = ???"}, {"grammar": "a: b"}, {"regex": "(?=a)b"}])
def test_what_is_no_form_is_refused_by_its_name(engine: LLMEngine, form: dict[str, Any]) -> None:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "a", "answer_grammar": form})
    with pytest.raises(InvalidRequest, match=r"structured_outputs: ") as refused:
        text_requests(engine, request)
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("plain", True),
        ("see <f=7/> and <g=8/>.", True),
        ("<f=7/>", True),
        ("see <f=8/>", False),
        ("see <h=7/>", False),
    ],
)
@pytest.mark.parametrize("is_older", [True, False])
def test_text_with_tags_is_free_but_for_them(engine: LLMEngine, text: str, fits: bool, is_older: bool) -> None:
    tags = [
        {**TAG, "begin": begin, "content": {"type": "json_schema", "json_schema": {"const": number}}}
        for begin, number in (("<f=", 7), ("<g=", 8))
    ]
    form = LEGACY if is_older else {"format": {"type": "triggered_tags", "triggers": ["<f=", "<"], "tags": tags}}
    if not is_older:
        form["format"]["triggers"] = ["<"]
    request = CompletionRequest.model_validate(
        {"model": "m", "prompt": "a", "answer_grammar": {"structural_tag": form}}
    )
    (made,), _ = text_requests(engine, request)
    assert made.constraint is not None
    constraint = made.constraint.fork()
    allowed = True
    for token in engine.tokenizer(text, add_special_tokens=False)["input_ids"]:
        mask = np.zeros(64, np.int32)
        constraint.fill_mask(mask)
        allowed = bool(np.unpackbits(mask.view(np.uint8), bitorder="little")[token])
        if not allowed:
            break
        constraint.advance(token)
    assert allowed == fits


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"format": {"type": "haiku"}},
        {"format": {"type": "sequence"}},
        {"format": {"type": "tag", "begin": "<"}},
        {"format": {"type": "triggered_tags", "triggers": [], "tags": [TAG]}},
        {"format": {"type": "triggered_tags", "triggers": ["[["], "tags": [TAG]}},
        {"structures": [7], "triggers": ["<"]},
        {"format": {"type": "sequence", "elements": [[]]}},
    ],
)
def test_a_structural_tag_that_is_not_understood_is_refused(engine: LLMEngine, form: dict[str, Any]) -> None:
    request = CompletionRequest.model_validate(
        {"model": "m", "prompt": "a", "answer_grammar": {"structural_tag": form}}
    )
    with pytest.raises(InvalidRequest, match=r"structural_tag: "):
        text_requests(engine, request)
