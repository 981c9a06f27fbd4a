"""Bodies of /api: Ollama's requests, and the records that they become.

Source: Ollama, "API". What an option has no meaning for here (`num_ctx`, `num_gpu`, `mirostat`, `keep_alive`: models
stay while there is room) is accepted and has no effect.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any, Final

from pydantic import ConfigDict, Field

from configs.cluster import MAX_MESSAGES
from deployments.engines.llm.chat import FunctionName, Tool
from deployments.errors import InvalidRequest
from deployments.ingress.openai.chat_images import ChatImages, ImageSource, content_of
from deployments.ingress.openai.fetched_images import SCHEMES
from deployments.records import (
    ChatRequest,
    CompletionRequest,
    Count,
    EmbeddingRequest,
    Name,
    RequestModel,
    as_record,
)

_LATEST: Final = ":latest"  # the tag that Ollama's clients add to names
_OPTIONS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


class _OllamaPart(RequestModel):
    model_config = ConfigDict(extra="ignore")


class OllamaOptions(_OllamaPart):
    """The options that have a meaning here. `num_predict` and `seed` below 0 are as if they were not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_predict: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a record."""
        found = {name: getattr(self, given) for given, name in _OPTIONS.items()}
        found |= {"max_tokens": self.num_predict if (self.num_predict or 0) > 0 else None}
        found |= {"seed": self.seed if (self.seed or 0) >= 0 else None}
        found |= {"top_k": None if self.top_k is None else max(0, self.top_k)}
        found |= {"stop": (self.stop,) if isinstance(self.stop, str) else self.stop}
        return {name: value for name, value in found.items() if value is not None}


class _ModelBody(RequestModel):
    model_config = ConfigDict(extra="ignore")

    model: Name = Field(min_length=1)

    @property
    def model_id(self) -> str:
        """The model's name without Ollama's tag."""
        return self.model.removesuffix(_LATEST)


class _TextBody(_ModelBody):
    """The fields that chats and prompts share."""

    format: str | dict[str, Any] | None = Field(None, description='"json", or a JSON schema')
    options: OllamaOptions | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def is_stream(self) -> bool:
        """Return whether the answer comes in lines: Ollama's default."""
        return self.stream is not False

    def text_fields(self) -> dict[str, Any]:
        """Return the fields of a record that do not depend on the prompt."""
        fields = self.options.fields() if self.options else {}
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return {"model": self.model_id, **fields}

    def format_fields(self) -> dict[str, Any]:
        """Return the form of the answer as a chat has it. Raises InvalidRequest."""
        if not self.format:
            return {}
        if self.format == "json":
            return {"response_format": {"type": "json_object"}}
        if isinstance(self.format, str):
            raise InvalidRequest(f'format: expected "json" or a JSON schema, got {self.format[:64]!r}', "format")
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": self.format}}}


class OllamaCall(_OllamaPart):
    """The function of an earlier answer's call."""

    name: FunctionName
    arguments: dict[str, Any] = Field({})


class OllamaToolCallBody(_OllamaPart):
    """A tool call of an earlier answer. Ollama's clients send no ids."""

    id: Name | None = None
    function: OllamaCall


class OllamaTurn(_OllamaPart):
    """One turn of a chat. A turn of the role `tool` answers the call of `tool_name`, or else the next one."""

    role: str
    content: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCallBody] | None = Field(None, max_length=128)
    tool_name: str | None = None
    tool_call_id: Name | None = None


class OllamaChatBody(_TextBody):
    """A chat. Without messages it is a wish that the model be loaded."""

    messages: list[OllamaTurn] = Field([], max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=128)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the record, as `ChatImages` takes them. Raises InvalidRequest."""
        messages: list[dict[str, Any]] = []
        waiting: deque[tuple[str, str]] = deque()  # ids and names of calls without an answer
        for number, turn in enumerate(self.messages):
            messages.append(_message_of(turn, number, waiting))
        given = {"messages": messages, "tools": tuple(self.tools or ())}
        return self.text_fields() | self.format_fields() | given


def _message_of(turn: OllamaTurn, number: int, waiting: deque[tuple[str, str]]) -> dict[str, Any]:
    content = _with_images(turn.images, turn.content or "", f"messages.{number}.images")
    message: dict[str, Any] = {"role": turn.role, "content": content}
    if turn.tool_calls:
        calls = [(call.id or f"call_{number}_{place}", call) for place, call in enumerate(turn.tool_calls)]
        waiting.clear()
        waiting.extend((id_, call.function.name) for id_, call in calls)
        message["tool_calls"] = [
            {"id": id_, "function": {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}}
            for id_, call in calls
        ]
    if turn.role == "tool":
        answered = next((call for call in waiting if call[1] == turn.tool_name), next(iter(waiting), None))
        if answered:
            waiting.remove(answered)
        message["tool_call_id"] = turn.tool_call_id or (answered[0] if answered else f"call_{number}")
    return message


class OllamaGenerateBody(_TextBody):
    """A prompt: one turn of a chat, or with `raw` a text to go on with. An empty one asks for nothing but the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None

    async def to_record(self, images: ChatImages) -> ChatRequest | CompletionRequest:
        """Return the request as the service takes it. Raises as `ChatImages.record_of` does."""
        if self.suffix:
            raise InvalidRequest("suffix: no model here fills a gap in a text", "suffix")
        if self.template:
            raise InvalidRequest("template: a model's own is used; write the whole prompt, with raw: true", "template")
        if self.context:
            raise InvalidRequest("context: earlier turns are not kept; send them to /api/chat", "context")
        if self.raw:
            if self.format:
                raise InvalidRequest("format: a raw prompt has none; leave out raw", "format")
            if self.images:
                raise InvalidRequest("images: a raw prompt has none; leave out raw", "images")
            return as_record(CompletionRequest, self.text_fields() | {"prompt": self.prompt})
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": _with_images(self.images, self.prompt or "", "images")})
        return await images.record_of(self.text_fields() | self.format_fields() | {"messages": messages})


def _with_images(images: list[str] | None, text: str, where: str) -> str | list[str | ImageSource]:
    """Return the content of a turn: its images, which are base64, before its text. Ollama fetches none."""
    for number, image in enumerate(images or ()):
        if image.startswith(SCHEMES):
            raise InvalidRequest(f"{where}.{number}: expected an image file in base64", f"{where}.{number}")
    return content_of([*(ImageSource(f"{where}.{number}", one) for number, one in enumerate(images or ())), text])


class OllamaEmbedBody(_ModelBody):
    """Texts to embed."""

    input: str | list[str] = Field(min_length=1)
    dimensions: Count | None = None

    def to_record(self) -> EmbeddingRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        return as_record(EmbeddingRequest, {"model": self.model_id, "input": texts, "dimensions": self.dimensions})


class OllamaEmbeddingsBody(_ModelBody):
    """A text to embed, in the older form."""

    prompt: str = Field(min_length=1)

    def to_record(self) -> EmbeddingRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        return as_record(EmbeddingRequest, {"model": self.model_id, "input": [self.prompt]})


class OllamaShowBody(RequestModel):
    """The name of a model, in the newer or in the older field."""

    model_config = ConfigDict(extra="ignore")

    model: Name | None = None
    name: Name | None = None

    @property
    def model_id(self) -> str:
        """The model's name without Ollama's tag. Raises InvalidRequest without a name."""
        if not (name := self.model or self.name):
            raise InvalidRequest("model: which one?", "model")
        return name.removesuffix(_LATEST)
