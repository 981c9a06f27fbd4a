"""Answers of models whose template is that of a family, from the tokens to the pieces that protocols write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.scripted_llm import BEGIN, save_scripted_llm
from unit.deployments.engine_loops import text_service_of, written_chunks

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.records import ChatRequest, TextResult
from deployments.records.errors import InvalidRequest
from deployments.services.text_prompts import prompt_tokens
from deployments.services.text_service import TextService, whole_text

HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}{{ ' ' + m.name if m.name }}: "
    "{{ m.content }}"
)
XML = (
    HEAD + "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}\n{% endfor %}" + BEGIN
)
HERMES = HEAD + "\n{% endfor %}{# <tool_call> #}" + BEGIN
MISTRAL = HEAD + "\n{% endfor %}{# [TOOL_CALLS][ARGS] [THINK] #}" + BEGIN
THINK = (
    HEAD
    + "\n{% endfor %}{# <tool_call> </think> #}"
    + BEGIN
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    for name in "fg"
]
Ask = Callable[..., Any]


@pytest.fixture
def model_of(tmp_path: Path) -> Callable[..., tuple[LLMEngine, TextService]]:
    def made(pieces: Sequence[str], template: str, special: Sequence[str] = ()) -> tuple[LLMEngine, TextService]:
        tensors = save_scripted_llm(tmp_path, pieces, template, special)
        engine = LLMEngine(tmp_path, tensors, LLMEngineConfig(kv_cache_bytes=2**22))
        return engine, text_service_of(engine)

    return made


def chat(**fields: Any) -> ChatRequest:
    given = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "temperature": 0, **fields}
    return ChatRequest.model_validate(given)


async def answer(service: TextService, **fields: Any) -> TextResult:
    return whole_text("m", await written_chunks(service, chat(**fields)))


def calls_of(result: TextResult) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in result.tool_calls]


async def test_a_family_s_calls_come_out_of_its_tokens(model_of: Any) -> None:
    pieces = [
        "<tool_call>\n",
        "<function=f>",
        "\n<parameter=city>\nParis\n",
        "</parameter>\n</function>\n",
        "</tool_call>",
    ]
    _, service = model_of(pieces, XML)
    found = await answer(service)
    assert (calls_of(found), found.text, found.finish_reason) == ([("f", {"city": "Paris"})], "", "tool_calls")


async def test_markers_that_are_special_tokens_are_seen_by_the_reader_alone(model_of: Any) -> None:
    special = ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "<pad>"]
    pieces = ["[THINK]", "Hm.", "[/THINK]", "We", "<pad>", "ll.", "[TOOL_CALLS]", "f", "[ARGS]", '{"city": ', '"Ulm"}']
    _, service = model_of(pieces, MISTRAL, special)
    found = await answer(service)
    assert (calls_of(found), found.text, found.reasoning) == ([("f", {"city": "Ulm"})], "Well.", "Hm.")
    plain = await answer(service, tools=[])
    assert plain.reasoning == "Hm."
    assert plain.text == 'Well.f{"city": "Ulm"}'


async def test_a_blank_between_calls_is_nobody_s_text(model_of: Any) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    _, service = model_of([call, "\n", call.replace('"f"', '"g"')], HERMES)
    chunks = await written_chunks(service, chat())
    assert [chunk.text for chunk in chunks if chunk.text] == []
    assert calls_of(whole_text("m", chunks)) == [("f", {}), ("g", {})]
    assert calls_of(await answer(service, parallel_tool_calls=False)) == [("f", {})]


async def test_what_a_model_thinks_comes_apart_and_can_be_switched_off(model_of: Any) -> None:
    engine, service = model_of(["<think>\n", "Hm", ".\n</think>\n\n", "19", "."], THINK)
    chunks = await written_chunks(service, chat(tools=[]))
    assert [chunk.reasoning for chunk in chunks if chunk.reasoning] == ["Hm", "."]
    assert "".join(chunk.text for chunk in chunks) == "19."
    sizes = {
        name: len(prompt_tokens(engine, chat(tools=[], **fields), has_special_tokens=True).token_ids)
        for name, fields in {
            "on": {},
            "variables": {"chat_template_kwargs": {"enable_thinking": False}},
            "effort": {"reasoning_effort": "none"},
            "switch": {"enable_thinking": False},
            "more": {"reasoning_effort": "high"},
        }.items()
    }
    assert sizes["on"] == sizes["more"]
    assert {sizes["variables"], sizes["effort"], sizes["switch"]} == {sizes["on"] + len("<think></think>")}
    found = await answer(service, chat_template_kwargs={"colour": "red"}, tools=[])
    assert found.warnings == ("chat_template_kwargs: the model's chat template does not know 'colour'",)
    with pytest.raises(InvalidRequest, match=r"'messages' is set by the request itself"):
        await answer(service, chat_template_kwargs={"messages": []})


async def test_thoughts_are_counted_and_what_ended_an_answer_is_named(model_of: Any) -> None:
    engine, service = model_of(["<think>\n", "Hm", ".\n", "</think>\n\n", "19", "."], THINK)
    chunks = await written_chunks(service, chat(tools=[]))
    assert [chunk.num_reasoning_tokens for chunk in chunks] == [0, 1, 2, 3, 3, 3, 3]  # the mark that ends it is one
    whole = whole_text("m", chunks)
    assert (whole.num_reasoning_tokens, whole.num_completion_tokens, whole.stopped_by) == (3, 7, None)
    both = await answer(service, tools=[], n=2)
    assert both.num_reasoning_tokens == 6
    assert (await answer(service, tools=[], stop=["x", "9."])).stopped_by == "9."
    (token,) = (id_ for id_ in range(len(engine.tokenizer)) if engine.tokenizer.decode([id_]) == "19")
    named = await answer(service, tools=[], stop_token_ids=[token])
    assert (named.stopped_by, named.text, named.finish_reason) == (token, "", "stop")
    eos = engine.tokenizer.eos_token_id
    assert (await answer(service, tools=[], stop_token_ids=[eos])).stopped_by is None


async def test_a_forced_call_is_behind_reasoning_that_is_over(model_of: Any) -> None:
    _engine, service = model_of(["x"], THINK.replace("<think></think>", "") + "<think>\n")
    tools = [
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "additionalProperties": False}}}
    ]
    found = await answer(service, tool_choice="required", tools=tools)
    assert (calls_of(found), found.reasoning, found.text) == ([("g", {})], "", "")
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": "x"}}}
    found = await answer(service, tools=[], response_format=schema, max_tokens=100)
    assert found.finish_reason in ("length", "stop")
    assert not found.text or json.loads(found.text) == "x"


async def test_forms_that_the_model_s_defaults_name(model_of: Any) -> None:
    _, service = model_of(["functools[", '{"name": "f", "arguments": {}}', "]"], HEAD + "\n{% endfor %}" + BEGIN)
    with pytest.raises(InvalidRequest, match=r"defaults\.tool_form"):
        await answer(service)
    assert calls_of(await answer(service, tool_form="phi4")) == [("f", {})]


async def test_names_and_thoughts_of_earlier_messages_are_the_template_s(model_of: Any) -> None:
    engine, _service = model_of(["ok"], HEAD + "{{ m.reasoning_content }}\n{% endfor %}" + BEGIN)
    messages = [
        {"role": "user", "content": "a", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "Hm.",
            "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": '{"ci'}}],
        },
        {"role": "tool", "content": "12", "tool_call_id": "x", "name": "f"},
    ]
    prompt = prompt_tokens(engine, chat(tools=[], messages=messages), has_special_tokens=True).text
    assert prompt.startswith("user Ann: a\nassistant: Hm.\ntool f: 12\n")


async def test_an_answer_goes_on_with_the_last_message(model_of: Any) -> None:
    engine, _service = model_of(
        ["ok"], HEAD + "<|end|>\n{% endfor %}{% if add_generation_prompt %}" + BEGIN + "{% endif %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The sum is "}]

    def prompt(**fields: Any) -> str:
        return prompt_tokens(engine, chat(tools=[], messages=messages, **fields), has_special_tokens=True).text

    assert prompt(continue_final_message=True) == "user: a<|end|>\nassistant: The sum is "
    assert prompt(add_generation_prompt=False) == "user: a<|end|>\nassistant: The sum is <|end|>\n"
    assert prompt().endswith("<|end|>\n" + BEGIN)
