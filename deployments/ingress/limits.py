"""Limits of one ingress replica: requests in progress and bytes of a body. Requests beyond them are refused at once.

Nothing queues unseen. Probes and operators are not counted: Serve itself would let them queue behind the requests.
`deployments/limits.py` bounds what a record may ask for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import QueueFull, RequestTooLarge
from deployments.ingress.errors import error_response
from deployments.ingress.kserve.rest.routing import is_protocol_path, protocol_error_response


class Admission:
    """A counter of the requests in progress, of every protocol together. Lives on one event loop."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.num_in_progress = 0

    @contextlib.contextmanager
    def admit_request(self) -> Iterator[None]:
        """Count one request for as long as the context lasts.

        Raises: QueueFull when `max_requests` are in progress.
        """
        if self.num_in_progress >= self.max_requests:
            raise QueueFull(f"as many requests are in progress as may be ({self.max_requests}); try again in a moment")
        self.num_in_progress += 1
        try:
            yield
        finally:
            self.num_in_progress -= 1


class AdmissionGate:
    """ASGI middleware that admits an inference request before its body is read, until its answer is out."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_inference(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            with self._admission.admit_request():
                await self._app(scope, receive, send)
        except QueueFull as error:  # of `admit_request`: what the app raises has become an answer in there
            await _refusal(scope["path"], error)(scope, receive, send)


class BodyLimit:
    """ASGI middleware that refuses a body over `max_bytes`, announced or not, before anything parses it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await _refusal(scope["path"], self._too_large(int(announced)))(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large(received)
            return message

        await self._app(scope, counted, send)

    def _too_large(self, nbytes: int) -> RequestTooLarge:
        return RequestTooLarge(f"the body has {nbytes} bytes or more, at most {self._max_bytes} are allowed")


def _is_inference(method: str, path: str) -> bool:
    return method == "POST" and path.startswith(("/v1/", "/v2/models/"))


def _refusal(path: str, error: Exception) -> Response:
    return protocol_error_response(error) if is_protocol_path(path) else error_response(error)
