"""A headless Chromium for tests of the pages, where it and playwright are installed: `apt install chromium`.

A pytest plugin. HAZARD: playwright's loop counts as running in its thread while the browser is open, so a module that
asks for `browser` has no asynchronous tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit.judges import judge_folder

needs_axe = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm, which installs axe-core")
_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Without a process that draws as a graphics card would: a quarter of a browser's time on the processor.
_ARGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser of Debian's package. Skips, and says why, where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra dev)")
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser on the path: {', '.join(_NAMES)}")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=_ARGS)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Return a function that opens a page in a browser context of the test, one for all its pages.

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


def axe_violations(page: Any) -> list[tuple[str, list[Any]]]:
    """Return the violations that axe-core finds in an open page: each rule with the places where it is broken.

    The page's own policy lets no script of anybody else in: open it with `bypass_csp=True`.
    """
    page.evaluate((judge_folder("axe") / "node_modules/axe-core/axe.min.js").read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [(one["id"], [node["target"] for node in one["nodes"]]) for one in found["violations"]]


def _is_refusal(text: str) -> bool:
    return "Content Security Policy" in text or "TrustedHTML" in text
