"""The gate: ASGI layers around all routes. They refuse a request before anything parses its body.

`ReadGate` checks the key by the headers alone, and makes a request for inference wait for a read slot. It stands at two
places. Where HAProxy leads requests to this replica it stands before Serve, which reads whole bodies of any sender
and spends part of a millisecond on each. Within Serve it does the same for requests that come in
another way. `BodyGate` follows there: `terms.py` reads a request's terms for the queue, and `bodies.py` bounds the cost
of a body. `deployments/requests/limits.py` bounds the options of a record, and the admission queue the number of
requests.

`HttpAccess` decides which path needs which key, and which web pages may call.
A server without keys answers every caller, and every web page that its user opens reaches a loopback address.
Browsers name the calling page (`Origin`, for all but plain reading) and the called host (`Host`): a page with its own
name resolve to 127.0.0.1 (DNS rebinding) cannot hide that name. With keys, a page would have to know one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.admission.dispatcher import NotAdmitted
from cluster.admission.fair_slots import ReadLimiter
from cluster.door.deadlines import HideDeadline
from cluster.door.haproxy_rules import RECEIVED, machine_clock
from configs.access import AccessConfig, is_loopback
from configs.cluster import LimitsConfig
from configs.http import COMFYUI_PATHS, INFERENCE_PATHS, JOB_PATHS
from configs.jobs import MAX_FILE_BYTES
from deployments.ingress.access.callers import CALLER, Caller, Callers, Need, acting_for, shown_key
from deployments.ingress.error_forms import error_response_at, form_at
from deployments.ingress.messages.bodies import (
    SMALL_BYTES,
    BoundedBody,
    LargeBodies,
    LargeBody,
    announced_bytes,
    closing_unless_whole,
    receive_small,
)
from deployments.ingress.messages.responses import error_content
from deployments.ingress.messages.running_job import current_job
from deployments.ingress.messages.terms import current_terms, read_terms, refusal_error
from deployments.ingress.openai.image_files import PATH as LINKS
from deployments.ingress.paths import WithPrefix
from deployments.ingress.web_pages import FILES_PATH, PAGES, SCRIPT_PATH, STYLE_PATH
from deployments.records.errors import NotAllowed, ServiceError

# Probes, and the description of the API, which is the same on every server.
_PROBES: Final = frozenset({"/healthz", "/health", "/v2/health/live", "/v2/health/ready"})
# And the pages, which ask their user for a key before they call the API.
_OPEN: Final = _PROBES | {"/docs", SCRIPT_PATH, STYLE_PATH, "/openapi.json"} | PAGES.keys()
_OF_KEYS: Final = ("/v1/", "/v2/", "/api/", "/sdapi/")
_OF_KEYS_ALONE: Final = frozenset({"/v2", "/version", "/tokenize", "/detokenize"})
_OF_KEYS_BELOW: Final = frozenset(path[1:] for path in COMFYUI_PATHS)  # and what is below them
_REFUSALS: Final = {
    "401": "no API key, or an invalid one",
    "403": "not an admin key",
    "429": "the key has used up its rate, or has as much in progress as it may",
}
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
SOCKET: Final = "websocket"  # in place of a method: browsers let any page open one, and name it
WAITED: Final = "atelier.waited_s"  # in the ASGI scope, once the whole body is here: how long the request has waited
_ASKING: Final = frozenset({"http", "websocket"})  # types of connections from clients
_SERVE: Final = "/-/"  # HAProxy's health checks, which have no key
_REFUSAL: Final = "websocket.http.response"  # ASGI's extension: an answer in place of a websocket
_NOT_ALLOWED: Final = 1008  # RFC 6455, 7.4.1
MAX_MESSAGE_BYTES: Final = 2**16  # of a client over a websocket
_MAX_MESSAGES: Final = 4  # of a client that are here and not read
_TIMEOUT: Final = b"x-request-timeout-seconds"
_RECEIVED: Final = RECEIVED.encode()
_MAX_AGE_S: Final = 3600.0
_STEP_S: Final = 0.5  # less is the wall clock's drift
# Connections accepted at one look of the event loop at its sockets; more would slow down single connections.
_MOST_ACCEPTED: Final = 16
_LEAST_S: Final = 0.02  # shorter waits count as none, so that an answer repeats the client's own time limit


def _need_of(path: str) -> Need:
    """Return the right that a request for `path` needs. An unknown path is for operators."""
    if path in _OPEN or path.startswith((LINKS, FILES_PATH)):  # a link is its own key
        return "nothing"
    if path.startswith("/v2/repository/models/"):  # load and unload
        return "admin"
    if path in _OF_KEYS_ALONE or path.startswith(_OF_KEYS) or path[1:].partition("/")[0] in _OF_KEYS_BELOW:
        return "key"
    return "admin"


class HttpAccess:
    """The rules of access over HTTP: the caller of a request, and the callers that the config refuses.

    `http_host` is the address that the server listens on. A path that its `app` lacks is a 404 for every key, and not
    reserved for operators.
    """

    def __init__(self, callers: Callers, config: AccessConfig, http_host: str, app: FastAPI | None = None) -> None:
        self._callers = callers
        self._app = app
        self._check_origin = not callers.need_keys and "*" not in config.cors_origins
        self._check_host = bool(config.allowed_hosts) or (is_loopback(http_host) and not callers.need_keys)
        self._origins = frozenset(config.cors_origins)
        self._hosts = config.allowed_hosts

    def caller_of(self, path: str, method: str, headers: Headers) -> Caller | None:
        """Return the caller, None where no key is needed. The `method` of a websocket is `SOCKET`.

        Raises NotAuthenticated; NotAllowed for a key without the right, or a forbidden web page.
        """
        if (need := _need_of(path)) == "nothing":
            return None
        self._check_page(method, headers)
        if need == "admin" and self._app is not None and not _has_path(self._app, path):
            need = "key"
        return self._callers.identify(shown_key(headers.get("authorization"), headers.get("x-api-key")), need)

    def _check_page(self, method: str, headers: Headers) -> None:
        """Raise NotAllowed for a call from a forbidden web page."""
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if self._check_host and host and not _is_known_host(_name_of(host), self._hosts):
            raise NotAllowed(
                f"the header Host has the name {_name_of(host)[:100]!r}, which this server does not go by; "
                "`access: {allowed_hosts: [...]}` of the cluster config adds names"
            )
        if not self._check_origin or method in _READING or not origin or origin in self._origins:
            return
        if not _is_same_origin(origin, host):
            raise NotAllowed(
                f"web pages of {origin[:100]!r} may not ask this server; "
                "`access: {cors_origins: [...]}` of the cluster config allows them"
            )


def _has_path(app: FastAPI, path: str) -> bool:
    """Return whether the application has a route at `path`, of any method."""
    scope = {"type": "http", "method": "GET", "path": path}
    return any(route.matches(scope)[0] != Match.NONE for route in app.routes)


def describe_keys(app: FastAPI) -> None:
    """Make the OpenAPI page ask for a key, and show how requests are refused."""
    describe = app.openapi

    def schema() -> dict[str, Any]:
        page = describe()
        page.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in page["paths"].items():
            need = _need_of(path)
            content = error_content(form_at(path).answer)
            for operation in operations.values() if need != "nothing" else ():
                operation["security"] = [{"key": []}]
                for status, meaning in _REFUSALS.items():
                    if status != "403" or need == "admin":
                        operation["responses"].setdefault(status, {"description": meaning, "content": content})
        return page

    app.openapi = schema  # type: ignore[method-assign]  # FastAPI's documented way


def _is_known_host(name: str, allowed: Collection[str]) -> bool:
    """Return whether a lower-case name is one of `allowed`, or cannot be another's: an address, or localhost."""
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        pass
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761: never another machine
        return True
    return any(name == known or (known.startswith("*.") and name.endswith(known[1:])) for known in allowed)


