"""The pages in a real browser over fake replicas: keys, hostile texts, cancels, reloads, files, chats, the cluster."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from kit.browser import OpenPage
from kit.waiting import wait_until
from ray.exceptions import RayTaskError
from unit.deployments.ingress.http_fakes import CONFIG, Replicas
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.registry.directory import ModelRecord
from cluster.registry.snapshot import RegistrySnapshot
from configs.access import AccessConfig
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of
from deployments.ingress.http import create_http_app
from deployments.ingress.openai.image_files import ImageDescription, encode_image
from deployments.ingress.service.service import Service
from deployments.records import ImageProgress, ImageRequest, ImageResult, TextChunk
from deployments.records.errors import UnknownModel

pytestmark = pytest.mark.long

USER = "atl_user"
HOSTILE = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"


class Held(Replicas):
    """Holds images after their first step until `gate` is set, from any thread. `ended` are how they ended."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.ended: list[str] = []

    async def on_stream_images(self, request: ImageRequest) -> AsyncIterator[ImageProgress | ImageResult]:
        self.requests.append(request)
        try:
            yield ImageProgress(1, 4)
            while not self.gate.is_set():
                await asyncio.sleep(0.01)
            self.requests = [one for one in self.requests if one is not request]  # it arrives again
            yield await super().on_generate(request)
        except BaseException:
            self.ended.append("cancelled")
            raise
        self.ended.append("made")

    async def on_evict(self, model: str) -> list[str]:
        return []

    def broadcast(self, method: str, *_: Any) -> Any:
        async def results_async(**_: Any) -> list[Any]:
            return []

        return type("Answers", (), {"results_async": staticmethod(results_async)})


@pytest.fixture
def replicas() -> Held:
    return Held()


@pytest.fixture
def serve(replicas: Held) -> Callable[..., AbstractContextManager[str]]:
    """Return a function that serves the fakes over HTTP, with an event loop in a thread, and gives their address."""

    @contextmanager
    def serving(access: AccessConfig | None = None) -> Iterator[str]:
        listening = socket.create_server(("127.0.0.1", 0))
        update = {
            "access": access or AccessConfig(),
            "controller": CONFIG.controller.model_copy(update={"enabled": False}),
        }
        config = CONFIG.model_copy(update=update)

        async def run() -> None:
            watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
            app = create_http_app(Service(config, watch, handle, handle), config)
            server.append(uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)))
            await server[0].serve([listening])
            watch.close()

        server: list[uvicorn.Server] = []
        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        wait_until(lambda: server and server[0].started, "the server listens")
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            replicas.gate.set()
            server[0].should_exit = True
            thread.join()

    return serving


