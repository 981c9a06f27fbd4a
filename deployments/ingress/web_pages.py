"""The pages for people, from files of this package: Create, Chat, Pipelines, Jobs, Cluster, and /docs, the API's forms.

`web/` has the first five as browsers run them: modules without a build step, and one template of a page. Their content
comes from the API, with the key that their user types in, so the files themselves need no key. `web/vendor` has
htm 3.1.1 of npm with preact in it and marked 18.2.1, `swagger_ui/` has swagger-ui-dist 5.35.0 of npm, all unchanged
(their licences lie beside them). Nothing comes from another server, so the pages work without internet, and no other
server learns who reads them.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response

_MODULE: Final = "atelier/"  # modules of a page without an address find each other by names of their own
_RELATIVE: Final = re.compile(r'(^(?:import|export) (?:[^;]*? from )?)"\./', re.MULTILINE)
# Modules are data addresses, so only code in the file runs; nothing is fetched.
_STANDALONE_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)
_STANDALONE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
<script type="importmap">{imports}</script>
</head>
<body class="cluster-page">
<main id="main" tabindex="-1"></main>
<script type="application/json" id="runs">{data}</script>
<script type="module">import "{entry}";</script>
</body>
</html>
"""

SWAGGER_FOLDER: Final = Path(__file__).parent / "swagger_ui"
SCRIPT_PATH: Final = "/docs/swagger-ui-bundle.js"
STYLE_PATH: Final = "/docs/swagger-ui.css"
_CACHED: Final = {"cache-control": "public, max-age=86400"}

FOLDER: Final = Path(__file__).parent / "web"
FILES_PATH: Final = "/web/"
PAGES: Final = {"/": "create", "/chat": "chat", "/cluster": "cluster", "/pipelines": "pipelines", "/jobs": "jobs"}
_TEMPLATE: Final = "page.html"
_MEDIA_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
_IMPORTED: Final = re.compile(r'^(?:import|export) (?:[^;]*? from )?"\./([\w./-]+)";', re.MULTILINE)
# Nothing written into the page runs or styles it, and nothing of another server is fetched, shown or sent to.
# `require-trusted-types-for` makes browsers refuse a script that turns text into markup.
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
    @functools.cache  # an ingress made again in one process, as in tests, has the same files
    def of(cls, content: bytes, media_type: str) -> _File:
        digest = hashlib.sha256(content).hexdigest()[:32]
        return cls(content, gzip.compress(content, 9, mtime=0), f'"{digest}"', media_type)

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has it already."""
        headers = {**_HEADERS, "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self.content, headers=headers, media_type=self.media_type)
        return Response(self.zipped, headers={**headers, "content-encoding": "gzip"}, media_type=self.media_type)


def create_web_router(route_prefix: str = "/", plain_root: str = "") -> APIRouter:
    """Return the routes of the pages and their files, which are kept in memory. `route_prefix` is the cluster's.

    `plain_root` is the answer of / to a client that wants no page: another server's clients look for a text there.
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
    """Return a page: its name, its script, and all its imports, which browsers then fetch in parallel."""
    script = f"{page}.js"
    links = "\n".join(f'<link rel="modulepreload" href="{base}web/{name}">' for name in imports_of(script, sources))
    values = {"page": page, "title": page.capitalize(), "base": base, "modules": links}
    for path, name in PAGES.items():
        values[f"path-{name}"] = f"{base}{path[1:]}" or "./"
        values[f"current-{name}"] = 'aria-current="page"' if name == page else ""
    return re.sub(r"\{([a-z-]+)\}", lambda found: values[found[1]], template)


def imports_of(script: str, sources: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a script and its imports, each once."""
    found = [script]
    for name in found:
        yield name
        found += [one for one in _imported(sources[name]) if one not in found]


@functools.cache  # most files belong to several pages
def _imported(source: bytes) -> list[str]:
    return _IMPORTED.findall(source.decode())


def create_docs_router(title: str) -> APIRouter:
    """Return the routes of the page and its two files."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        # The validator would send the address of this server to another one.
        settings = {"validatorUrl": None}
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title=title,
            swagger_js_url=SCRIPT_PATH,
            swagger_css_url=STYLE_PATH,
            swagger_favicon_url="data:,",
            swagger_ui_parameters=settings,
        )

    @router.get(SCRIPT_PATH)
    async def script() -> FileResponse:
        return FileResponse(SWAGGER_FOLDER / Path(SCRIPT_PATH).name, media_type="text/javascript", headers=_CACHED)

    @router.get(STYLE_PATH)
    async def style() -> FileResponse:
        return FileResponse(SWAGGER_FOLDER / Path(STYLE_PATH).name, media_type="text/css", headers=_CACHED)

    return router


def simulated_page(title: str, recordings: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML that compares runs of the simulator, those of `recording_of`."""
    entry = "simulated.js"
    sources = {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.rglob("*.js")}
    imports = {f"{_MODULE}{name}": _address_of(sources[name].decode()) for name in imports_of(entry, sources)}
    return _STANDALONE.format(
        policy=_STANDALONE_POLICY,
        title=html.escape(title),
        style=(FOLDER / "style.css").read_text(encoding="utf-8"),
        imports=_json_in_html({"imports": imports}),
        data=_json_in_html(recordings),
        entry=f"{_MODULE}{entry}",
    )


def _address_of(source: str) -> str:
    script = _RELATIVE.sub(rf'\1"{_MODULE}', source).encode()
    return f"data:text/javascript;base64,{base64.b64encode(script).decode()}"


def _json_in_html(value: Any) -> str:
    """Return JSON that closes no HTML element, whatever names it has."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
