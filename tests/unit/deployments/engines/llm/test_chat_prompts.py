"""Histories of tools in the words that templates take: short ids, and the names of those who answer."""

from __future__ import annotations

import re
from typing import Any

import pytest
from unit.deployments.engines.llm.family_templates import TEMPLATES
from unit.deployments.engines.llm.test_answer_reader import tokenizer_of

from deployments.engines.libraries.chat_rendering import render_chat_template
from deployments.engines.llm.chat_prompts import ChatOptions, render_chat
from deployments.engines.records.protocol import EngineError

REFUSAL = "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
SHORT_IDS = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}"
    + REFUSAL
    + '{% endif %}{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]'
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    + REFUSAL
    + '{% endif %}[TOOL_RESULTS]{"content": "{{ m.content }}", "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
NAMED = "{# tools #}{% for m in messages %}{{ m.role }} {{ m.name if m.name else '-' }}: {{ m.content }}\n{% endfor %}"
QUESTION = {"role": "user", "content": "x"}


def called(*ids: str) -> dict[str, Any]:
    calls = [
        {"id": id_, "type": "function", "function": {"name": f"f{place}", "arguments": {}}}
        for place, id_ in enumerate(ids)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(id_: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": "ok", **more}


def test_ids_are_nine_letters_and_digits_where_a_template_takes_no_others() -> None:
    """The ids of our answers are longer, as OpenAI's are."""
    long = ["call_0123456789abcdef01234567", "call_0123456789abcdef01234568", "toolu_01-x", "9letters9"]
    chat = [QUESTION, called(*long), *map(result, long)]
    with pytest.raises(EngineError, match="length 9"):
        render_chat_template(SHORT_IDS, "as it came", chat, [], {})
    text = render_chat(tokenizer_of(SHORT_IDS), chat)
    ids, answered = re.findall(r'"id": "(.*?)"', text), re.findall(r'"call_id": "(.*?)"', text)
    assert ids == answered
    assert len(set(ids)) == len(long)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id_) for id_ in ids)
    assert ids[-1] == long[-1]  # one that is taken stays
    assert text == render_chat(tokenizer_of(SHORT_IDS), chat)  # equal beginnings are found in the cache


@pytest.mark.parametrize("name", ["kimi-k2", "hermes", "mistral"])
def test_other_templates_get_ids_as_they_came(name: str) -> None:
    template = TEMPLATES[name].replace("{{ m.content }}", "{{ m.content }}{{ m.tool_call_id }}")
    chat = [QUESTION, called("functions.f0:7"), result("functions.f0:7")]
    assert "functions.f0:7" in render_chat(tokenizer_of(template), chat)


def test_the_last_message_goes_on_where_its_text_ends() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    chat = [QUESTION, {"role": "assistant", "content": "So it is x, "}]
    goes_on = ChatOptions(continues=True)
    assert render_chat(tokenizer_of(template), chat, goes_on) == "user: x<|end|>\nassistant: So it is x, "
    with pytest.raises(EngineError, match="no text of the assistant's"):
        render_chat(tokenizer_of(template), [*chat, QUESTION], goes_on)


def test_a_result_has_the_name_of_the_function_that_was_called() -> None:
    chat = [QUESTION, called("a", "b"), result("b"), result("a", name="own"), result("c"), called("b"), result("b")]
    lines = render_chat(tokenizer_of(NAMED), chat).splitlines()
    assert [line for line in lines if line.startswith("tool")] == [
        "tool f1: ok",
        "tool own: ok",
        "tool -: ok",
        "tool f0: ok",
    ]
