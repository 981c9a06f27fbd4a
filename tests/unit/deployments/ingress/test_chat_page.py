"""The page Chat in a real browser, over replicas that say what they are told: nothing that was said gets lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.browser import OpenPage, axe_violations, needs_axe
from kit.waiting import wait_until
from PIL import Image
from unit.deployments.ingress.http_fakes import Replicas
from unit.deployments.ingress.page_server import PageServer, page_server_over

from deployments.records import ChatRequest, TextChunk

pytestmark = pytest.mark.drawn(6, of="file")  # in one browser, each another part of the page

MARKDOWN = """## Steps

1. take **two**
2. see [a page](https://example.org/x), not [this](javascript:alert(1)) nor <img src=x onerror=alert(1)>

| n | twice |
|---|------:|
| 2 | 4 |

```python
print("<b>2</b>")
```"""


class Talker(Replicas):
    """Answers each question by its entry in `answers`, in pieces; `held` after the first one until it is set free."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, str] = {}
        self.reason = "stop"
        self.is_held = False

    async def on_stream_text(self, request: ChatRequest) -> AsyncIterator[TextChunk]:
        self._arrived(request)
        last = request.messages[-1].text
        pieces = re.findall(r"\S+\s*", self.answers.get(last, f"heard: {last}"))
        for number, piece in enumerate(pieces):
            if number == 1:
                while self.is_held:
                    await asyncio.sleep(0.01)
            is_last = number == len(pieces) - 1
            yield TextChunk(piece, 4, number + 1, self.reason if is_last else None, {"total": 5.0} if is_last else {})

    def said(self) -> list[list[tuple[str, str]]]:
        return [[(message.role, message.text) for message in request.messages] for request in self.requests]


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with page_server_over(Talker()) as found:
        yield found
        found.replicas.is_held = False


@pytest.fixture
def talker(server: PageServer) -> Iterator[Talker]:
    """The replicas, as they were before the test when it ends."""
    found = server.replicas
    yield found
    found.requests.clear()
    found.answers.clear()
    found.reason, found.is_held = "stop", False


@pytest.fixture
def chat(server: PageServer, talker: Talker, open_page: OpenPage) -> Any:
    page = open_page(f"{server.url}/chat")
    page.locator(".near").first.wait_for()  # the model is chosen
    return page


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Any) -> list[str]:
    return page.locator(".turn.assistant .markdown").all_inner_texts()


def titles(page: Any) -> list[str]:
    return page.locator(".conversations li button:first-child").all_inner_texts()


def test_conversations_are_found_again_after_a_reload(chat: Any, talker: Talker) -> None:
    ask(chat, "first question")
    chat.get_by_text("heard: first question").wait_for()
    chat.get_by_role("button", name="New conversation").click()
    ask(chat, "second question")
    chat.get_by_text("heard: second question").wait_for()
    chat.reload()
    chat.get_by_text("heard: second question").wait_for()
    assert titles(chat) == ["second question", "first question"]
    chat.get_by_role("button", name="first question", exact=True).click()
    chat.get_by_text("heard: first question").wait_for()
    ask(chat, "and then")
    chat.get_by_text("heard: and then").wait_for()
    assert talker.said()[-1] == [
        ("user", "first question"),
        ("assistant", "heard: first question"),
        ("user", "and then"),
    ]


def test_an_answer_that_was_left_is_kept_and_goes_on(chat: Any, talker: Talker) -> None:
    talker.answers = {"tell me": "one two", "one ": "and the rest"}
    talker.is_held = True
    ask(chat, "tell me")
    chat.get_by_text("one", exact=True).wait_for()
    chat.reload()
    chat.get_by_text("before the answer was whole").wait_for()
    talker.is_held = False
    chat.get_by_role("button", name="Continue").click()
    chat.get_by_text("one and the rest").wait_for()
    assert chat.get_by_text("before the answer was whole").count() == 0
    assert talker.said()[-1] == [("user", "tell me"), ("assistant", "one ")]
    assert talker.requests[-1].continue_final_message is True
    assert talker.requests[-1].add_generation_prompt is False


def test_an_answer_that_was_cut_says_so(chat: Any, talker: Talker) -> None:
    talker.reason = "length"
    ask(chat, "a long story")
    chat.get_by_text("The answer is cut").wait_for()
    assert chat.get_by_role("button", name="Continue").count() == 1


def test_what_is_edited_or_answered_again_begins_another_branch(chat: Any, talker: Talker) -> None:
    ask(chat, "early")
    chat.get_by_text("heard: early").wait_for()
    chat.get_by_role("button", name="Answer again").click()
    chat.get_by_text("2 of 2").wait_for()
    chat.get_by_role("button", name="Answer again").wait_for()  # the second answer is over
    ask(chat, "later")
    chat.get_by_text("heard: later").wait_for()
    chat.get_by_role("button", name="Edit").first.click()
    chat.get_by_role("textbox", name="Edit").fill("otherwise")
    chat.locator(".turn").get_by_role("button", name="Send").click()
    chat.get_by_text("heard: otherwise").wait_for()
    assert talker.said()[-1] == [("user", "otherwise")]
    assert answers(chat) == ["heard: otherwise"]
    chat.get_by_role("button", name="Earlier version").click()
    chat.get_by_text("heard: later").wait_for()  # what was said there last is there again
    assert answers(chat) == ["heard: early", "heard: later"]


