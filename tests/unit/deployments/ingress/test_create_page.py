"""The page Create in a real browser, over fake replicas."""

from __future__ import annotations

from kit.browser import OpenPage
from unit.deployments.ingress.page_server import PageServer


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