def _is_same_origin(origin: str, host: str) -> bool:
    """Return whether the page of `origin` came from the server of `host`, whose scheme a proxy may have changed."""
    try:
        page = urlsplit(origin)
        server = urlsplit(f"{page.scheme}://{host}")
        default = {"http": 80, "https": 443}[page.scheme]
        return bool(page.hostname) and (page.hostname, page.port or default) == (
            server.hostname,
            server.port or default,
        )
    except (ValueError, KeyError):
        return False


def _name_of(host: str) -> str:
    """Return the header Host without its port, and an IPv6 address without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


class Arrivals:
    """The arrival times of requests at this machine's HAProxy, which notes the wall clock's time.

    The wall clock may step between a note and its reading: the time before the last step is known, too. The clock of
    another machine's HAProxy may be minutes off, so its notes say nothing here. A client that sends the header itself
    makes its own request older, at most.
    """

    def __init__(self, clock_name: bytes) -> None:
        self._clock_name = clock_name
        self._offset_s, self._offset_before_s = 0.0, 0.0  # of the wall clock, from a clock that never steps

    def arrived_s(self, scope: Scope, wall_s: float, now_s: float) -> float:
        """Return the arrival time of a request, on the clock that says `now_s`; now if it is not known."""
        if abs(wall_s - now_s - self._offset_s) > _STEP_S:
            self._offset_s, self._offset_before_s = wall_s - now_s, self._offset_s
        name, _, noted = dict(scope["headers"]).get(_RECEIVED, b"").rpartition(b":")
        if name != self._clock_name or not noted.isdigit() or len(noted) > 20:
            return now_s
        ages = (now_s + offset_s - int(noted) / 1e6 for offset_s in (self._offset_s, self._offset_before_s))
        return now_s - min((age for age in ages if 0 <= age < _MAX_AGE_S), default=0.0)


class ReadGate:
    """ASGI middleware: a key, then a read slot. Large bodies need no slot: they come piece by piece, and are read in
    threads. A websocket needs a key as well, before it is accepted.

    A request that has passed one gate passes the next one. `before_serve`: Serve answers its own probes behind it.
    """

    def __init__(
        self, app: ASGIApp, limiter: ReadLimiter, access: HttpAccess | None = None, *, before_serve: bool = False
    ) -> None:
        self._app = app
        self._limiter = limiter
        self._access = access
        self._before_serve = before_serve
        self._arrivals = Arrivals(machine_clock().encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_probe = scope["type"] not in _ASKING or (self._before_serve and scope["path"].startswith(_SERVE))
        if is_probe or CALLER in scope:
            await self._app(scope, receive, send)
            return
        try:
            scope[CALLER] = self._caller_of(scope)
        except ServiceError as error:
            await _refuse(error, scope, receive, send)
            return
        if _asks_a_model(scope) and announced_bytes(scope) <= SMALL_BYTES:
            await self._read(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _caller_of(self, scope: Scope) -> Caller | None:
        """Return the caller by the headers, before any of the body is read. Raises ServiceError."""
        if self._access is None:
            return None
        return self._access.caller_of(scope["path"], scope.get("method", SOCKET), Headers(scope=scope))

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in once it has a slot. It takes none while its client sends: slow clients delay no other."""
        arrived_s = self._arrivals.arrived_s(scope, time.time(), self._limiter.now_s())
        try:
            messages = await receive_small(receive)
        except ServiceError as slow:
            await _refuse(slow, scope, receive, send)
            return
        # The whole body is here. One more message follows: the client has gone or has its answer.
        leaving = asyncio.ensure_future(receive())
        rest = _beginning_with(messages, lambda: asyncio.shield(leaving))
        async with contextlib.AsyncExitStack() as reading:
            reading.callback(leaving.cancel)
            try:
                slot = self._limiter.slot(_tenant_of(scope), arrived_s + _timeout_s(scope))
                await reading.enter_async_context(slot)
            except NotAdmitted as error:
                await _refuse(refusal_error(error.refusal, 0.0), scope, rest, send)
                return
            if _has_left(leaving):
                return
            waited_s = self._limiter.now_s() - arrived_s
            scope[WAITED] = waited_s if waited_s > _LEAST_S else 0.0
            await self._app(scope, rest, send)


