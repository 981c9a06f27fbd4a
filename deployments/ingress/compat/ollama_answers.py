"""Answers of /api: Ollama's records, whole and as lines of a stream. Times are in nanoseconds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

from starlette.responses import Response

from deployments.engines.llm.chat import CalledTool, whole_calls
from deployments.ingress.messages.responses import Answer, Failure, json_response
from deployments.ingress.openai.text_answers import ChatToken, chat_tokens
from deployments.ingress.service.catalog import ModelCard
from deployments.records import TextChunk, TextResult, TokenText
from weights.formats.language_models import LanguageModelDetails

# Clients compare it with the version that they need: it is that of the Ollama with this API.
SPOKEN_VERSION: Final = "0.12.6"
_NEVER: Final = "1970-01-01T00:00:00Z"  # the times of models are not recorded


class OllamaError(Answer):
    """The form of every error under /api, and of the line that ends a broken stream."""

    error: str


def ollama_failure_response(failure: Failure) -> Response:
    """Return `failure` in Ollama's form."""
    return json_response(OllamaError(error=failure.message), failure.status, failure.headers)


class OllamaVersion(Answer):
    version: str


class OllamaFunction(Answer):
    """The function of a call, and its number among the calls of the answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Answer):
    id: str
    function: OllamaFunction


class OllamaMessage(Answer):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class _TextLine(Answer):
    """A piece of an answer. The last or only one has the reason of its end, its token counts and its times."""

    model: str
    created_at: str
    logprobs: list[ChatToken] | None = None
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ChatLine(_TextLine):
    message: OllamaMessage


class GenerateLine(_TextLine):
    response: str
    thinking: str | None = None


class TextLines:
    """The lines of one answer, of a chat or of a prompt. Tool calls come whole, before the last one."""

    def __init__(self, model: str, *, is_chat: bool, shows_thoughts: bool = True) -> None:
        self._model = model
        self._is_chat = is_chat
        self._shows_thoughts = shows_thoughts
        self._calls: list[CalledTool] = []

    def whole(self, result: TextResult) -> ChatLine | GenerateLine:
        """Return the whole answer."""
        end = _end_of(result.finish_reason, result) | _logprobs_of(result.logprobs)
        return self._line(result.text, result.tool_calls, end, result.reasoning)

    def loaded(self) -> ChatLine | GenerateLine:
        """Return the answer to a request without a prompt, with which clients load a model."""
        return self._line("", (), {"done": True, "done_reason": "load"})

    def pieces(self, chunk: TextChunk) -> Iterator[ChatLine | GenerateLine]:
        """Yield the lines of a piece of a stream."""
        self._calls += chunk.tool_calls
        text, thought, logprobs = chunk.text, chunk.reasoning, _logprobs_of(chunk.logprobs)
        if chunk.finish_reason is None:
            yield self._line(text, (), {"done": False} | logprobs, thought)
            return
        if self._calls and self._is_chat:
            yield self._line(text, whole_calls(self._calls), {"done": False} | logprobs, thought)
            text, thought, logprobs = "", "", {}
        yield self._line(text, (), _end_of(chunk.finish_reason, chunk) | logprobs, thought)

    def _line(
        self, text: str, calls: Sequence[CalledTool], fields: Mapping[str, Any], thought: str = ""
    ) -> ChatLine | GenerateLine:
        thinking = {"thinking": thought} if thought and self._shows_thoughts else {}
        head = {"model": self._model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        if not self._is_chat:
            return GenerateLine(**head, response=text, **thinking, **fields)
        message = OllamaMessage(role="assistant", content=text, **thinking)
        if calls:
            message.tool_calls = [_call(call) for call in calls]
        return ChatLine(**head, message=message, **fields)


def _call(call: CalledTool) -> OllamaToolCall:
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:  # cut off, as the reason of the end shows
        arguments = {}
    function = OllamaFunction(
        index=call.index, name=call.name, arguments=arguments if isinstance(arguments, dict) else {}
    )
    return OllamaToolCall(id=call.id, function=function)


def _end_of(finish_reason: str, counts: TextResult | TextChunk) -> dict[str, Any]:
    """Return the members of the last line."""
    times_ns = {phase: int(ms * 1e6) for phase, ms in counts.timings_ms.items()}
    return {
        "done": True,
        "done_reason": "length" if finish_reason == "length" else "stop",
        "total_duration": times_ns.get("total", 0),
        "load_duration": times_ns.get("switch", 0),
        "prompt_eval_count": counts.num_prompt_tokens,
        "prompt_eval_duration": times_ns.get("prefill", 0),
        "eval_count": counts.num_completion_tokens,
        "eval_duration": times_ns.get("generate", 0),
    }


def _logprobs_of(tokens: Sequence[TokenText]) -> dict[str, Any]:
    return {"logprobs": chat_tokens(tokens)} if tokens else {}


class OllamaDetails(Answer):
    """The details of a model. `family` is its architecture, and in lists its kind; what nobody knows is empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    """A usable model, or one that is in memory."""

    name: str
    model: str
    modified_at: str | None = None
    size: int
    size_vram: int | None = None
    expires_at: str | None = None
    digest: str
    details: OllamaDetails


