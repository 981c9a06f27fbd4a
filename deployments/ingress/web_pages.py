"""The pages for people: Create, Chat, Cluster and Pipelines, from files of this package.

`web/` has them as browsers run them: modules without a build step, and one template of a page. What they show comes
from the API, with the key that their user types in, so the files themselves are for everybody. `web/vendor` has
htm 3.1.1 of npm with preact in it, as it is (its licences lie beside it). Nothing comes from another server.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

FOLDER: Final = Path(__file__).parent / "web"
FILES_PATH: Final = "/web/"
PAGES: Final = {"/": "create", "/chat": "chat", "/cluster": "cluster", "/pipelines": "pipelines"}
_TEMPLATE: Final = "page.html"
_MEDIA_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
_IMPORTED: Final = re.compile(r'^(?:import|export) (?:[^;]*? from )?"\./([\w./-]+)";', re.MULTILINE)
# Nothing written into the page runs or styles it, and nothing of another server is fetched, shown or sent to.
# `require-trusted-types-for` has browsers refuse a script that makes markup of a text.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # asked for again with its etag: a new version shows at once
    "vary": "accept, accept-encoding",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    zipped: bytes
    etag: str
    media_type: str

    @classmethod
    def of(cls, content: bytes, media_type: str) -> _File:
        digest = hashlib.sha256(content).hexdigest()[:32]
        return cls(content, gzip.compress(content, 9, mtime=0), f'"{digest}"', media_type)

    def answer(self, request: Request) -> Response:
        """Return the file, or that the browser has it already."""
        headers = {**_HEADERS, "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self.content, headers=headers, media_type=self.media_type)
        return Response(self.zipped, headers={**headers, "content-encoding": "gzip"}, media_type=self.media_type)


def create_web_router(route_prefix: str = "/", plain_root: str = "") -> APIRouter:
    """Return the routes of the pages and their files, which are kept in memory. `route_prefix` is the cluster's.

    `plain_root` is what / answers to a client that asks for no page, where another server's clients look for a text.
    """
    router = APIRouter(include_in_schema=False)
    sources = {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    template = sources.pop(_TEMPLATE).decode()
    files = {name: _File.of(content, _MEDIA_TYPES[Path(name).suffix]) for name, content in sources.items()}
    base = "" if route_prefix == "/" else f"{route_prefix}/"
    pages = {path: _File.of(_page(template, page, base, sources).encode(), "text/html") for path, page in PAGES.items()}

    async def page(request: Request) -> Response:
        if plain_root and request.scope["path"] == "/" and "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(plain_root, headers={"vary": "accept"})
        return pages[request.scope["path"]].answer(request)

    for path in PAGES:
        router.add_api_route(path, page, methods=["GET"])

    @router.get(FILES_PATH + "{name:path}")
    async def file(name: str, request: Request) -> Response:
        return files[name].answer(request) if name in files else Response(status_code=404, headers=_HEADERS)

    return router


def _page(template: str, page: str, base: str, sources: Mapping[str, bytes]) -> str:
    """Return a page: its name, its script, and all that it imports, which browsers then fetch side by side."""
    script = f"{page}.js"
    links = "\n".join(f'<link rel="modulepreload" href="{base}web/{name}">' for name in imports_of(script, sources))
    values = {"page": page, "title": page.capitalize(), "base": base, "modules": links}
    for path, name in PAGES.items():
        values[f"path-{name}"] = f"{base}{path[1:]}" or "./"
        values[f"current-{name}"] = 'aria-current="page"' if name == page else ""
    return re.sub(r"\{([a-z-]+)\}", lambda found: values[found[1]], template)


def imports_of(script: str, sources: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a script and what it imports, each once."""
    found = [script]
    for name in found:
        yield name
        found += [one for one in _IMPORTED.findall(sources[name].decode()) if one not in found]
