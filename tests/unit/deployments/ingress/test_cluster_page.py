"""The page Cluster in a real browser, over a picture that is given: its numbers are the picture's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from kit.browser import OpenPage, axe_violations, needs_axe
from kit.seeding import seeded_random
from unit.deployments.ingress.http_fakes import Replicas
from unit.deployments.ingress.page_server import PageServer, page_server_over

pytestmark = pytest.mark.drawn(3, of="file")  # in one browser, each another part of the page

MIB = 2**20
PART_BYTES = 8 * MIB


def picture(**changes: Any) -> dict[str, Any]:
    totals = {"cluster": "demo", "num_models": 0, "num_nodes": 1, "enabled": True, "policy": "latency-first"}
    empty: dict[str, Any] = {name: {} for name in ("models", "encoders", "loads", "tenants", "shares", "requests")}
    own = {"totals": totals | {"at_s": time.time()}, "nodes": {}, "workers": {}, "decisions": {}, "switches": {}}
    return empty | own | changes


def worker(charged: int, modules: list[list[Any]], **changes: Any) -> dict[str, Any]:
    told = {"node": "n1", "budget_bytes": 8 * MIB, "charged_bytes": charged, "running": {}, "used": 0.0}
    return told | {"modules": modules} | changes


def opened(server: PageServer, open_page: OpenPage, shown: dict[str, Any]) -> Any:
    page = open_page(server.url)
    event = f"event: picture\ndata: {json.dumps(shown)}\n\n"
    page.route("**/admin/live", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
    page.goto(f"{server.url}/cluster")
    page.locator(".holder").first.wait_for()
    return page


def test_a_worker_counts_what_is_its_own_and_a_node_ends_with_its_budget(
    page_server: PageServer, open_page: OpenPage
) -> None:
    modules = [["transformer", ["flux"], 9 * MIB, True, False, "k1"], ["vae", ["flux"], 2 * MIB, True, False, "k2"]]
    workers = {"shares": worker(0, modules), "owns": worker(11 * MIB, modules, budget_bytes=16 * MIB)}
    workers["caches"] = worker(13 * MIB, modules, budget_bytes=16 * MIB)  # a language model's, say
    node = {"resident_bytes": 13 * MIB, "leased_bytes": 13 * MIB, "pinned_bytes": 0, "budget_bytes": 358 * MIB}
    page = opened(page_server, open_page, picture(nodes={"n1": node}, workers=workers))
    told = {one.split("\n")[0]: one for one in page.locator(".holder").all_inner_texts()}
    assert "0 B of 8.0 MiB · 11 MiB in the node's memory" in told["Worker shares"]
    assert "11 MiB of 16 MiB" in told["Worker owns"]
    assert "13 MiB of 16 MiB" in told["Worker caches"]
    assert "in the node's memory" not in told["Worker owns"]
    (canvas,) = page.locator(".holder:not(.worker) canvas").all()
    filled = canvas.evaluate(
        """one => {
          const { width, height } = one;
          const row = one.getContext("2d").getImageData(0, Math.floor(height / 4), width, 1).data;
          let count = 0;
          for (let x = 0; x < width; x++) count += row[4 * x + 2] - row[4 * x] > 60;
          return count / width;
        }"""
    )
    assert 0.02 < filled < 0.06  # 13 of 358


def test_a_switch_is_as_old_as_its_time_says(page_server: PageServer, open_page: OpenPage) -> None:
    now = time.time()
    switch = {"replica": "w", "model": "flux", "switch_ms": 20.0, "attached_bytes": 5 * MIB, "reused": ["vae"]}
    switches = {"1": switch | {"at_s": now - 300}, "2": switch | {"at_s": now, "model": "sdxl"}}
    totals = picture()["totals"] | {"at_s": now}
    page = opened(
        page_server,
        open_page,
        picture(totals=totals, workers={"w": worker(0, [])}, nodes={"n1": {}}, switches=switches),
    )
    rows = page.locator(".decisions li").all_inner_texts()
    assert ["5 min ago" in row for row in rows] == [False, True]
    assert all("kept vae" in row for row in rows)


def test_each_model_has_its_state_and_the_reason_why_it_waits(page_server: PageServer, open_page: OpenPage) -> None:
    why = "needs 433 MiB on a node, and store.node_budget_bytes is 358 MiB"
    models = {
        state: {"state": state, "tier": "disk", "bytes": MIB, "ready_in_s": 2.5, "pinned": False, "error": ""}
        for state in ("registering", "updating", "ready", "does_not_fit")
    }
    models["does_not_fit"]["error"] = why
    totals = picture()["totals"] | {"num_models": 4, "notes": ["2 requests for 'ready' wait for a worker"]}
    page = opened(
        page_server, open_page, picture(totals=totals, models=models, workers={"w": worker(0, [])}, nodes={"n1": {}})
    )
    rows = {
        row.locator("th").inner_text(): row.locator("td").first.inner_text() for row in page.locator("tr:has(td)").all()
    }
    assert rows == {
        "registering": "arriving",
        "updating": "updating",
        "ready": "on disk\nready in 2.5 s",
        f"does_not_fit\n{why}": "does not fit",
    }
    page.get_by_text("2 requests for 'ready' wait for a worker").wait_for()


@needs_axe
def test_a_model_and_a_lora_are_added(page_server: PageServer, open_page: OpenPage) -> None:
    node = {"resident_bytes": 0, "leased_bytes": 0, "pinned_bytes": 0, "budget_bytes": MIB}
    page = opened(page_server, open_page, picture(nodes={"n1": node}))
    asked: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        is_first = len(asked) == 1
        error = {"error": {"message": "path: '/m' is outside of the model roots"}}
        route.fulfill(status=400 if is_first else 202, body=json.dumps(error if is_first else {"id": "x"}))

    page.route("**/admin/models?wait=false", answer)
    page.get_by_role("button", name="Add a model").click()
    dialog = page.get_by_role("dialog")
    add = dialog.get_by_role("button", name="Add", exact=True)
    assert add.is_disabled()
    dialog.get_by_label("Name").fill(" ink ")
    dialog.get_by_label("Path or address").fill("/m")
    assert axe_violations(page) == []
    add.click()
    dialog.get_by_role("alert").get_by_text("outside of the model roots").wait_for()
    dialog.get_by_label("LoRA or ControlNet").check(force=True)
    assert add.is_disabled()
    dialog.get_by_label("Of the models").fill("flux, sdxl")
    dialog.get_by_label("Path or address").fill("hf://someone/ink")
    add.click()
    page.get_by_text("ink is being taken in").wait_for()
    dialog.wait_for(state="detached")
    assert asked == [{"id": "ink", "path": "/m"}, {"id": "ink", "path": "hf://someone/ink", "base": ["flux", "sdxl"]}]


@needs_axe
def test_a_lora_is_uploaded_in_parts_and_goes_on_after_a_reload(
    tmp_path: Path, open_page: OpenPage, replicas: Replicas
) -> None:
    content = seeded_random().randbytes(2 * PART_BYTES + 12_345)
    file = tmp_path / "ink.safetensors"
    file.write_bytes(content)
    registered: list[dict[str, Any]] = []
    offsets: list[Any] = []

    def register(route: Any) -> None:
        registered.append(route.request.post_data_json)
        route.fulfill(status=202, body='{"id": "ink"}')

    def break_off(route: Any) -> None:
        offset = int(route.request.url.partition("offset=")[2])
        offsets.append(offset)
        if offset:
            route.abort()
        else:
            route.continue_()

    def filled(page: Any) -> Any:
        page.get_by_role("button", name="Add a model or LoRA").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("LoRA or ControlNet").check(force=True)
        dialog.get_by_label("Name").fill("ink")
        dialog.get_by_label("Of the models").fill("flux")
        dialog.get_by_label("Or a file of this computer").set_input_files(file)
        assert dialog.get_by_label("Path or address").is_disabled()
        return dialog

    with page_server_over(replicas, tmp_path) as server:
        node = {"resident_bytes": 0, "leased_bytes": 0, "pinned_bytes": 0, "budget_bytes": MIB}
        page = opened(server, open_page, picture(nodes={"n1": node}))
        page.route("**/admin/models?wait=false", register)
        page.route("**/admin/uploads/*?offset=*", break_off)
        dialog = filled(page)
        dialog.get_by_role("button", name="Add", exact=True).click()
        dialog.get_by_text("8.0 MiB of 16 MiB").wait_for()
        assert axe_violations(page) == []
        for width in (360, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert dialog.evaluate("one => one.scrollWidth <= one.clientWidth")
        dialog.get_by_role("button", name="Close").click()
        page.get_by_text("ink.safetensors is not sent whole").wait_for()
        assert (offsets[0], set(offsets[1:])) == (0, {PART_BYTES})
        page.unroute("**/admin/uploads/*?offset=*", break_off)
        page.on("request", lambda asked: offsets.append(asked.url) if "offset=" in asked.url else None)
        offsets.clear()
        page.reload()
        filled(page).get_by_role("button", name="Add", exact=True).click()
        page.get_by_text("ink is being taken in").wait_for()
        sent = [int(str(url).partition("offset=")[2]) for url in offsets]
        assert sent == [PART_BYTES, 2 * PART_BYTES], "what was there was not sent again"
        (kept,) = (tmp_path / "jobs" / "files").iterdir()
        assert kept.read_bytes() == content
        (asked,) = registered
        assert asked == {"id": "ink", "path": asked["path"], "base": ["flux"]}
        assert Path(asked["path"]).name == kept.name
        assert page.evaluate("localStorage.getItem('atelier.uploads')") == "{}"
