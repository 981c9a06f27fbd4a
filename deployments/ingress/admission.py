"""How many requests one ingress works on at once: what comes beyond is refused at once, so that nothing queues unseen.

Probes and operators are not counted. Serve itself would let them queue behind the requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.errors import QueueFull
from deployments.ingress.errors import error_response
from deployments.ingress.kserve.rest.errors import is_protocol_path, protocol_error


class Admission:
    """Of one ingress replica, for requests of every protocol together. Lives on one event loop."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.num_in_progress = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """For the length of one request. Raises QueueFull."""
        if self.num_in_progress >= self.max_requests:
            raise QueueFull(f"as many requests are in progress as may be ({self.max_requests}); try again in a moment")
        self.num_in_progress += 1
        try:
            yield
        finally:
            self.num_in_progress -= 1


class AdmissionGate:
    """ASGI middleware: a place for each inference request, before its body is read, until its answer is out."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_inference(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            with self._admission.place():
                await self._app(scope, receive, send)
        except QueueFull as error:  # of `place`: what the app raises has become an answer in there
            respond = protocol_error if is_protocol_path(scope["path"]) else error_response
            await respond(error)(scope, receive, send)


def _is_inference(method: str, path: str) -> bool:
    return method == "POST" and path.startswith(("/v1/", "/v2/models/"))
