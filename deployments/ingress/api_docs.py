"""What the OpenAPI page says of errors, the same way for all routes that have OpenAI's error envelope."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_STATUSES: Final = {
    400: "a field that is wrong; `param` names it",
    404: "no such model",
    413: "larger than the server allows",
    429: "too many requests wait already",
    500: "the model broke down on this request",
    503: "the model or its replica is not available now; try again",
    504: "the request's own timeout is over",
}
# What a request for a model may meet.
INFERENCE_ERRORS: Final = (400, 404, 413, 429, 500, 503, 504)
_UNUSED_SCHEMAS: Final = ("HTTPValidationError", "ValidationError")


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """What every error looks like."""

    error: ErrorBody


def documented(*statuses: int, **reasons: str) -> dict[int | str, dict[str, Any]]:
    """For the `responses` of a route. `_409="why"` says what a status means there."""
    texts = {status: _STATUSES[status] for status in statuses}
    texts |= {int(status[1:]): text for status, text in reasons.items()}
    return {status: {"model": ErrorAnswer, "description": texts[status]} for status in sorted(texts)}


def install(app: FastAPI) -> None:
    """Take out what FastAPI documents by itself: its answer to a malformed request, a 422, is a 400 here."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _without_validation_errors(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]  # FastAPI's documented way


def _without_validation_errors(schema: dict[str, Any]) -> dict[str, Any]:
    for operations in schema["paths"].values():
        for operation in operations.values():
            answer = operation["responses"].get("422", {})
            if _UNUSED_SCHEMAS[0] in str(answer.get("content")):
                del operation["responses"]["422"]
    for name in _UNUSED_SCHEMAS:
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    return schema
