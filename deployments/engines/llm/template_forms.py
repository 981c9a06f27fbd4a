"""The forms of a model's answers, found by its chat template, and the template's demands on messages.

A template reveals most by writing: it renders a call of a made-up function, and the form whose reader reads that call
back, from text that has the form's own beginnings, is the model's. Templates that render no calls teach them in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from deployments.engines.libraries.chat_rendering import render_chat_template
from deployments.engines.llm.answer_forms import (
    REASONING_FORMS,
    TOOL_FORMS,
    AnswerForm,
    ReasoningForm,
    ToolForm,
    named_form,
)
from deployments.engines.llm.answer_reader import AnswerReader
from deployments.engines.llm.chat import Function, whole_calls
from deployments.engines.llm.tokenizer import chat_template
from deployments.engines.records.protocol import EngineError

_FUNCTION: Final = Function(
    name="look_up", parameters={"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
)
_ARGUMENTS: Final = {"word": "fern"}
_QUESTION: Final = {"role": "user", "content": "What is a fern?"}
_TOOL: Final = {"type": "function", "function": _FUNCTION.model_dump(exclude_none=True)}
_SHORT_ID: Final = "abcdef123"  # some take no other length
_BEGUN: Final = re.compile(r"[<\[][^<>\[\]\s]*$")
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class TemplateForms:
    """A template's rules of calls: their form, whether it takes the arguments of earlier ones as a text, and whether
    it takes no ids but those of nine letters and digits."""

    tools: ToolForm | None
    has_text_arguments: bool = False
    has_short_ids: bool = False


def answer_form(
    tokenizer: PreTrainedTokenizerBase,
    *,
    has_tools: bool,
    tool_form: str | None = None,
    reasoning_form: str | None = None,
) -> AnswerForm:
    """Return the form of an answer, with calls if there are tools. A given name overrides the template.

    Raises EngineError for an unknown name, and for tools if the template has none, or none in a form of
    `TOOL_FORMS`.
    """
    template = chat_template(tokenizer, has_tools=has_tools)
    reasoning: Any = _reasoning_of(template) if reasoning_form is None else named_form("reasoning_form", reasoning_form)
    if not has_tools:
        return AnswerForm(TOOL_FORMS["harmony"] if reasoning is REASONING_FORMS["harmony"] else None, reasoning)
    tools: Any
    if tool_form is not None:
        tools = named_form("tool_form", tool_form)
    elif not re.search(r"\btools\b", template):
        raise EngineError("the model's chat template does not know tools")
    else:
        tools = template_forms(tokenizer, template).tools
    if tools is None:
        raise EngineError(
            "the model's chat template writes tool calls in a form that is not known here; the model's "
            f"defaults.tool_form may say which it is (known: {', '.join(TOOL_FORMS)})"
        )
    return AnswerForm(tools, reasoning)


def template_forms(tokenizer: PreTrainedTokenizerBase, template: str) -> TemplateForms:
    """Return a template's rules of calls."""
    special = tokenizer.special_tokens_map
    return _read_template(template, tuple((name, str(special[name])) for name in _SPECIAL if name in special))


@lru_cache(maxsize=64)
def _read_template(template: str, special_tokens: tuple[tuple[str, str], ...]) -> TemplateForms:
    special = dict(special_tokens)
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        for tools in ([_TOOL], []):  # some raise for what they do not expect
            texts = _rendered(template, special, arguments, tools, _SHORT_ID)
            form = texts and next((one for one in TOOL_FORMS.values() if _is_read_back(one, *texts)), None)
            if form:
                has_short_ids = _rendered(template, special, arguments, tools, f"call_{_SHORT_ID}") is None
                return TemplateForms(form, isinstance(arguments, str), has_short_ids)
    return TemplateForms(_with_signs(TOOL_FORMS, template))


def _rendered(
    template: str, special_tokens: Mapping[str, str], arguments: Any, tools: Sequence[Any], id_: str
) -> tuple[str, str] | None:
    """Return the end of a prompt, and a call as the template writes it after that; None if it writes none."""
    call = {
        "id": id_,
        "type": "function",
        "function": {"name": _FUNCTION.name, "arguments": arguments},
    }
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = render_chat_template(template, "probe", [_QUESTION], tools, special_tokens)
        whole = render_chat_template(
            template, "probe", [_QUESTION, answer], tools, special_tokens, {"add_generation_prompt": False}
        )
    except EngineError:
        return None
    size = next((at for at, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
    if begun := _BEGUN.search(prompt, 0, size):  # the common beginning may end within a marker, of a thought or a call
        size = begun.start()
    return prompt[:size], whole[size:]


def _is_read_back(form: ToolForm, prompt: str, written: str) -> bool:
    """Return whether the text that a template has written is exactly the call in the form."""
    compact = _compact(written)
    if form.syntax != "channels" and not all(_compact(text) in compact for text in (form.prefix, form.name_end)):
        return False
    answer = AnswerForm(form, REASONING_FORMS["harmony"] if form.syntax == "channels" else None)
    reader = AnswerReader(answer, [_FUNCTION])
    reader.feed(answer.begun(prompt))
    pieces = [reader.feed(written), reader.flush()]
    calls = whole_calls([call for piece in pieces for call in piece.calls])
    try:
        found = [(call.name, json.loads(call.arguments)) for call in calls]
    except ValueError:
        return False
    return found == [(_FUNCTION.name, _ARGUMENTS)]


def _compact(text: str) -> str:
    return re.sub(r"\s+", "", text)


@lru_cache(maxsize=64)
def _reasoning_of(template: str) -> ReasoningForm | None:
    found: ReasoningForm | None = _with_signs(REASONING_FORMS, template)
    return found


def _with_signs(forms: Mapping[str, Any], template: str) -> Any:
    """Return the first form whose signs a template has, None without one."""
    return next((form for form in forms.values() if form.signs and all(sign in template for sign in form.signs)), None)


def is_thought(form: ReasoningForm | None, begun: str) -> bool:
    """Return whether a `begun` answer is within its reasoning."""
    return form is not None and bool(begun) and begun in form.openings
