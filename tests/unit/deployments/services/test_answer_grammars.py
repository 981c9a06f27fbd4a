"""Answers that are held to an expression, to some texts or to a grammar, whatever the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from kit.scripted_llm import BEGIN, save_scripted_llm

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.records import ChatRequest, CompletionRequest
from deployments.records.errors import InvalidRequest
from deployments.services.text_prompts import text_requests

GBNF = 'root ::= "yes " digit\ndigit ::= [0-9]'
LARK = 'start: "yes " DIGIT\nDIGIT: /[0-9]/'


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
