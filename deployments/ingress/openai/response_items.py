"""Items of a response's input: messages, tool calls and their results, and references to what was answered before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic_core import to_json

from configs.cluster import MAX_MESSAGES
from deployments.engines.llm.chat import FunctionName
from deployments.errors import InvalidRequest, RequestTooLarge
from deployments.ingress.openai.chat_images import Detail, ImageSource, content_of
from deployments.ingress.openai.client_parts import ClientPart
from deployments.ingress.openai.response_answers import ResponseAnswer, response_id_of
from deployments.ingress.openai.stored_responses import StoredResponse, StoredResponses
from deployments.records import Name

_MAX_CHAIN: Final = 1024  # responses that follow on each other


class InputText(ClientPart):
    """A part of a message; those of earlier answers have more members."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text"]
    text: str


class InputImage(ClientPart):
    """An image of a message, as in chats. Files that are kept by their ids are not here."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_image"]
    image_url: str
    detail: Detail = "auto"


class InputMessage(ClientPart):
    """A message of the chat so far."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | InputImage]


class InputCall(ClientPart):
    """A tool call of an earlier answer."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: str


class InputCallOutput(ClientPart):
    """The result of a tool call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call_output"]
    call_id: Name
    output: str | list[InputText]


class ItemReference(ClientPart):
    """A message or tool call of a response that is kept, by its id."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["item_reference"] = "item_reference"
    id: Name


Item = InputMessage | InputCall | InputCallOutput
InputItem = Item | ItemReference
InputItems = Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)]
_ITEMS: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item])


class KeptItems:
    """The items that one tenant can say by the ids of responses. Calls block; all in all they read `max_bytes`."""

    def __init__(self, stored: StoredResponses | None, tenant: str, max_bytes: int) -> None:
        self._stored = stored
        self._tenant = tenant
        self._left_bytes = self._max_bytes = max_bytes
        self._found: dict[str, StoredResponse] = {}
        self._outputs: dict[str, dict[str, Item]] = {}  # of what was found, by their ids

    def before(self, previous_id: str) -> list[Item]:
        """Return what was asked and answered up to a response. Raises InvalidRequest, RequestTooLarge."""
        chain: list[StoredResponse] = []
        next_: str | None = previous_id
        while next_ is not None:
            if len(chain) == _MAX_CHAIN:
                raise InvalidRequest(f"previous_response_id: more than {_MAX_CHAIN} responses", "previous_response_id")
            chain.append(self._find(next_, next_, "previous_response_id"))
            next_ = chain[-1].previous_id
        return [item for response in reversed(chain) for item in _items_of(response)]

    def resolved(self, items: Sequence[InputItem]) -> list[Item]:
        """Return the items with those that are meant by references. Raises InvalidRequest, RequestTooLarge."""
        found: list[Item] = []
        for place, item in enumerate(items):
            if not isinstance(item, ItemReference):
                found.append(item)
                continue
            response = self._find(response_id_of(item.id) or item.id, item.id, f"input.{place}.id")
            output = self._outputs_of(response).get(item.id)
            if output is None:
                raise _unknown(item.id, f"input.{place}.id")
            found.append(output)
        return found

    def _outputs_of(self, response: StoredResponse) -> Mapping[str, Item]:
        """Return the items of an answer by their ids, read once: what is meant a thousand times is one object."""
        if response.id not in self._outputs:
            outputs = json.loads(response.answer)["output"]
            items = _ITEMS.validate_python(outputs)
            self._outputs[response.id] = {output["id"]: item for output, item in zip(outputs, items, strict=True)}
        return self._outputs[response.id]

    def _find(self, response_id: str, shown_id: str, field: str) -> StoredResponse:
        if (known := self._found.get(response_id)) is not None:
            return known
        if self._stored is None:
            raise InvalidRequest(f"{field}: this server keeps no responses; send the whole chat", field)
        if (found := self._stored.find(self._tenant, response_id)) is None:
            raise _unknown(shown_id, field)
        self._left_bytes -= len(found.input) + len(found.answer)
        if self._left_bytes < 0:
            raise RequestTooLarge(f"{field}: the responses meant have more than {self._max_bytes} bytes", field)
        self._found[response_id] = found
        return found


def _unknown(id_: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: nothing is kept here as {id_[:80]!r}. Responses end some time after their last use, or are not kept "
        "(`store: false`), and only the key that they were for finds them; send the whole chat instead",
        field,
    )


def _items_of(response: StoredResponse) -> list[Item]:
    return _ITEMS.validate_json(response.input) + _ITEMS.validate_python(json.loads(response.answer)["output"])


def as_stored(answer: ResponseAnswer, items: Sequence[Item]) -> StoredResponse:
    """Return a response as it is kept, with the items of its own request."""
    given = to_json([item.model_dump() for item in items])
    content = answer.model_dump_json(exclude_unset=True).encode()
    return StoredResponse(answer.id, answer.previous_response_id, given, content)


def messages_of(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat that items are, as `ChatImages` takes them: calls of one answer are one message."""
    open_: dict[str, Any] | None = None  # the assistant's, which may have calls
    for number, item in enumerate(items):
        if isinstance(item, InputCall):
            if open_ is None:
                open_ = {"role": "assistant"}
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            open_.setdefault("tool_calls", []).append(call)
            continue
        if open_ is not None:
            yield open_
            open_ = None
        if isinstance(item, InputCallOutput):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output, number)}
        elif item.role == "assistant":
            open_ = {"role": item.role, "content": _joined(item.content, number)}
        else:
            yield {"role": item.role, "content": _joined(item.content, number)}
    if open_ is not None:
        yield open_


def _joined(content: str | Sequence[InputText | InputImage], number: int) -> str | list[str | ImageSource]:
    if isinstance(content, str):
        return content
    return content_of(
        [
            part.text
            if isinstance(part, InputText)
            else ImageSource(f"input.{number}.content.{place}", part.image_url, part.detail)
            for place, part in enumerate(content)
        ]
    )