@pytest.fixture
def url(serve: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    with serve() as address:
        yield address


def generate(page: Any, prompt: str = "a lighthouse") -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Generate", exact=True).click()


def cancel(page: Any) -> None:
    page.locator("form").get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled").wait_for()


def closed(page: Any) -> None:
    """Wait until the dialog is gone: what is typed before goes nowhere, for the page behind it is inert."""
    page.locator("dialog").wait_for(state="detached")


def facts_of(page: Any) -> dict[str, str]:
    """Return the texts of an image's dialog, once it is there: a list of texts is not waited for."""
    page.locator("dialog dd").first.wait_for()
    names, values = (page.locator(f"dialog {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def test_an_image_carries_what_the_form_says(url: str, replicas: Held, open_page: OpenPage) -> None:
    page = open_page(url)
    page.get_by_label("Seed", exact=True).fill("41")
    page.get_by_label("+1").check(force=True)
    page.get_by_label("bold").first.fill("0.5")
    page.get_by_label("Steps").first.fill("7")
    page.get_by_text("More options").click()
    page.get_by_label("Negative prompt").fill("fog")
    generate(page)
    page.get_by_text("Image done in").wait_for()
    (request,) = replicas.requests
    assert (request.prompt, request.negative_prompt, request.seed) == ("a lighthouse", "fog", 41)
    assert ([(use.name, use.scale) for use in request.lora], request.num_inference_steps) == ([("bold", 0.5)], 7)
    assert page.get_by_label("Seed", exact=True).input_value() == "42"


def test_a_key_is_asked_for_refused_and_kept_in_the_tab_alone(
    serve: Callable[..., AbstractContextManager[str]], tmp_path: Path, open_page: OpenPage
) -> None:
    tmp_path.chmod(0o700)
    add_key(tmp_path / "keys", KeyEntry(name="user", sha256=hash_of(USER)))
    with serve(AccessConfig(keys_file=tmp_path / "keys")) as url:
        page = open_page(url)
        for key in ("atl_wrong", USER):
            page.locator("dialog input").fill(key)
            page.get_by_role("button", name="Use key").click()
            if key != USER:
                page.get_by_text("This key was refused").wait_for()
        page.get_by_label("Model").click()
        page.get_by_role("option").first.wait_for()
        assert page.evaluate("Object.values(localStorage).join()").find(USER) == -1
        assert page.evaluate("Object.values(sessionStorage).join()").find(USER) >= 0
        assert USER not in page.url
        page.goto(f"{url}/cluster")
        page.get_by_text("needs an admin key").first.wait_for()


def test_hostile_texts_are_shown_and_nothing_of_them_runs(url: str, replicas: Held, open_page: OpenPage) -> None:
    entry = replicas.states["flux"].entry.model_copy(update={"description": HOSTILE})
    replicas.states["flux"] = replace(replicas.states["flux"], entry=entry)
    replicas.states["broken"] = replace(replicas.states["broken"], error=HOSTILE)
    page = open_page(url)
    page.route("**/v1/models?*", lambda route: route.fulfill(json=renamed(route.fetch().json())))
    page.reload()
    page.get_by_label("Model").click()
    shown = page.get_by_role("listbox").inner_text()
    assert shown.count(HOSTILE) == 3
    page.keyboard.press("Escape")
    generate(page, HOSTILE)
    page.locator(".thumbs img").first.wait_for()
    page.locator("button.thumb").first.click()
    assert HOSTILE in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    replicas.error = ValueError(HOSTILE)
    generate(page)
    page.get_by_role("alert").wait_for()
    assert "pwned" not in page.title()
    assert page.locator("img[src=x]").count() == 0


def renamed(models: dict[str, Any]) -> dict[str, Any]:
    """The list with one more model, whose name is markup."""
    models["data"].append(models["data"][0] | {"id": HOSTILE, "description": ""})
    return models


def test_a_cancelled_image_ends_at_the_worker(url: str, replicas: Held, open_page: OpenPage) -> None:
    replicas.gate.clear()
    page = open_page(url)
    generate(page)
    page.get_by_text("Step 1 of 4").wait_for()
    cancel(page)
    wait_until(lambda: replicas.ended == ["cancelled"], "the worker's stream is closed")
    replicas.gate.set()
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("Image done in").wait_for()


def test_a_reload_in_the_middle_makes_no_image_twice(url: str, replicas: Held, open_page: OpenPage) -> None:
    replicas.gate.clear()
    page = open_page(url)
    generate(page)
    page.get_by_text("Step 1 of 4").wait_for()
    page.reload()
    page.get_by_text("Step 1 of 4").wait_for()
    replicas.gate.set()
    page.locator(".thumbs img").first.wait_for()
    assert (len(replicas.requests), replicas.ended) == (1, ["made"])


def test_what_lost_its_start_image_by_a_reload_is_not_asked_for_again(
    url: str, replicas: Held, open_page: OpenPage, tmp_path: Path
) -> None:
    """It would be another image. Before the reload it may be tried again, with its image."""
    file = tmp_path / "plain.png"
    file.write_bytes(encode_image(np.full((32, 32, 3), 90, np.uint8), "png"))
    replicas.gate.clear()
    page = open_page(url)
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Paint a mask").wait_for()
    generate(page)
    page.get_by_text("Step 1 of 4").wait_for()
    cancel(page)
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("Step 1 of 4").wait_for()
    assert [request.init_image is None for request in replicas.requests] == [False, False]
    page.reload()
    page.get_by_text("Step 1 of 4").wait_for()
    cancel(page)
    assert page.get_by_role("button", name="Try again").count() == 0


def test_two_tabs_make_images_beside_each_other(url: str, replicas: Held, open_page: OpenPage) -> None:
    first = open_page(url)
    second = open_page(url, first.context)
    for number, page in enumerate((first, second)):
        generate(page, f"number {number}")
        page.get_by_text("Image done in").wait_for()
    second.reload()
    wait_until(lambda: second.locator(".thumbs img").count() == 2, "the gallery of both")


def test_a_dropped_file_brings_its_parameters_back(url: str, open_page: OpenPage, tmp_path: Path) -> None:
    options = "Steps: 9, CFG scale: 4.5, Seed: 77, Size: 16x8, Model: flux"
    text = f"a red house <lora:bold:0.7>\nNegative prompt: rain, fog\n{options}"
    description = ImageDescription({"model": "flux", "seed": 77, "lora": [{"name": "bold", "scale": 0.7}]}, text)
    file = tmp_path / "house.png"
    file.write_bytes(encode_image(np.zeros((8, 16, 3), np.uint8), "png", description=description))
    (tmp_path / "plain.png").write_bytes(encode_image(np.zeros((8, 16, 3), np.uint8), "png"))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\xff" * 50)
    page = open_page(url)
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Use its parameters").click()
    page.get_by_text("Parameters of house.png are in the form").wait_for()
    read = {
        name: page.get_by_label(name, exact=True).first.input_value() for name in ("Prompt", "Negative prompt", "Seed")
    }
    assert read == {"Prompt": "a red house", "Negative prompt": "rain, fog", "Seed": "77"}
    assert [page.get_by_label(name).first.input_value() for name in ("Steps", "Guidance", "bold")] == [
        "9",
        "4.5",
        "0.7",
    ]
    page.set_input_files("input[type=file]", tmp_path / "broken.png")
    page.get_by_text("broken.png is no image").wait_for()
    page.set_input_files("input[type=file]", tmp_path / "plain.png")
    page.get_by_role("button", name="Paint a mask").wait_for()
    assert page.get_by_label("Prompt", exact=True).input_value() == "a red house"


def test_a_mask_is_painted_with_the_keyboard(url: str, replicas: Held, open_page: OpenPage, tmp_path: Path) -> None:
    file = tmp_path / "plain.png"
    file.write_bytes(encode_image(np.full((32, 32, 3), 90, np.uint8), "png"))
    page = open_page(url)
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Paint a mask").click()
    page.get_by_role("button", name="Use mask", disabled=False).wait_for()  # the image is open
    page.get_by_role("img", name="Mask.").press("Space")
    page.get_by_role("button", name="Use mask").click()
    closed(page)
    generate(page)
    page.get_by_text("Image done in").wait_for()
    (request,) = replicas.requests
    assert request.init_image.shape == (32, 32, 3)
    assert np.unique(request.mask_image).tolist() == [0, 255]
    assert request.mask_image[16, 16] == 255
    assert request.mask_image[0, 0] == 0


@pytest.fixture
def enlarging(replicas: Held) -> None:
    """Two upscalers; fakes that enlarge by two."""
    replicas.enlarges_by = 2
    for name in ("x2", "y2"):
        replicas.states[name] = ModelRecord(name, "ready", "upscaler", 1, f"version of {name}", variant={"scale": 2})


def test_nothing_enlarges_where_there_is_no_upscaler(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    generate(page)
    page.locator("button.thumb").first.click()
    page.get_by_role("button", name="Start from this").wait_for()
    assert page.get_by_role("button", name="Enlarge").count() == 0


@pytest.mark.usefixtures("enlarging")
def test_a_finished_image_is_enlarged_and_enters_the_gallery(
    url: str, replicas: Held, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(url)
    page.get_by_label("Seed", exact=True).fill("41")
    page.get_by_label("+1").check(force=True)
    generate(page)
    page.get_by_text("Image done in").wait_for()
    replicas.gate.clear()
    page.get_by_label("Enlarge with").select_option("y2")
    page.locator(".stage").get_by_role("button", name="Enlarge").click()
    page.get_by_text("Tile 1 of 4").wait_for()
    page.reload()
    page.get_by_text("Tile 1 of 4").wait_for()
    replicas.gate.set()
    page.get_by_text("2 images", exact=True).wait_for()
    first, second = replicas.requests
    assert (first.model, second.model, second.prompt.strip()) == ("flux", "y2", "")
    assert second.init_image.shape == (8, 16, 3)
    assert page.get_by_label("Seed", exact=True).input_value() == "42"  # as the first image left it
    page.locator("button.thumb").first.click()
    dialog = page.locator("dialog")
    facts = facts_of(page)
    told = {name: facts[name] for name in ("Model", "Prompt", "Size", "Enlarged from")}
    assert told == {
        "Model": "y2",
        "Prompt": "a lighthouse",
        "Size": "32 \N{MULTIPLICATION SIGN} 16",
        "Enlarged from": "flux · 16 \N{MULTIPLICATION SIGN} 8 · Seed 41",
    }
    assert dialog.get_by_label("Enlarge with").input_value() == "y2"  # kept over the reload
    with page.expect_download() as saved:
        dialog.get_by_role("button", name="Download").click()
    saved.value.save_as(tmp_path / "large.png")
    dialog.get_by_role("button", name="Reuse parameters").click()
    closed(page)
    assert page.get_by_label("Model", exact=True).input_value() == "flux"
    assert page.get_by_label("Seed", exact=True).input_value() == "41"
    page.set_input_files("input[type=file]", tmp_path / "large.png")  # made by an upscaler: no parameters of a prompt
    page.get_by_role("button", name="Paint a mask").wait_for()
    assert page.get_by_label("Prompt", exact=True).input_value() == "a lighthouse"


@pytest.mark.usefixtures("enlarging")
def test_an_image_of_the_gallery_is_enlarged_beside_a_grid_and_errors_are_text(
    url: str, replicas: Held, open_page: OpenPage
) -> None:
    page = open_page(url)
    page.get_by_label("Prompt", exact=True).fill("a tree")
    page.get_by_role("button", name="Grid").click()
    page.get_by_label("Values").first.fill("3-4")
    page.get_by_role("button", name="Generate 2").click()
    wait_until(lambda: page.locator(".thumbs img").count() == 2, "the gallery has both")
    replicas.error = ValueError(HOSTILE)
    page.locator("button.thumb").first.click()
    dialog = page.locator("dialog")
    dialog.get_by_label("Enlarge with").press("ArrowDown")  # turns no page
    assert dialog.get_by_text("1 / 2").count() == 1
    dialog.get_by_role("button", name="Enlarge").press("Enter")
    page.get_by_role("alert").wait_for()
    assert page.locator(".sheet .tile").count() == 2
    replicas.error = None
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("3 images", exact=True).wait_for()
    assert [request.model for request in replicas.requests] == ["flux", "flux", "y2", "y2"]
    assert "pwned" not in page.title()


def test_an_ip_adapter_reads_its_image(url: str, replicas: Held, open_page: OpenPage, tmp_path: Path) -> None:
    model = replicas.states["flux"]
    entry = model.entry.model_copy(update={"id": "xl"})
    replicas.states["xl"] = replace(model, id="xl", entry=entry, class_name="StableDiffusionXLPipeline")
    adapter = replicas.states["bold"]
    entry = adapter.entry.model_copy(update={"id": "look", "base": ("xl",)})
    replicas.states["look"] = replace(adapter, id="look", kind="ip_adapter", entry=entry)
    file = tmp_path / "look.png"
    file.write_bytes(encode_image(np.full((12, 20, 3), 90, np.uint8), "png"))
    page = open_page(url)
    page.locator(".near").first.wait_for()
    assert page.get_by_role("group", name="IP-Adapter").count() == 0  # flux has none
    page.get_by_label("Model", exact=True).fill("xl")
    page.keyboard.press("Enter")
    section = page.get_by_role("group", name="IP-Adapter").first
    section.get_by_label("look").check(force=True)
    section.get_by_label("Image as a part of the prompt").set_input_files(file)
    section.get_by_role("img", name="Image as a part of the prompt").wait_for()
    section.get_by_label("Scale").first.fill("0.6")
    generate(page)
    page.get_by_text("Image done in").wait_for()
    (use,) = replicas.requests[0].ip_adapter
    assert (use.name, use.scale, use.image.shape) == ("look", 0.6, (12, 20, 3))
    page.locator("button.thumb").first.click()
    assert "look 0.6" in facts_of(page).values()
    page.keyboard.press("Escape")
    closed(page)
    section.get_by_label("None").check(force=True)
    page.locator("button.thumb").first.click()
    page.get_by_role("button", name="Reuse parameters").click()
    closed(page)
    assert section.get_by_label("Scale").first.input_value() == "0.6"
    page.get_by_label("Model", exact=True).fill("other-flux")  # which has none: it is not sent
    page.keyboard.press("Enter")
    generate(page)
    page.get_by_text("2 images", exact=True).wait_for()
    assert (replicas.requests[1].model, replicas.requests[1].ip_adapter) == ("other-flux", ())


def test_a_grid_asks_for_each_cell(url: str, replicas: Held, open_page: OpenPage) -> None:
    page = open_page(url)
    page.get_by_label("Prompt", exact=True).fill("a tree")
    page.get_by_role("button", name="Grid").click()
    page.get_by_label("Values").first.fill("3-5")
    page.get_by_label("Down").select_option("guidance")
    page.get_by_label("Values").nth(1).fill("2, 4")
    page.get_by_role("button", name="Generate 6").click()
    page.get_by_role("button", name="Download sheet").and_(page.locator(":enabled")).wait_for()
    asked = {(request.seed, request.guidance_scale) for request in replicas.requests}
    assert asked == {(seed, guidance) for seed in (3, 4, 5) for guidance in (2.0, 4.0)}
    assert page.locator(".sheet thead th").all_inner_texts() == ["Seed 3", "Seed 4", "Seed 5"]


def test_what_was_typed_outlives_a_server_that_is_gone(
    serve: Callable[..., AbstractContextManager[str]], open_page: OpenPage
) -> None:
    with serve() as url:
        page = open_page(url)
        page.get_by_label("Model").wait_for()
        page.get_by_label("Prompt", exact=True).fill("a long text")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text("The server does not answer").wait_for()
    assert page.get_by_label("Prompt", exact=True).input_value() == "a long text"


def test_a_model_that_is_removed_while_it_is_chosen_is_told_and_the_text_stays(
    url: str, replicas: Held, open_page: OpenPage
) -> None:
    page = open_page(url)
    page.locator(".near").first.wait_for()
    chosen = page.get_by_label("Model", exact=True).input_value()
    page.get_by_label("Prompt", exact=True).fill("a long text")
    replicas.error = RayTaskError("f", "Traceback", UnknownModel(f"no model {chosen!r} (known: another)", "model"))
    page.get_by_role("button", name="Generate", exact=True).click()
    told = page.get_by_role("alert")
    told.wait_for()
    assert chosen in told.inner_text()
    assert page.get_by_label("Prompt", exact=True).input_value() == "a long text"


def test_a_browser_whose_disk_is_full_shows_the_image_and_says_so(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.evaluate(
        """() => {
            const full = () => { throw new DOMException("full", "QuotaExceededError") };
            IDBObjectStore.prototype.put = Storage.prototype.setItem = full;
        }"""
    )
    generate(page, "a long text")
    page.get_by_text("This browser gives the gallery no room").wait_for()
    page.locator(".thumbs img").first.wait_for()
    assert page.get_by_label("Prompt", exact=True).input_value() == "a long text"


def test_a_chat_is_streamed_and_stopped(url: str, replicas: Held, open_page: OpenPage) -> None:
    page = open_page(f"{url}/chat")
    page.locator(".near").first.wait_for()  # the model is chosen
    page.get_by_label("Message", exact=True).fill("x")
    page.keyboard.press("Enter")
    page.get_by_text(re.compile("3 tokens · first token after")).wait_for()
    assert page.locator(".turn.assistant .markdown").inner_text() == "Hello"
    assert [message.content for message in replicas.requests[0].messages] == ["x"]
    page.get_by_role("button", name="Answer again").click()
    wait_until(lambda: len(replicas.requests) == 2, "asked again")
    page.get_by_text(re.compile("3 tokens · first token after")).wait_for()
    page.get_by_role("button", name="New conversation").click()
    page.get_by_text("Ask the model something").wait_for()


def test_what_a_model_thinks_is_folded_away(url: str, replicas: Held, open_page: OpenPage) -> None:
    last: Any = {"timings_ms": {"total": 5.0}}
    replicas.chunks = [
        TextChunk("", 4, 1, reasoning=f"Hm, {HOSTILE}"),
        TextChunk("", 4, 2, reasoning="."),
        TextChunk("Well.", 4, 3),
        TextChunk("", 4, 4, "stop", **last),
    ]
    page = open_page(f"{url}/chat")
    page.locator(".near").first.wait_for()
    page.get_by_label("Message", exact=True).fill("x")
    page.keyboard.press("Enter")
    page.get_by_text(re.compile("4 tokens")).wait_for()
    thought = page.locator(".thought .text")
    assert not thought.is_visible()
    page.get_by_text("What was thought").click()
    assert thought.inner_text() == f"Hm, {HOSTILE}."
    assert page.locator(".turn.assistant .markdown").inner_text() == "Well."
    page.reload()
    page.get_by_text("What was thought").wait_for()


def test_texts_are_compared_and_ranked(url: str, open_page: OpenPage) -> None:
    page = open_page(f"{url}/chat")
    page.get_by_role("tab", name="Texts compared").click()
    page.get_by_label("Texts, one a line").fill("one\ntwo\nthree")
    page.get_by_role("button", name="Compare").click()
    page.locator(".matrix").wait_for()
    assert page.locator(".matrix tbody tr").count() == 3
    page.get_by_role("combobox", name="Model", exact=True).fill("ranker")  # the chat behind the tab has one, too
    page.keyboard.press("Enter")
    page.get_by_label("Query").fill("alpha")
    page.get_by_label("Documents, one a line").fill("beta\nalpha beta")
    page.get_by_role("button", name="Rank").click()
    page.get_by_role("cell", name="alpha beta").wait_for()
    assert page.locator("table tbody td:first-child").all_inner_texts() == ["alpha beta", "beta"]


def test_waits_and_refusals_are_shown_by_tenant_and_model(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    generate(page)
    page.get_by_text("Image done in").wait_for()
    page.goto(f"{url}/cluster")
    row = page.get_by_role("row", name=re.compile("^default flux")).locator("td")
    row.first.wait_for()
    assert [text for text in row.all_inner_texts() if text.isdigit()] == ["1"]
    load = {"pool": "worker", "model": "flux", "waiting": 7, "oldest_age_s": 3.0, "started": 2, "waited_s": 4.0}
    sections = ("nodes", "workers", "encoders", "models", "loads", "tenants", "decisions", "switches", "requests")
    picture = {name: {} for name in sections} | {"shares": {"it": load | {"tenant": HOSTILE, "refused": 5}}}
    picture["totals"] = {"cluster": HOSTILE, "at_s": 1.0, "num_models": 0, "policy": HOSTILE}
    event = f"event: picture\ndata: {json.dumps(picture)}\n\n"
    page.route("**/admin/live", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
    page.reload()
    page.get_by_role("table", name="").filter(has_text="Mean wait").wait_for()
    cells = page.locator("table tbody tr").first.locator("th,td").all_inner_texts()
    assert cells == [HOSTILE, "flux", "7", "3.0 s", "2.0 s", "2", "5"]
    assert "pwned" not in page.title()


def test_the_cluster_page_is_live_and_says_when_it_is_not(
    serve: Callable[..., AbstractContextManager[str]], open_page: OpenPage
) -> None:
    with serve() as url:
        page = open_page(f"{url}/cluster")
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_role("row", name=re.compile("^flux")).wait_for()  # is one, or this is an error
    page.get_by_text("The server does not answer").first.wait_for()
