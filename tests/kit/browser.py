"""A headless Chromium for tests of the pages, where it and playwright are installed: `apt install chromium`.

A pytest plugin. HAZARD: playwright's loop counts as running in its thread while the browser is open, so a module that
asks for `browser` has no asynchronous tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser of Debian's package. Skips, and says why, where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra dev)")
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser on the path: {', '.join(_NAMES)}")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Return what opens a page in a browser context of the test, one for all its pages.

    What the browser refuses by the page's policy, or cannot run, fails the test.
    """
    contexts, problems = [], []

    def opened(url: str, context: Any = None, **options: Any) -> Any:
        context = context or browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"{url}: {error}"))
        page.on("console", lambda said: _is_refusal(said.text) and problems.append(f"{url}: {said.text}"))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


def _is_refusal(text: str) -> bool:
    return "Content Security Policy" in text or "TrustedHTML" in text
