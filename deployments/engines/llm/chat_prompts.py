"""Chats as the text of a prompt, by a model's own template, with the roles and members that the template knows."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from deployments.engines.libraries.chat_rendering import render_chat_template
from deployments.engines.llm.template_forms import template_forms
from deployments.engines.llm.tokenizer import chat_template, checked_characters
from deployments.engines.records.protocol import EngineError

_SHORT_ID: Final = re.compile("[a-zA-Z0-9]{9}")
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# The families' names of the switch of reasoning; a template ignores unknown ones.
_SWITCHES: Final = ("enable_thinking", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of a chat beside its messages: the tools that are shown, and variables of the template.

    Without `opens_turn` the prompt does not begin the assistant's turn; with `continues` the last message goes on.
    """

    tools: Sequence[dict[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    opens_turn: bool = True
    continues: bool = False


NO_OPTIONS: Final = ChatOptions()


def template_variables(
    given: Mapping[str, Any], enable_thinking: bool | None, reasoning_effort: str | None
) -> dict[str, Any]:
    """Return a request's variables for a template. Raises EngineError for names that every chat sets."""
    if taken := sorted(_RESERVED & given.keys()):
        raise EngineError(f"chat_template_kwargs: {taken[0]!r} is set by the request itself")
    if enable_thinking is None and reasoning_effort is not None:
        enable_thinking = reasoning_effort != "none"
    found: dict[str, Any] = {} if enable_thinking is None else dict.fromkeys(_SWITCHES, enable_thinking)
    if reasoning_effort is not None:
        found["reasoning_effort"] = reasoning_effort
    return {**found, **given}


def unknown_variables(tokenizer: PreTrainedTokenizerBase, names: Sequence[str], *, has_tools: bool) -> list[str]:
    """Return the names that a model's template never uses: they have no effect."""
    template = chat_template(tokenizer, has_tools=has_tools)
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]


def switches_thinking(tokenizer: PreTrainedTokenizerBase, *, has_tools: bool) -> bool:
    """Return whether a model's template has a switch or an effort of reasoning."""
    names = (*_SWITCHES, "reasoning_effort")
    return len(unknown_variables(tokenizer, names, has_tools=has_tools)) < len(names)


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Return the token ids of a chat's rendered text, which has its special tokens already."""
    return tuple(tokenizer(checked_characters(text), add_special_tokens=False)["input_ids"])


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], options: ChatOptions = NO_OPTIONS
) -> str:
    """Return the text of a chat, up to the beginning of the assistant's turn.

    Raises:
        EngineError: the tokenizer has no chat template, the template refuses the messages, takes too many steps or
        knows no tool messages.
    """
    template = chat_template(tokenizer, has_tools=bool(options.tools))
    uses_tools = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if uses_tools and not _has(template, r"\btool"):
        raise EngineError("the model's chat template does not know tools")
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    name = next((found for found, source in named.items() if source == template), "default")
    chat = _in_known_words(messages, template)
    if uses_tools:
        forms = template_forms(tokenizer, chat_template(tokenizer, has_tools=True))
        if forms.has_text_arguments:
            chat = [_with_text_arguments(message) for message in chat]
        if forms.has_short_ids:
            chat = [_with_short_ids(message) for message in chat]
    variables = dict(options.variables)
    if options.continues or not options.opens_turn:
        variables["add_generation_prompt"] = False
    text = render_chat_template(template, name, chat, options.tools, tokenizer.special_tokens_map, variables)
    return _up_to_last_message(text, chat[-1]) if options.continues else text


def _in_known_words(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return messages with only the roles and members that a template knows.

    What developers say is said by the system where no other role is known, in one message at the beginning; thoughts
    have two names; and results have those of the functions that were called, which few clients repeat.
    """
    knows_developer = _has(template, r"\bdeveloper\b")
    has_thinking = _has(template, r"\bmessage(?:\.|\[['\"])thinking\b")
    found: list[dict[str, Any]] = []
    called: dict[str, str] = {}  # names by ids
    for message in messages:
        message = dict(message)
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and (name := called.get(message.get("tool_call_id", ""))):
            message.setdefault("name", name)
        if message["role"] == "developer" and not knows_developer:
            message["role"] = "system"
            before = found[-1] if found else None
            if before and before["role"] == "system" and all(isinstance(x["content"], str) for x in (before, message)):
                found[-1] = before | {"content": f"{before['content']}\n\n{message['content']}"}
                continue
        if has_thinking and "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
            if message["content"]:  # such a template takes either content or calls
                del message["thinking"]
        found.append(message)
    return found


@functools.lru_cache(maxsize=256)
def _has(template: str, pattern: str) -> bool:
    """Return whether a template has a match of one of this module's patterns. A search of a long one takes 50 µs."""
    return re.search(pattern, template) is not None


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": _as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    message = dict(message)
    if "tool_calls" in message:
        message["tool_calls"] = [call | {"id": _short_id(call["id"])} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    return message


def _short_id(id_: str) -> str:
    """Return an id of nine letters and digits: the same one for the same id, always."""
    return id_ if _SHORT_ID.fullmatch(id_) else hashlib.sha256(id_.encode(errors="replace")).hexdigest()[:9]


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _up_to_last_message(text: str, last: dict[str, Any]) -> str:
    """Return the text of a chat without the end of its last message. Raises EngineError if the end is not found."""
    content = last["content"]
    end = (
        content
        if isinstance(content, str)
        else next((part["text"] for part in reversed(content) if part["type"] == "text"), "")
    )
    if last["role"] != "assistant" or not end.strip():
        raise EngineError("continue_final_message: the last message is no text of the assistant's")
    at = text.rfind(end.strip())
    if at < 0:
        raise EngineError("continue_final_message: the model's chat template does not show the last message as it is")
    stop = at + len(end.strip())
    blanks = end[len(end.rstrip()) :]
    return text[:stop] + (blanks if text.startswith(blanks, stop) else "")
