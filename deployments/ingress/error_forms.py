"""The form of an error by the path that it answers: that of the path's protocol, OpenAI's everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fastapi import FastAPI
from starlette.responses import Response

from configs.http import COMFYUI_PATHS
from deployments.ingress.comfy.bodies import ComfyError, comfy_failure_response
from deployments.ingress.compat.a1111_bodies import WebuiError, webui_failure_response
from deployments.ingress.compat.anthropic import MessageError, message_failure_response
from deployments.ingress.compat.ollama_answers import OllamaError, ollama_failure_response
from deployments.ingress.kserve.rest.messages import PREFIX, ProtocolError, protocol_failure_response
from deployments.ingress.messages import responses
from deployments.ingress.messages.responses import (
    Answer,
    ErrorAnswer,
    Failure,
    describe_errors,
    failure_of,
    failure_response,
)


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of errors at a path and below it. `answer` is what the OpenAPI page shows."""

    path: str
    answer: type[Answer]
    respond: Callable[[Failure], Response]


_OPENAI: Final = ErrorForm("", ErrorAnswer, failure_response)
_OTHERS: Final = (
    ErrorForm("/v2/rerank", ErrorAnswer, failure_response),  # of Cohere's clients, and no model of the protocol
    ErrorForm(PREFIX, ProtocolError, protocol_failure_response),
    ErrorForm("/v1/messages", MessageError, message_failure_response),
    *(ErrorForm(path, ComfyError, comfy_failure_response) for path in COMFYUI_PATHS),
    ErrorForm("/api", OllamaError, ollama_failure_response),
    ErrorForm("/sdapi", WebuiError, webui_failure_response),
)


def form_at(path: str) -> ErrorForm:
    """Return the form of errors at `path`."""
    return next((form for form in _OTHERS if path == form.path or path.startswith(f"{form.path}/")), _OPENAI)


def error_response_at(path: str, error: Exception) -> Response:
    """Return any exception in the form of the protocol that `path` belongs to."""
    return form_at(path).respond(failure_of(error))


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of `app` leave in the form of its path, and its OpenAPI page show all forms."""
    responses.install_error_handlers(app, lambda path, failure: form_at(path).respond(failure))
    for answer in dict.fromkeys(form.answer for form in (_OPENAI, *_OTHERS)):
        describe_errors(app, answer)
