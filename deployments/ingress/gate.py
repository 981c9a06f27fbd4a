"""The gate: the one ASGI layer around all routes. It refuses a request before anything parses its body.

`access/` says who asks, `terms.py` what the request wants of the queue, and the body is bounded here.
`deployments/limits.py` bounds what a record may ask for, and the admission queue how many requests there are.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.cluster import LimitsConfig
from deployments.errors import RequestTooLarge, ServiceError
from deployments.ingress.access.callers import acting_for
from deployments.ingress.access.http import HttpAccess
from deployments.ingress.kserve.rest.routing import error_response_at
from deployments.ingress.terms import current_terms, read_terms
from deployments.ingress.turns import WAITED, takes_turns


class Gate:
    """ASGI middleware. What runs within has the key's tenant in `callers.current_tenant`, and `current_terms`.

    A body over `limits.max_body_bytes` is refused, announced or not. Bodies of /v1/images, which may have images in
    them, have a limit of their own: `max_upload_bytes`.
    """

    def __init__(self, app: ASGIApp, access: HttpAccess, limits: LimitsConfig) -> None:
        self._app = app
        self._access = access
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        with contextlib.ExitStack() as request:
            try:
                tenant = ""
                if caller := self._access.caller_of(scope["path"], scope["method"], headers):
                    request.enter_context(caller.begin_request())
                    request.enter_context(acting_for(caller))
                    tenant = caller.tenant
                if takes_turns(scope):
                    current_terms.set(replace(read_terms(headers, tenant), waited_s=scope.get(WAITED, 0.0)))
                receive = self._bounded(scope, receive)
            except ServiceError as error:
                await error_response_at(scope["path"], error)(scope, receive, send)
                return
            await self._app(scope, receive, send)

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """Return a `receive` that raises RequestTooLarge behind the limit; raises it now for a size that is known."""
        is_upload = scope["path"].startswith("/v1/images/")
        most = self._limits.max_upload_bytes if is_upload else self._limits.max_body_bytes
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            raise _too_large(int(announced), most)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise _too_large(received, most)
            return message

        return counted


def _too_large(nbytes: int, most: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has {nbytes} bytes or more, at most {most} are allowed")