class OllamaModels(Answer):
    models: list[OllamaModel]


class OllamaShown(Answer):
    """A model as Ollama shows it. There is no Modelfile; `parameters` are its defaults, and `template` is in Jinja."""

    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaEmbeddings(Answer):
    """The vectors of texts."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int

    @classmethod
    def empty(cls, model: str) -> OllamaEmbeddings:
        """Return the answer to a request for no vectors, with which clients load a model."""
        return cls(model=model, embeddings=[], total_duration=0, load_duration=0, prompt_eval_count=0)


class OllamaEmbedding(Answer):
    """The vector of a text, in the older form."""

    embedding: list[float]


def listed_model(card: ModelCard) -> OllamaModel:
    """Return a model as /api/tags lists it."""
    return OllamaModel(
        name=card.id,
        model=card.id,
        modified_at=_NEVER,
        size=card.nbytes,
        digest=card.fingerprint,
        details=_details(card.kind),
    )


def running_model(id_: str, kind: str | None, nbytes: int, fingerprint: str) -> OllamaModel:
    """Return a model that takes `nbytes` of replicas' memory. It stays until others need the room."""
    return OllamaModel(
        name=id_,
        model=id_,
        size=nbytes,
        size_vram=nbytes,
        expires_at="9999-12-31T23:59:59Z",
        digest=fingerprint,
        details=_details(kind),
    )


_CAPABILITIES: Final[Mapping[str | None, list[str]]] = {"text": ["completion"], "embeddings": ["embedding"]}


def shown_model(card: ModelCard, details: LanguageModelDetails) -> OllamaShown:
    """Return a model as /api/show shows it."""
    architecture = details.architecture or card.kind or ""
    info: dict[str, Any] = {**details.sizes, "general.architecture": architecture}
    info["general.description"] = card.description
    if details.num_parameters:
        info["general.parameter_count"] = details.num_parameters
    if (length := card.facts.get("context_length")) is not None:
        info[f"{architecture}.context_length"] = length
    is_text = card.endpoint == "text"
    asked = {
        "tools": is_text and card.facts.get("knows_tools", True),
        "vision": card.sees,
        "thinking": is_text and card.facts.get("thinks", False),
    }
    return OllamaShown(
        modelfile="",
        parameters="\n".join(f"{name} {value}" for name, value in card.defaults.items()),
        template=details.template,
        modified_at=_NEVER,
        details=_details(architecture, details.format, _parameter_size(details.num_parameters), details.quantization),
        model_info=info,
        capabilities=[*_CAPABILITIES.get(card.endpoint, []), *(name for name, is_there in asked.items() if is_there)],
    )


def _details(family: str | None, format_: str = "", parameter_size: str = "", quantization: str = "") -> OllamaDetails:
    return OllamaDetails(
        parent_model="",
        format=format_,
        family=family or "",
        families=[family] if family else [],
        parameter_size=parameter_size,
        quantization_level=quantization,
    )


def _parameter_size(num_parameters: int) -> str:
    """Return a number of parameters as people say it: 8.0B, 494.03M."""
    for size, name, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if num_parameters >= size:
            return f"{num_parameters / size:.{digits}f}{name}"
    return str(num_parameters) if num_parameters else ""
