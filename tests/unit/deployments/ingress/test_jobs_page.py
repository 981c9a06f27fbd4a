"""The page Jobs in a real browser: what this key asked for in the background, with results, cancelling and deleting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kit.browser import OpenPage, axe_violations, needs_axe
from unit.deployments.ingress.http_fakes import CHAT, IMAGE, Replicas
from unit.deployments.ingress.page_server import PageServer, page_server_over

from deployments.records import ImageRequest, ImageResult

CHATS, IMAGES = "/v1/chat/completions", "/v1/images/generations"


class Painter(Replicas):
    """Paints all images but those that are called slow."""

    async def on_generate(self, request: ImageRequest) -> ImageResult:
        if request.prompt == "slow":
            await asyncio.Event().wait()
        return await super().on_generate(request)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    with page_server_over(Painter(), tmp_path_factory.mktemp("jobs")) as found:
        yield found


def begin(server: PageServer, endpoint: str, body: Any) -> str:
    answer = httpx.post(f"{server.url}/v1/jobs", json={"endpoint": endpoint, "body": body})
    return str(answer.json()["id"])


def row(page: Any, id_: str) -> Any:
    return page.get_by_role("row").filter(has_text=id_)


def begin_batch(server: PageServer) -> str:
    lines = [{"custom_id": name, "method": "POST", "url": CHATS, "body": CHAT} for name in "ab"]
    file = ("x.jsonl", "\n".join(map(json.dumps, lines)).encode())
    uploaded = httpx.post(f"{server.url}/v1/files", files={"file": file}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": uploaded["id"], "endpoint": CHATS}
    return str(httpx.post(f"{server.url}/v1/batches", json=asked).json()["id"])


@needs_axe
def test_jobs_are_shown_with_results_and_can_be_cancelled(server: PageServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/jobs")
    page.get_by_text("Nothing was asked for in the background").wait_for()
    chat, image, slow, wrong = (
        begin(server, CHATS, CHAT),
        begin(server, IMAGES, IMAGE | {"seed": 1}),
        begin(server, IMAGES, IMAGE | {"prompt": "slow"}),
        begin(server, CHATS, CHAT | {"model": "no"}),
    )
    batch = begin_batch(server)
    page.reload()
    for id_, status in ((chat, "done"), (image, "done"), (slow, "running"), (wrong, "failed"), (batch, "done")):
        row(page, id_).get_by_text(status).first.wait_for()
    row(page, wrong).get_by_text("no model").wait_for()
    row(page, chat).get_by_role("button", name="Result").click()
    page.get_by_role("dialog").get_by_text("Hello").wait_for()
    page.keyboard.press("Escape")
    row(page, image).get_by_role("button", name="Result").click()
    picture = page.get_by_role("dialog").get_by_role("img")
    picture.wait_for()
    page.wait_for_function("document.querySelector('dialog img').naturalWidth > 0")
    assert axe_violations(page) == []
    page.keyboard.press("Escape")
    row(page, batch).get_by_role("button", name="Result").click()
    page.get_by_role("dialog").get_by_text("2 requests: 2 completed, 0 failed").wait_for()
    with page.expect_download() as saved:
        page.get_by_role("dialog").get_by_role("button", name="output.jsonl").click()
    content = saved.value.path().read_text()
    assert sorted(json.loads(line)["custom_id"] for line in content.splitlines()) == ["a", "b"]
    page.keyboard.press("Escape")
    row(page, slow).get_by_role("button", name="Cancel").click()
    row(page, slow).get_by_text("cancelled").wait_for()
    row(page, wrong).get_by_role("button", name="Delete").click()
    row(page, wrong).wait_for(state="detached")
    page.get_by_label("cancelled").check()
    row(page, chat).wait_for(state="detached")
    row(page, slow).wait_for()
    assert axe_violations(page) == []
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
