"""The pages in a real browser on a real cluster: an image with a LoRA, one cancelled, a reload in the middle."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from integration.harness import Cluster
from kit.browser import OpenPage
from kit.waiting import wait_until

pytestmark = pytest.mark.ray

LONG_STEPS = "200"  # as many as may be: an image that is still on its way when the page is left
LONG_SIDE = "128"  # and large: a step of 16 times as many tokens


def generate(page: Any, prompt: str, steps: str = "8") -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    if steps == LONG_STEPS:
        page.get_by_text("Custom", exact=True).click()
        page.get_by_label("Width").fill(LONG_SIDE)
        page.get_by_label("Height").fill(LONG_SIDE)
    page.get_by_label("Steps").first.fill(steps)
    page.get_by_role("button", name=re.compile("^Generate")).click()


def thumbs(page: Any) -> Any:
    return page.locator(".thumbs img")


def running(cluster: Cluster) -> int:
    models = httpx.get(f"{cluster.url}/admin/admission").json()["models"]
    return sum(load["running"] + load["waiting"] for load in models if load["pool"] == "worker")


def test_an_image_with_a_lora_is_made_kept_and_told(cluster: Cluster, open_page: OpenPage) -> None:
    page = open_page(cluster.url)
    page.get_by_label("bold").first.fill("0.8")
    generate(page, "a handwritten five")
    page.get_by_text("Image done in").wait_for()
    page.reload()
    thumbs(page).first.click()
    told = page.locator("dialog dl").inner_text()
    assert {"digits-flux", "a handwritten five", "bold 0.8"} <= {line.strip() for line in told.splitlines()}


def test_a_cancelled_image_ends_in_the_cluster(cluster: Cluster, open_page: OpenPage) -> None:
    page = open_page(cluster.url)
    page.get_by_label("Images", exact=True).fill("4")  # together they take long enough to be met on their way
    generate(page, "a handwritten six", LONG_STEPS)
    page.get_by_text(re.compile(r"Step \d+ of 200")).first.wait_for()
    wait_until(lambda: running(cluster) > 0, "the worker has an image")
    page.locator("form").get_by_role("button", name="Cancel all").click()
    page.get_by_text("Cancelled").first.wait_for()
    wait_until(lambda: running(cluster) == 0, "the worker has nothing to do")
    assert page.get_by_text("Cancelled").count() + thumbs(page).count() == 4


def test_a_reload_in_the_middle_takes_the_image_up_again(cluster: Cluster, open_page: OpenPage) -> None:
    page = open_page(cluster.url)
    generate(page, "a handwritten seven", LONG_STEPS)
    page.get_by_text(re.compile(r"Step \d+ of 200")).wait_for()
    page.reload()
    page.get_by_text("Back after a reload").wait_for()
    assert page.get_by_label("Prompt", exact=True).input_value() == "a handwritten seven"
    page.get_by_text("Image done in").wait_for(timeout=120_000)
    assert thumbs(page).count() == 1


def test_the_cluster_page_shows_a_switch_as_it_happens(cluster: Cluster, open_page: OpenPage) -> None:
    page = open_page(f"{cluster.url}/cluster")
    page.get_by_text("live", exact=True).wait_for()
    httpx.post(f"{cluster.url}/v2/repository/models/digits-sdxl/unload", timeout=60)
    body = {"model": "digits-sdxl", "prompt": "a handwritten two", "num_inference_steps": 4}
    httpx.post(f"{cluster.url}/v1/images/generations", json=body, timeout=120).raise_for_status()
    page.locator(".decisions").get_by_text("→ digits-sdxl").first.wait_for()
    row = page.get_by_role("row", name=re.compile(r"^digits-sdxl(?!-)"))
    row.get_by_text("ready", exact=True).wait_for()
    row.get_by_role("button", name="Pin digits-sdxl").click()
    row.get_by_role("button", name="Unpin digits-sdxl").click()
    row.get_by_role("button", name="Pin digits-sdxl").wait_for()


def test_a_pipeline_tells_its_stages(cluster: Cluster, open_page: OpenPage) -> None:
    page = open_page(f"{cluster.url}/pipelines")
    page.get_by_role("button", name="sum-to-digit").click()
    page.get_by_label("prompt").fill("3 + 4")
    page.get_by_role("button", name="Run").click()
    page.get_by_text("Done in").wait_for()
    states = page.locator("table tbody tr td:nth-child(4)").all_inner_texts()
    assert states == ["done"] * 6
    assert page.locator(".outputs .text").inner_text() == "7."


def test_a_chat_is_streamed_with_its_speed(cluster: Cluster, open_page: OpenPage) -> None:
    page = open_page(f"{cluster.url}/chat")
    page.locator(".near").first.wait_for()  # the model is chosen
    page.get_by_label("Message", exact=True).fill("What is 12 + 7?")
    page.keyboard.press("Enter")
    page.get_by_text(re.compile(r"first token after .* tokens/s")).wait_for()
    assert page.locator(".turn.assistant .markdown").inner_text() == "19."