def test_markdown_is_shown_and_nothing_in_it_runs(chat: Any, talker: Talker) -> None:
    talker.answers = {"how": MARKDOWN}
    ask(chat, "how")
    chat.locator(".markdown pre").wait_for()
    shown = chat.locator(".markdown")
    assert shown.locator("ol > li").count() == 2
    assert shown.locator("strong").inner_text() == "two"
    assert shown.locator("a").evaluate_all("all => all.map((one) => one.href)") == ["https://example.org/x"]
    assert shown.locator("img").count() == 0
    assert "<img src=x onerror=alert(1)>" in shown.inner_text()
    assert shown.locator("pre").inner_text() == 'print("<b>2</b>")'
    assert shown.locator("td").all_inner_texts() == ["2", "4"]


def test_a_number_alone_is_no_list(chat: Any, talker: Talker) -> None:
    talker.answers = {"12 + 7": "19."}
    ask(chat, "12 + 7")
    chat.get_by_text("19.", exact=True).wait_for()
    assert answers(chat) == ["19."]


def test_a_conversation_is_downloaded_and_deleted(chat: Any, talker: Talker) -> None:
    ask(chat, "keep this")
    chat.get_by_text("heard: keep this").wait_for()
    with chat.expect_download() as found:
        chat.get_by_role("button", name="Download").click()
    assert found.value.suggested_filename == "keep-this.md"
    text = Path(found.value.path()).read_text()
    assert text == "# keep this\n\n## You\n\nkeep this\n\n## chatty\n\nheard: keep this\n"
    chat.once("dialog", lambda dialog: dialog.dismiss())
    chat.get_by_role("button", name="Delete: keep this").click()
    assert titles(chat) == ["keep this"]
    chat.once("dialog", lambda dialog: dialog.accept())
    chat.get_by_role("button", name="Delete: keep this").click()
    wait_until(lambda: titles(chat) == [], "the conversation is deleted")
    chat.reload()
    chat.locator(".near").first.wait_for()
    assert titles(chat) == []


def test_what_older_pages_kept_is_a_conversation(server: PageServer, chat: Any) -> None:
    turns = [{"role": "user", "content": "of old"}, {"role": "assistant", "content": "an answer", "model": "chatty"}]
    chat.goto(f"{server.url}/pipelines")
    chat.evaluate("turns => localStorage.setItem('atelier.chat', JSON.stringify({turns, draft: 'half'}))", turns)
    chat.goto(f"{server.url}/chat")
    chat.get_by_role("button", name="of old", exact=True).click()
    chat.get_by_text("an answer").wait_for()
    assert chat.get_by_label("Message", exact=True).input_value() == "half"


def test_a_model_that_sees_is_shown_images(
    server: PageServer, talker: Talker, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("deployments.ingress.service.catalog._sees_images", lambda record: record.id == "chatty")
    Image.new("RGB", (6, 4), "red").save(tmp_path / "red.png")
    page = open_page(f"{server.url}/chat")
    page.locator(".near").first.wait_for()
    page.get_by_label("Add images").set_input_files(tmp_path / "red.png")
    ask(page, "what is it")
    page.get_by_text("heard: what is it").wait_for()
    (message,) = talker.requests[-1].messages
    assert [(image.shape, image[0, 0].tolist()) for image in message.images] == [((4, 6, 3), [255, 0, 0])]
    page.reload()
    page.locator(".turn .attached img").wait_for()  # it is kept with what was said
    assert page.get_by_label("Remove red.png").count() == 0


@needs_axe
@pytest.mark.parametrize("width", [360, 1280])
def test_people_with_other_senses_can_chat(server: PageServer, talker: Talker, open_page: OpenPage, width: int):
    page = open_page(f"{server.url}/chat", viewport={"width": width, "height": 800}, bypass_csp=True)
    page.locator(".near").first.wait_for()
    talker.answers = {"how": MARKDOWN}
    ask(page, "how")
    page.locator(".markdown pre").wait_for()
    assert axe_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.get_by_label("Message", exact=True).bounding_box()["y"] < 800  # without scrolling


def test_an_answer_that_is_a_job_is_read_on_after_a_reload(tmp_path: Path, open_page: OpenPage) -> None:
    talker = Talker()
    talker.answers["x"], talker.is_held = "one two three four", True
    with page_server_over(talker, tmp_path) as server:

        def jobs() -> list[str]:
            return [job["status"] for job in httpx.get(f"{server.url}/v1/jobs").json()["data"]]

        page = open_page(f"{server.url}/chat")
        page.locator(".near").first.wait_for()
        ask(page, "x")
        page.get_by_text("one", exact=True).wait_for()
        assert jobs() == ["running"]
        page.reload()
        page.get_by_text("one", exact=True).wait_for()
        page.get_by_role("button", name="Stop").wait_for()
        talker.is_held = False
        page.get_by_text("one two three four", exact=True).wait_for()
        page.get_by_role("button", name="Send").wait_for()
        assert answers(page) == ["one two three four"]
        assert len(talker.requests) == 1
        wait_until(lambda: jobs() == [], "the job is deleted")
        page.reload()
        page.get_by_text("one two three four", exact=True).wait_for()
        talker.is_held = True
        ask(page, "x")
        page.get_by_text("one", exact=True).wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("stopped").wait_for()
        wait_until(lambda: jobs() == [], "what is stopped is no job any more")
        ask(page, "x")
        page.get_by_role("button", name="Stop").wait_for()
        wait_until(lambda: jobs() == ["running"], "another job")
        (id_,) = (job["id"] for job in httpx.get(f"{server.url}/v1/jobs").json()["data"])
        page.goto("about:blank")
        httpx.delete(f"{server.url}/v1/jobs/{id_}")
        page.goto(f"{server.url}/chat")
        page.get_by_text("its connection broke").wait_for()
        talker.is_held = False
