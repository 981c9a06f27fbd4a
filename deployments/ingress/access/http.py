"""Access over HTTP, decided before a body is read: which path needs which key, and which web pages may ask.

A server without keys answers whoever reaches it, and every web page that its user opens reaches a loopback address.
Browsers say which page asks (`Origin`, for all but plain reading) and by which name (`Host`): a page that has its own
name resolve to 127.0.0.1 (DNS rebinding) cannot hide that name. With keys, a page would have to know one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers

from configs.access import AccessConfig, is_loopback
from deployments.errors import NotAllowed
from deployments.ingress.access.callers import Caller, Callers, Need, shown_key
from deployments.ingress.error_forms import form_at
from deployments.ingress.errors import error_content
from deployments.ingress.openai.image_files import PATH as LINKS
from deployments.ingress.web_pages import FILES_PATH, PAGES, SCRIPT_PATH, STYLE_PATH

# Probes, and the description of the API, which is the same on every server.
_PROBES: Final = frozenset({"/healthz", "/health", "/v2/health/live", "/v2/health/ready"})
# And the pages, which ask for a key themselves before they ask the API.
_OPEN: Final = _PROBES | {"/docs", SCRIPT_PATH, STYLE_PATH, "/openapi.json"} | PAGES.keys()
_OF_KEYS: Final = ("/v1/", "/v2/", "/api/", "/sdapi/")
_OF_KEYS_ALONE: Final = frozenset({"/v2", "/version", "/tokenize", "/detokenize"})
_REFUSALS: Final = {
    "401": "no API key, or one that does not hold",
    "403": "not an admin key",
    "429": "the key has used up its rate, or has as much in progress as it may",
}
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def _need_of(path: str) -> Need:
    """Return what a request for `path` needs. What is not known to be for everybody is for operators."""
    if path in _OPEN or path.startswith((LINKS, FILES_PATH)):  # a link is its own key
        return "nothing"
    if path.startswith("/v2/repository/models/"):  # load and unload
        return "admin"
    return "key" if path in _OF_KEYS_ALONE or path.startswith(_OF_KEYS) else "admin"


class HttpAccess:
    """The rules of access over HTTP: who asks, and whom the config does not let in.

    `http_host` is the address that the server listens on. `is_path` tells whether the server has a path: one that it
    has not is a 404 to everybody with a key, not something that operators alone may ask.
    """

    def __init__(
        self, callers: Callers, config: AccessConfig, http_host: str, is_path: Callable[[str], bool] = lambda _: True
    ) -> None:
        self._callers = callers
        self._is_path = is_path
        self._check_origin = not callers.need_keys and "*" not in config.cors_origins
        self._check_host = bool(config.allowed_hosts) or (is_loopback(http_host) and not callers.need_keys)
        self._origins = frozenset(config.cors_origins)
        self._hosts = config.allowed_hosts

    def caller_of(self, path: str, method: str, headers: Headers) -> Caller | None:
        """Return who asks, None where nobody needs a key.

        Raises NotAuthenticated; NotAllowed for a key without the right, or a web page that may not ask.
        """
        if (need := _need_of(path)) == "nothing":
            return None
        self._check_page(method, headers)
        if need == "admin" and not self._is_path(path):
            need = "key"
        return self._callers.identify(shown_key(headers.get("authorization"), headers.get("x-api-key")), need)

    def _check_page(self, method: str, headers: Headers) -> None:
        """Raise NotAllowed when a web page asks that may not."""
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


def describe_keys(app: FastAPI) -> None:
    """Make the OpenAPI page ask for a key, and say how its requests are refused."""
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
