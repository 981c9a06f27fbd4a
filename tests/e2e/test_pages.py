"""The pages as they look and are judged: screenshots at three widths, axe-core, a worker killed, a full gallery.

`out/pages` has the screenshots afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from diffusers import UNet2DConditionModel
from integration.harness import ROOT, replica_processes
from kit.browser import OpenPage, axe_violations, needs_axe
from kit.waiting import wait_until
from safetensors.torch import save_file
from unit.deployments.engines.diffusion.ip_adapter_files import write_ip_adapter
from unit.deployments.engines.upscaler_files import compact, rrdb

from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.console.running import cluster_up
from infra.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.long]

CONFIG = ROOT / "configs/clusters/demo.yaml"
MODELS = ROOT / "infra/demo/models"
SHOTS = ROOT / "out/pages"
PATHS = {"create": "/", "chat": "/chat", "cluster": "/cluster", "pipelines": "/pipelines", "jobs": "/jobs"}
SIZES = {360: 740, 1280: 800, 3840: 2000}
FILL_GALLERY = """async (count) => {
  const asking = indexedDB.open("atelier");
  const database = await new Promise((resolve) => (asking.onsuccess = () => resolve(asking.result)));
  const canvas = new OffscreenCanvas(64, 64);
  canvas.getContext("2d").fillRect(8, 8, 40, 40);
  const file = await canvas.convertToBlob();
  const store = database.transaction("images", "readwrite").objectStore("images");
  for (let number = 0; number < count; number++) {
    const parameters = { model: "digits-flux", prompt: `image ${number}`, seed: number };
    store.put({ key: `k${number}`, at: number, file, width: 64, height: 64, parameters, warnings: [], tookS: 1 });
  }
  await new Promise((resolve) => (store.transaction.oncomplete = resolve));
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A demo cluster with two workers, which save running images often; a worker has room for one image model.

    Beside the demo's models there are two upscalers and an IP-Adapter, of random weights.
    """
    demo = load_cluster_config(CONFIG).model_dump()
    demo |= {"name": "pages", "http": {"port": free_port()}, "grpc": None}
    folder = tmp_path_factory.mktemp("pages")
    save_file(compact(scale=4), folder / "x4.safetensors")
    save_file(rrdb(num_blocks=1), folder / "esrgan-x4.safetensors")
    write_ip_adapter(folder / "look", UNet2DConditionModel.from_pretrained(MODELS / "digits-sdxl/unet"))
    demo["store"] = {"path": str(folder / "store")}
    demo["worker"] |= {"num_replicas": 2, "num_cpus": 0.5, "checkpoint_interval_s": 0.2}
    demo["worker"] |= {"device": "cpu-private", "device_budget_bytes": "8 MiB", "kv_cache_bytes": "1 MiB"}
    demo["models"] = [model | {"preload": False} for model in demo["models"]]
    for name in ("x4", "esrgan-x4"):
        demo["models"].append({"id": name, "path": str(folder / f"{name}.safetensors")})
    look = {"id": "look", "path": str(folder / "look"), "base": ["digits-sdxl"]}
    demo["adapters"] = [*demo["adapters"], look]
    with cluster_up(ClusterConfig.model_validate(demo), str(CONFIG)) as address:
        yield address


def prepare(page: Any, name: str) -> None:
    """Bring a page into a state that shows what it has."""
    if name == "create":
        for number, word in enumerate(("two", "eight", "three", "six", "five", "seven"), 1):
            page.get_by_label("Prompt", exact=True).fill(f"a handwritten {word}")
            page.get_by_role("button", name="Generate", exact=True).click()
            page.get_by_text("1 image" if number == 1 else f"{number} images", exact=True).wait_for()
    elif name == "chat":
        page.locator(".near").first.wait_for()  # of the chat's model; texts are compared by another one
        page.get_by_label("Message", exact=True).fill("What is 12 + 7?")
        page.keyboard.press("Enter")
        page.get_by_text("first token after").first.wait_for()
    elif name == "cluster":
        page.get_by_text("live", exact=True).wait_for()
    elif name == "jobs":
        page.get_by_role("heading", name="Jobs").wait_for()
    else:
        page.get_by_label("prompt").fill("3 + 4")
        page.get_by_role("button", name="Run").click()
        page.get_by_text("Done in").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PATHS)
def test_a_page_fits_each_width(url: str, open_page: OpenPage, name: str, scheme: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    for width, height in SIZES.items():
        page = open_page(url + PATHS[name], viewport={"width": width, "height": height}, color_scheme=scheme)
        prepare(page, name)
        page.screenshot(path=SHOTS / f"{name}-{scheme}-{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PATHS)
def test_axe_finds_nothing(url: str, open_page: OpenPage, name: str, scheme: str) -> None:
    page = open_page(url + PATHS[name], color_scheme=scheme, bypass_csp=True)
    prepare(page, name)
    assert axe_violations(page) == []


def test_models_that_alternate_are_seen_to_switch(url: str, open_page: OpenPage) -> None:
    """More models than have room, in turn; `out/pages/switch.png` shows it."""
    page = open_page(f"{url}/cluster", viewport={"width": 1440, "height": 960}, device_scale_factor=8 / 9)
    page.get_by_text("live", exact=True).wait_for()
    models = ("digits-flux", "digits-sdxl", "digits-flux-inverted")
    for model in models * 6:
        body = {"model": model, "prompt": "a handwritten two", "num_inference_steps": 24}
        httpx.post(f"{url}/v1/images/generations", json=body, timeout=120).raise_for_status()
    for model in models:
        page.locator(".decisions strong").filter(has_text=re.compile(f"→ {model}$")).first.wait_for()
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / "switch.png")


def test_an_image_by_an_ip_adapter_is_enlarged(url: str, open_page: OpenPage) -> None:
    """Enlarged twice: the largest is as the networks make it, and each tells what it was."""
    page = open_page(url)
    page.locator(".near").first.wait_for()
    page.get_by_label("Model", exact=True).fill("digits-sdxl")
    page.keyboard.press("Enter")
    page.get_by_label("Prompt", exact=True).fill("a handwritten five")
    section = page.get_by_role("group", name="IP-Adapter").first
    section.get_by_label("look").check(force=True)
    section.get_by_label("Image as a part").set_input_files(ROOT / "infra/demo/sheets/outline-five.png")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text("1 image", exact=True).wait_for()
    for number, name in enumerate(("x4", "esrgan-x4"), 2):
        page.locator("button.thumb").first.click()
        page.locator("dialog").get_by_label("Enlarge with").select_option(name)
        page.locator("dialog").get_by_role("button", name="Enlarge").click()
        page.get_by_text(f"{number} images", exact=True).wait_for()
    page.locator("button.thumb").first.click()
    page.locator("dialog dd").first.wait_for()  # a list of texts is not waited for
    shown = page.locator("dialog dd").all_inner_texts()
    assert {"esrgan-x4", "512 \N{MULTIPLICATION SIGN} 512", "x4 · 128 \N{MULTIPLICATION SIGN} 128"} <= set(shown)
    page.locator("dialog").get_by_role("button", name="Reuse parameters").click()
    assert page.get_by_label("Model", exact=True).input_value() == "digits-sdxl"


def test_an_image_is_made_on_when_its_worker_is_killed(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.get_by_label("Prompt", exact=True).fill("a handwritten nine")
    page.get_by_label("Steps").first.fill("200")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text(re.compile(r"Step \d+ of 200")).wait_for()
    busy = httpx.get(f"{url}/admin/cluster").json()["workers"]
    (number,) = [worker["process"] for worker in busy if worker.get("denoising")]
    psutil.Process(number).kill()
    page.get_by_text("Image done in").wait_for(timeout=120_000)
    wait_until(lambda: len(replica_processes("worker")) == 2, "the worker is replaced", timeout_s=120)


def test_two_hundred_images_are_shown_page_by_page(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.get_by_label("Model").wait_for()
    page.evaluate(FILL_GALLERY, 200)
    page.reload()
    page.get_by_text("200 images").wait_for()
    assert page.locator(".thumbs img").count() == 60
    page.get_by_role("button", name="Show more").click()
    page.get_by_role("button", name="View: image 199").click()
    page.get_by_role("dialog", name="image 199").wait_for()
    page.keyboard.press("ArrowRight")  # the focus is where the dialog puts it: on its first button
    page.get_by_role("dialog", name="image 198").wait_for()