class BodyGate:
    """ASGI middleware behind a ReadGate. The code within has the key's tenant in `callers.current_tenant`, and
    `current_terms`.

    A body over `limits.max_body_bytes` is refused, announced or not. Bodies that may contain images have a limit
    of their own: `max_upload_bytes`; and files, which are not held in memory: `max_file_bytes`.
    """

    def __init__(self, app: ASGIApp, limits: LimitsConfig, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._app = app
        self._limits = limits
        self._max_file_bytes = max_file_bytes
        self._large = LargeBodies(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in _ASKING:
            await self._app(scope, receive, send)
            return
        caller: Caller | None = scope[CALLER]
        tenant = _tenant_of(scope)
        with contextlib.ExitStack() as request:
            try:
                if WAITED not in scope and scope["type"] == "http":  # none of its body is here yet
                    large = request.enter_context(LargeBody(self._large, tenant, has_others=caller is not None))
                    body = BoundedBody(scope, receive, send, self._limits, large, max_file_bytes=self._max_file_bytes)
                    receive, send = body.receive, body.send
                if caller:
                    counted = caller.begin_request(is_look=_looks_at_jobs(scope))
                    if scope["type"] == "http":
                        request.enter_context(counted)
                    else:  # open for hours, and no work: once for the rate
                        with counted:
                            pass
                    request.enter_context(acting_for(caller))
                if _asks_a_model(scope):
                    terms = read_terms(Headers(scope=scope), tenant)
                    max_timeout_s = job.timeout_s if (job := current_job.get()) else None
                    waited_s = scope.get(WAITED, 0.0)
                    current_terms.set(replace(terms, waited_s=waited_s, max_timeout_s=max_timeout_s))
            except ServiceError as error:
                await _refuse(error, scope, receive, send)
                return
            await self._app(scope, receive, send)


def _asks_a_model(scope: Scope) -> bool:
    """Return whether this is a request for inference. Probes, lists and the admin API never wait behind those."""
    path: str = scope.get("path", "")
    return scope["type"] == "http" and scope["method"] == "POST" and path.startswith(INFERENCE_PATHS)


def _looks_at_jobs(scope: Scope) -> bool:
    """Return whether a request begins or follows a job, which is in progress itself once it runs."""
    return scope["path"].startswith(JOB_PATHS) and current_job.get() is None


def put_gate_before_serve(
    limiter: ReadLimiter,
    access: HttpAccess,
    route_prefix: str = "/",
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> None:
    """Put a ReadGate, and the layers `around` it, before the HTTP server that Serve starts in this replica.

    The layers around it take a `route_prefix` off the path, which Serve gets whole. Behind the gate, Serve does not see
    deadlines.
    """
    from cluster.ray_seam.replica_http import put_before_serve

    def gated(app: ASGIApp) -> ASGIApp:
        whole = app if route_prefix == "/" else WithPrefix(app, route_prefix)
        return around(ReadGate(HideDeadline(whole), limiter, access, before_serve=True))

    put_before_serve(gated, _prepare)


async def _refuse(error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket" and _REFUSAL not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _NOT_ALLOWED})  # the server answers 403
        return
    send = await closing_unless_whole(scope, receive, send)
    await error_response_at(scope["path"], error)(scope, receive, send)


def _tenant_of(scope: Scope) -> str:
    caller: Caller | None = scope.get(CALLER)
    return caller.tenant if caller else ""


def _prepare(server: uvicorn.Server) -> None:
    """Bound what clients send over websockets, before the server starts."""
    server.config.ws_max_size, server.config.ws_max_queue = MAX_MESSAGE_BYTES, _MAX_MESSAGES
    server.config.ws_per_message_deflate = False  # what goes out is short, or compressed already
    _accept_many(server)


def _accept_many(server: uvicorn.Server) -> None:
    """Let a server that has not started yet accept several connections per iteration of its event loop.

    libuv, below uvloop, accepts one from a listening socket (since 1.45). If requests are read between two looks, ten
    milliseconds and more under load, the last of a thousand that HAProxy opens at once would wait for seconds, and
    every probe behind them. Each further descriptor of the same socket accepts one more.
    """
    startup = server.startup

    async def start(sockets: Sequence[socket.socket] | None = None) -> None:
        further = [one.dup() for one in sockets or () for _ in range(_MOST_ACCEPTED - 1)]
        await startup([*sockets, *further] if sockets else None)

    server.startup = start  # type: ignore[method-assign]


def _timeout_s(scope: Scope) -> float:
    """Return the request's own time limit; infinity for none, or for one that makes no sense."""
    try:
        timeout_s = float(dict(scope["headers"]).get(_TIMEOUT, b"inf"))
    except ValueError:
        return math.inf
    return timeout_s if timeout_s > 0 else math.inf  # a senseless limit is refused later


def _has_left(leaving: asyncio.Future[Message]) -> bool:
    """Return whether the client has gone."""
    has_come = leaving.done() and not leaving.cancelled() and leaving.exception() is None
    return has_come and leaving.result()["type"] == "http.disconnect"


def _beginning_with(messages: list[Message], receive: Receive) -> Receive:
    rest = iter(messages)

    async def received() -> Message:
        return next(rest, None) or await receive()

    return received


class HeadRequests:
    """ASGI middleware for HEAD: the code within sees a GET, and the answer ends after its headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        has_ended = False

        async def send_head(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                await send(message)
            elif not has_ended:
                has_ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)
