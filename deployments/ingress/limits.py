"""What one request may ask for. Checked on records, so handle calls are bounded as HTTP is."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.cluster import LimitsConfig
from deployments.errors import InvalidRequest, RequestTooLarge
from deployments.ingress.errors import error_response
from deployments.ingress.open_inference.rest_errors import is_protocol_path, protocol_error
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest, ImageRequest


def check_image(request: ImageRequest, limits: LimitsConfig) -> None:
    """Raises InvalidRequest naming the field."""
    _check_text("prompt", request.prompt, limits)
    _check_text("negative_prompt", request.negative_prompt or "", limits)
    _check_most("n", request.n, limits.max_images)
    _check_most("num_inference_steps", request.num_inference_steps or 1, limits.max_inference_steps)
    _check_most("size", (request.width or 1) * (request.height or 1), limits.max_pixels, unit=" pixels")


def check_embedding(request: EmbeddingRequest, limits: LimitsConfig) -> None:
    _check_most("input", len(request.input), limits.max_embedding_inputs, unit=" inputs")
    for text in request.input:
        if not text:
            raise InvalidRequest("input: an empty text has no embedding", "input")
        if isinstance(text, str):
            _check_text("input", text, limits)
        else:
            _check_most("input", len(text), limits.max_prompt_chars, unit=" tokens")


def check_text(request: ChatRequest | CompletionRequest, limits: LimitsConfig) -> None:
    if isinstance(request, CompletionRequest):
        _check_text("prompt", request.prompt, limits)
    else:
        _check_text("messages", "".join(message.content for message in request.messages), limits)


def _check_text(name: str, text: str, limits: LimitsConfig) -> None:
    if len(text) > limits.max_prompt_chars:
        raise InvalidRequest(f"{name}: {len(text)} characters, at most {limits.max_prompt_chars} are allowed", name)


def _check_most(name: str, value: int, most: int, unit: str = "") -> None:
    if value > most:
        raise InvalidRequest(f"{name}: {value}{unit}, at most {most} are allowed", name)


class BodyLimit:
    """ASGI middleware: refuses a body over `max_bytes`, announced or not, before anything parses it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refuse(int(announced), scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise RequestTooLarge(self._text(received))
            return message

        await self._app(scope, counted, send)

    async def _refuse(self, nbytes: int, scope: Any, receive: Any, send: Any) -> None:
        respond = protocol_error if is_protocol_path(scope["path"]) else error_response
        await respond(RequestTooLarge(self._text(nbytes)))(scope, receive, send)

    def _text(self, nbytes: int) -> str:
        return f"the body has {nbytes} bytes or more, at most {self._max_bytes} are allowed"
