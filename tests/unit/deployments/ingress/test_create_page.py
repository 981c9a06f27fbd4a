"""The page Create in a real browser, over fake replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kit.browser import OpenPage, axe_violations, needs_axe
from kit.waiting import wait_until
from unit.deployments.ingress.http_fakes import Replicas
from unit.deployments.ingress.page_server import PageServer, page_server_over

from deployments.ingress.openai.image_files import ImageDescription, encode_image

pytestmark = pytest.mark.drawn(4, of="file")  # in one browser, each another part of the page


def test_a_controlnet_without_its_image_is_told_and_nothing_is_sent(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url)
    before = len(page_server.replicas.requests)
    page.get_by_label("Prompt", exact=True).fill("x")
    page.locator("label").filter(has_text="strokes").click()
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text("strokes is chosen and has no image").wait_for()
    page.locator("fieldset").filter(has_text="ControlNet").get_by_text("None").first.click()
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text("Image done in").wait_for()
    assert [request.control for request in page_server.replicas.requests[before:]] == [()]


def test_a_model_that_does_not_fit_says_why_and_is_not_the_first_choice(open_page: OpenPage) -> None:
    replicas, why = Replicas(), "needs 433 MiB on a node, and store.node_budget_bytes is 358 MiB"
    replicas.states["flux"] = replace(replicas.states["flux"], state="does_not_fit", error=why)
    with page_server_over(replicas) as server:
        page = open_page(server.url)
        page.locator(".near").first.wait_for()
        models = page.get_by_label("Model", exact=True)
        assert models.input_value() == "other-flux"
        models.click()
        option = page.get_by_role("option").filter(has_text=why)
        assert option.get_by_text("does not fit").is_visible()
        option.click()
        page.get_by_label("Prompt", exact=True).fill("x")
        page.get_by_role("button", name="Generate", exact=True).click()
        page.get_by_role("alert").filter(has_text=f"model 'flux' does not fit this cluster: {why}").wait_for()


def test_on_a_phone_the_image_is_in_sight_when_it_is_asked_for(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url, viewport={"width": 360, "height": 800})
    page.get_by_label("Prompt", exact=True).fill("x")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text("Image done in").wait_for()
    box = page.locator(".stage img").bounding_box()
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= 800


def test_the_dialog_of_keys_says_whether_one_is_asked_for(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    page.locator(".near").first.wait_for()
    page.get_by_role("button", name="Key").click()
    assert "has not asked for a key" in page.locator("dialog").inner_text()


def test_notices_cover_nothing(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(f"{page_server.url}/chat")
    page.locator(".near").first.wait_for()
    page.get_by_text("Settings").click()
    page.get_by_label("JSON schema of the answer").fill("{bad")
    page.get_by_label("Message", exact=True).fill("x")
    page.get_by_role("button", name="Send").click()
    notice = page.locator(".notice")
    notice.wait_for()
    box = notice.bounding_box()
    under = page.evaluate(
        """({x, y, width, height}) => {
          const hidden = [...document.querySelectorAll("main button, main input, main textarea, header a")];
          return hidden.filter((one) => {
            const at = one.getBoundingClientRect();
            return at.width && at.left < x + width && at.right > x && at.top < y + height && at.bottom > y;
          }).length;
        }""",
        box,
    )
    assert under == 0


def test_a_grid_compares_models(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    before = len(page_server.replicas.requests)
    page.get_by_label("Prompt", exact=True).fill("x")
    page.get_by_label("Seed", exact=True).fill("7")
    page.get_by_label("Custom").check(force=True)
    for side in ("Width", "Height"):
        page.get_by_label(side).fill("16")
    page.get_by_role("button", name="Grid").click()
    page.get_by_label("Across").select_option("Model")
    values = page.get_by_label("Values").first
    assert values.input_value().startswith("flux, other-flux")
    values.fill("flux, chatty")
    page.get_by_role("button", name="Generate 2").click()
    page.get_by_text("Not served here, or makes no images: chatty").wait_for()
    values.fill("flux, other-flux")
    page.get_by_label("Down").select_option("Steps")
    page.get_by_label("Values").last.fill("2, 4")
    page.get_by_role("button", name="Generate 4").click()
    page.get_by_role("button", name="Download sheet").wait_for()
    wait_until(page.get_by_role("button", name="Download sheet").is_enabled, "the grid is made")
    made = {(one.model, one.num_inference_steps, one.seed) for one in page_server.replicas.requests[before:]}
    assert made == {(model, steps, 7) for model in ("flux", "other-flux") for steps in (2, 4)}
    assert page.locator(".sheet th[scope=col]").all_inner_texts() == ["flux", "other-flux"]
    page.reload()
    page.get_by_role("button", name="Generate 4").wait_for()


def test_the_schedulers_are_those_that_the_model_takes(page_server: PageServer, open_page: OpenPage) -> None:
    solvers = {
        "flux": {"_class_name": "FlowMatchEulerDiscreteScheduler"},
        "other-flux": {"_class_name": "EDMDPMSolverMultistepScheduler"},
    }
    page_server.replicas.solvers.update(solvers)
    page = open_page(page_server.url)
    page.get_by_text("More options").click()
    page.locator("#schedulers option").first.wait_for(state="attached")

    def shown() -> list[str]:
        found: list[str] = page.locator("#schedulers option").evaluate_all("all => all.map((one) => one.value)")
        return found

    assert shown()[0] == "FlowMatchEulerDiscreteScheduler"
    assert {"EulerDiscreteScheduler", "UniPCMultistepScheduler"} < set(shown())
    assert "DDPMScheduler" not in shown()
    page.get_by_label("Scheduler").fill("DDPMScheduler")
    page.get_by_text("flux does not take this one").wait_for()
    page.get_by_label("Model").click()
    page.get_by_role("option", name="other-flux").click()
    wait_until(lambda: len(shown()) == 1, "those of the other model")
    assert shown() == ["EDMDPMSolverMultistepScheduler"]


@needs_axe
def test_a_png_made_here_may_give_its_parameters_or_be_the_start(
    page_server: PageServer, open_page: OpenPage, tmp_path: Path
) -> None:
    file = tmp_path / "house.png"
    description = ImageDescription({"model": "flux", "seed": 5}, "a house\nSteps: 3, Seed: 5, Size: 16x8, Model: flux")
    file.write_bytes(encode_image(np.zeros((8, 16, 3), np.uint8), "png", description=description))
    page = open_page(page_server.url)
    page.get_by_label("Prompt", exact=True).fill("before")
    chooser = page.locator("input[type=file]").first
    chooser.set_input_files(file)
    page.get_by_role("dialog").wait_for()
    assert axe_violations(page) == []
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert page.get_by_label("Prompt", exact=True).input_value() == "before"
    chooser.set_input_files(file)
    page.get_by_role("button", name="Start from it").click()
    page.get_by_text("house.png is the image to start from").wait_for()
    assert page.get_by_label("Prompt", exact=True).input_value() == "before"
    page.get_by_role("button", name="Remove").first.click()
    chooser.set_input_files(file)
    page.get_by_role("button", name="Use its parameters").click()
    page.get_by_text("Parameters of house.png are in the form").wait_for()
    assert page.get_by_label("Prompt", exact=True).input_value() == "a house"
    assert page.get_by_label("Seed", exact=True).input_value() == "5"
