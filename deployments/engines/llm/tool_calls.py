"""Tool calls in the text of an answer: how a model's template writes them, and reading them as the text comes.

Two forms are known. `hermes` (Qwen, Hermes): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` between other
text. `llama3` (Llama 3.1 and later): an answer that is `{"name": ..., "parameters": {...}}`, several parted by `;`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from deployments.engines.llm.chat import CalledTool, Function
from deployments.engines.llm.schemas import prepare_schema
from deployments.engines.protocol import EngineError

_HEAD: Final = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)

_AS_TEMPLATES_WRITE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A model's way to write calls: what is before and behind each, and the name of its arguments."""

    opening: str
    closing: str
    arguments: str

    def grammar(self, functions: Sequence[Function]) -> str:
        """Return a Lark grammar of llguidance: one call of one of the functions, behind the opening.

        Raises EngineError for parameters that no grammar can keep to.
        """
        lines = ["start: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
        for number, function in enumerate(functions):
            head = f'{{"name": {json.dumps(function.name)}, "{self.arguments}": '
            schema = {"type": "object", **prepare_schema(function.parameters), "x-guidance": _AS_TEMPLATES_WRITE}
            lines.append(f'call_{number}: {json.dumps(head)} args_{number} "}}"')
            lines.append(f"args_{number}: %json {json.dumps(schema)}")
        return "\n".join(lines)


_HERMES: Final = ToolForm("<tool_call>\n", "</tool_call>", "arguments")
_LLAMA3: Final = ToolForm("", "", "parameters")


def tool_form(template: str) -> ToolForm:
    """Return the form of calls that a chat template teaches. Raises EngineError for a template without a known one."""
    if not re.search(r"\btools\b", template):
        raise EngineError("the model's chat template does not know tools")
    if "<tool_call>" in template:
        return _HERMES
    if '"parameters"' in template and "tool_calls" in template:
        return _LLAMA3
    raise EngineError(
        "the model's chat template writes tool calls in a form that is not known here (known: <tool_call> as in Qwen "
        "and Hermes, JSON as in Llama 3.1)"
    )


class ToolCallReader:
    """Parts the text of one answer into text and tool calls. `is_begun`: the prompt ends with the opening of a call.

    What looks like a call and is none stays text.
    """

    def __init__(self, form: ToolForm, *, is_begun: bool = False) -> None:
        self._opening, self._closing = form.opening.strip(), form.closing
        self._state: Literal["text", "head", "arguments", "tail", "only text"] = "head" if is_begun else "text"
        self._held = ""
        self._scan, self._num_scanned = _ObjectScan(), 0
        self._id = ""
        self._name = ""
        self.num_calls = 0

    def feed(self, piece: str) -> tuple[str, tuple[CalledTool, ...]]:
        """Return what is certain now: text, and pieces of calls."""
        self._held += piece
        shown, calls = "", list[CalledTool]()
        while self._held:
            before = self._state, len(self._held)
            if self._state == "only text":
                shown, self._held = shown + self._held, ""
            elif self._state == "text":
                shown += self._read_text()
            elif self._state == "head":
                shown += self._read_head(calls)
            elif self._state == "arguments":
                calls += self._read_arguments()
            else:
                self._read_tail()
            if before == (self._state, len(self._held)):
                break
        return shown, tuple(calls)

    def flush(self) -> str:
        """Return what was held back, at the end of the answer, and is no call."""
        held, self._held = self._held, ""
        if self._state == "head" and held:
            return self._opening + held
        return held if self._state in ("text", "only text") else ""

    def _read_text(self) -> str:
        held = self._held
        if not self._opening:  # an answer is text or calls from its beginning
            if held.strip():
                self._state = "head" if held.lstrip().startswith("{") else "only text"
            return ""
        if (at := held.find(self._opening)) >= 0:
            self._state, self._held = "head", held[at + len(self._opening) :]
            return held[:at]
        keep = next((n for n in range(len(self._opening) - 1, 0, -1) if held.endswith(self._opening[:n])), 0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _read_head(self, calls: list[CalledTool]) -> str:
        """Begin a call where its name is known, or return the text of an object that is none."""
        held = self._held
        if found := _HEAD.match(held):
            calls.append(self._begin_call(json.loads(found[1])))
            self._state, self._held = "arguments", held[found.end() :]
            self._scan, self._num_scanned = _ObjectScan(), 0
            return ""
        start = held.find("{")
        if start < 0:
            return ""
        begin = max(start, self._num_scanned)
        end = self._scan.end_of(held[begin:])
        self._num_scanned = len(held)
        if end is None:
            return ""
        end += begin
        self._held, self._scan, self._num_scanned = held[end:], _ObjectScan(), 0
        call = _call_of(held[start:end])
        if call is None:
            self._state = "text" if self._opening else "only text"
            return self._opening + held[:end]
        calls.append(self._begin_call(call[0], call[1]))
        self._state = "tail"
        return ""

    def _begin_call(self, name: str, arguments: str = "") -> CalledTool:
        self._id, self._name = f"call_{uuid.uuid4().hex[:24]}", name
        self.num_calls += 1
        return CalledTool(self.num_calls - 1, self._id, name, arguments)

    def _read_arguments(self) -> list[CalledTool]:
        end = self._scan.end_of(self._held)
        piece = self._held if end is None else self._held[:end]
        self._held = self._held[len(piece) :]
        if end is not None:
            self._state, self._scan = "tail", _ObjectScan()
        return [CalledTool(self.num_calls - 1, self._id, self._name, piece)] if piece else []

    def _read_tail(self) -> None:
        """Skip what closes a call."""
        if self._closing:
            if (at := self._held.find(self._closing)) >= 0:
                self._state, self._held = "text", self._held[at + len(self._closing) :]
            return
        self._held = self._held.lstrip("} ;\n\t")
        if self._held:
            self._state = "head" if self._held[0] == "{" else "only text"


class _ObjectScan:
    """Finds the end of a JSON object in pieces of text, the first of which begins with its brace."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end_of(self, piece: str) -> int | None:
        """Return where in the piece the object ends, or None when it goes on."""
        for place, character in enumerate(piece):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


def _call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call whose members come in another order; None where it is no call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return (found["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
