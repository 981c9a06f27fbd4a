"""The messages, tools and answer formats of a chat request, and the tool calls of an answer. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
CalledName = Annotated[str, Field(min_length=1, max_length=256)]  # whatever a model has written


class NullIsDefault(BaseModel):
    """An object whose optional members may be null, as OpenAI's types allow: null counts as absent."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        return {name: value for name, value in given.items() if value is not None or name not in cls.model_fields}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        shown = handler(schema)
        form = handler.resolve_ref_schema(shown)
        for name, member in form.get("properties", {}).items():
            if name not in form.get("required", ()) and {"type": "null"} not in member.get("anyOf", ()):
                about = {key: member.pop(key) for key in ("title", "description", "default") if key in member}
                form["properties"][name] = {"anyOf": [member, {"type": "null"}], **about}
        return shown


class _ChatPart(NullIsDefault):
    """A part of a chat. Unknown members are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


def _as_json_text(arguments: Any) -> Any:
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


class FunctionCall(_ChatPart):
    """The function called by an earlier answer, by the model's own name for it; `arguments` are a JSON object as text.

    They are as they came: an answer may have ended within them. An object will do.
    """

    name: CalledName
    arguments: Annotated[str, BeforeValidator(_as_json_text)] = ""

    def for_template(self) -> dict[str, Any]:
        """Return the call in the form for chat templates: the arguments as an object, or as text if they are none."""
        try:
            found = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            found = None
        return {"name": self.name, "arguments": found if isinstance(found, dict) else self.arguments}


class ToolCall(_ChatPart):
    """A call of an earlier answer. A message of the role `tool` has its result, under the same id."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall


def _as_part(value: Any) -> str | npt.NDArray[np.uint8]:
    if isinstance(value, str):
        return value
    pixels = np.asarray(value)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size or pixels.dtype != np.uint8:
        found = f"{pixels.dtype} {pixels.shape}"
        raise ValueError(f"a part is a text, or an image as uint8 (height, width, 3); got {found}")
    return pixels


MAX_PARTS: Final = 1024
Part = Annotated[str | npt.NDArray[np.uint8], PlainValidator(_as_part)]


class Message(BaseModel):
    """One message of a chat: text, an assistant's tool calls, or (role `tool`) the result of one of them.

    `reasoning` is the assistant's earlier reasoning, which templates show or leave out; `name` is the speaker's, or the
    tool. A content in parts has texts and images, uint8 (height, width, 3); a PIL image in RGB will do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[tuple[Part, ...], Field(max_length=MAX_PARTS)] = ""
    tool_calls: tuple[ToolCall, ...] = Field((), max_length=128)
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning: str | None = None
    name: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _fits_the_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the role 'assistant' has tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a message of the role 'tool', and no other, needs a tool_call_id")
        if not self.tool_calls and "content" not in self.model_fields_set:
            raise ValueError("a message without tool_calls needs a content")
        return self

    @property
    def text(self) -> str:
        """Return the content without its images."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def images(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """Return the images of the content, in their order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if not isinstance(part, str))

    def for_template(self) -> dict[str, Any]:
        """Return the message for chat templates: the arguments of calls as objects, images as their places."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.images:
            message["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.content
            ]
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.for_template()}
                for call in self.tool_calls
            ]
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class Function(_ChatPart):
    """A function that the model may call; `parameters` is the JSON schema of its arguments, which are an object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: bool | None = None

    @property
    def num_chars(self) -> int:
        """Return the approximate number of characters that the function adds to a prompt."""
        return len(self.name) + len(self.description or "") + len(json.dumps(self.parameters))

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        if self.parameters.get("type", "object") != "object":
            raise ValueError(f"the parameters of {self.name} have the type {self.parameters['type']!r}, not 'object'")
        return self


class Tool(_ChatPart):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form for chat templates."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionChoice(_ChatPart):
    """The name of a function."""

    name: FunctionName


class NamedTool(_ChatPart):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionChoice


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class JsonSchema(_ChatPart):
    """A JSON schema with its name in OpenAI's clients."""

    name: Annotated[str, Field(max_length=64)] = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")
    strict: bool | None = None


class ResponseFormat(_ChatPart):
    """The form of an answer: text, any JSON object, or a JSON document of a schema, in either member."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the type 'json_schema', and no other, needs a json_schema")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("a schema by itself is for the type 'json_object'")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the schema of the answer; None for free text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        if self.type == "text":
            return None
        return self.schema_ if self.schema_ is not None else {"type": "object"}


class AnswerGrammar(_ChatPart):
    """The constraint of answers: JSON of a schema, an expression, one of some texts, a grammar (Lark, GBNF), or a form
    of parts (`structural_tags.py`)."""

    json_schema: dict[str, Any] | None = None
    regex: Annotated[str, Field(min_length=1, max_length=8192)] | None = None
    choice: tuple[str, ...] | None = Field(None, min_length=1, max_length=1024)
    grammar: Annotated[str, Field(min_length=1, max_length=2**16)] | None = None
    structural_tag: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one form of the answer, and no other; got {', '.join(given) or 'none'}")
        return self


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """Call number `index` of an answer, or a piece of it: id and name come with the first, JSON `arguments` in all."""

    index: int
    id: str
    name: str
    arguments: str


def whole_calls(pieces: Sequence[CalledTool]) -> tuple[CalledTool, ...]:
    """Return the whole calls made of all pieces of an answer."""
    calls: dict[int, list[CalledTool]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return tuple(
        CalledTool(index, own[0].id, own[0].name, "".join(piece.arguments for piece in own))
        for index, own in sorted(calls.items())
    )
