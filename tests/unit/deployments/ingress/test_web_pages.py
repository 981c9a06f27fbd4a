"""The pages as files: what is served, to whom, under which policy, and how much it is."""

from __future__ import annotations

import gzip
import hashlib
import re
from typing import Any

import httpx
import pytest

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from deployments.ingress.gate import _need_of
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service
from deployments.ingress.web_pages import FOLDER, PAGES

MAX_SCRIPT_BYTES = 150_000  # gzipped, of all pages
VENDORED = {  # htm/preact/standalone.module.js and marked/lib/marked.esm.js as npm has them
    "htm-preact.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "marked.js": "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
}
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SCRIPTS = sorted(path for path in FOLDER.rglob("*.js"))


def client(http: dict[str, Any] | None = None) -> httpx.AsyncClient:
    config = ClusterConfig.model_validate({"models": [{"id": "flux", "path": "/f"}], "http": http or {}})
    replicas: Any = object()  # nobody asks them
    app = create_http_app(Service(config, RegistrySnapshot(NamedActor(lambda: replicas)), replicas, replicas), config)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("path", PAGES)
async def test_a_page_runs_nothing_that_is_written_into_it_or_foreign(path: str) -> None:
    async with client() as server:
        page = await server.get(path, headers=BROWSER)
        assert page.headers["content-type"].startswith("text/html")
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
        assert "unsafe" not in str(policy)
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|https?:", page.text)
        assert page.text.count('aria-current="page"') == 1
        for link in re.findall(r'(?:src|href)="(web/[^"]+)"', page.text):
            assert (await server.get(f"/{link}")).status_code == 200


async def test_every_script_that_a_page_imports_is_asked_for_at_once() -> None:
    async with client() as server:
        for path, name in PAGES.items():
            links = set(
                re.findall(r'modulepreload" href="web/([^"]+)"', (await server.get(path, headers=BROWSER)).text)
            )
            imported = {f"{name}.js"}
            for script in links | imported:
                imported |= set(re.findall(r'from "\./([^"]+)"', (FOLDER / script).read_text()))
            assert imported == links


async def test_a_file_is_sent_small_and_once() -> None:
    async with client() as server:
        whole = await server.get("/web/style.css", headers={"accept-encoding": "identity"})
        assert whole.content == (FOLDER / "style.css").read_bytes()
        small = await server.get("/web/style.css", headers={"accept-encoding": "gzip"})
        assert (small.headers["content-encoding"], small.content) == ("gzip", whole.content)
        again = await server.get("/web/style.css", headers={"if-none-match": whole.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for path in ("/web/nothing.js", "/web/../web_pages.py", "/web/%2e%2e/web_pages.py", "/web/page.html"):
            assert (await server.get(path)).status_code == 404


async def test_clients_of_ollama_find_their_text_where_browsers_find_a_page() -> None:
    async with client() as server:
        assert (await server.get("/")).text == "Ollama is running"
        assert (await server.head("/")).status_code == 200
        assert "Create" in (await server.get("/", headers=BROWSER)).text
    async with client({"compat": {"ollama": False}}) as server:
        assert "Create" in (await server.get("/")).text


async def test_there_are_no_pages_where_the_config_wants_none() -> None:
    async with client({"web": False, "compat": {"ollama": False}}) as server:
        for path in (*PAGES, "/web/style.css"):
            assert (await server.get(path)).status_code == 404


async def test_pages_below_a_prefix_find_their_files() -> None:
    async with client({"route_prefix": "/studio"}) as server:
        for path in ("/studio", "/studio/", "/studio/cluster"):
            page = (await server.get(path, headers=BROWSER)).text
            links = re.findall(r'(?:src|href)="([^"#]+)"', page)
            assert {"/studio/web/style.css", "/studio/chat"} <= set(links)
            assert [link for link in links if (not link.startswith("/studio/"))] == []
            assert (await server.get("/studio/web/style.css")).status_code == 200


async def test_openai_paths_without_v1_and_the_page_chat_do_not_meet() -> None:
    async with client() as server:
        assert "Atelier" in (await server.get("/chat")).text
        assert (await server.post("/chat/completions", json={})).status_code == 400


def test_pages_are_for_everybody_and_what_they_show_is_not() -> None:
    assert {_need_of(path) for path in (*PAGES, "/web/style.css")} == {"nothing"}
    assert (_need_of("/admin/live"), _need_of("/v1/models"), _need_of("/v1/pipelines")) == ("admin", "key", "key")


def test_the_scripts_are_few_bytes_and_make_no_markup_of_texts() -> None:
    zipped = {path: len(gzip.compress(path.read_bytes())) for path in SCRIPTS}
    assert sum(zipped.values()) < MAX_SCRIPT_BYTES
    own = [path for path in SCRIPTS if path.parent == FOLDER]
    assert len(own) > 10
    for path in own:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerously|\beval\(", text), path
        assert not re.search(r"https?://", text), path
    vendored = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (FOLDER / "vendor").glob("*.js")}
    assert vendored == VENDORED
