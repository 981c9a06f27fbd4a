"""Requests that the pages give as commands and programs: run, they ask the server for the same again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kit.browser import OpenPage
from PIL import Image
from unit.deployments.ingress.page_server import PageServer

PROMPT = 'a "5", it\'s $HOME\\n: `1` true null é'
CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}


def copied(page: Any, name: str) -> str:
    page.evaluate("navigator.clipboard.writeText('')")
    page.get_by_role("button", name=name).click()
    page.wait_for_function("navigator.clipboard.readText().then((text) => text !== '')")
    return page.evaluate("navigator.clipboard.readText()")


def run(code: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a command in a shell, or a program here; return what the command wrote."""
    if name == "Copy as curl":
        return subprocess.run(
            ["bash", "-c", code], cwd=folder, capture_output=True, text=True, check=True, timeout=60
        ).stdout
    with monkeypatch.context() as here:
        here.chdir(folder)
        exec(compile(code, name, "exec"), {})
    return ""


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["Copy as curl", "Copy as Python"])
def test_an_image(
    name: str, page_server: PageServer, open_page: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_page(page_server.url, **CLIPBOARD)
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_label("bold").first.fill("0.8")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text("Image done in").wait_for()
    page.locator(".thumbs img").first.click()
    made = page_server.replicas.requests[-1]
    run(copied(page, name), name, tmp_path, monkeypatch)
    assert Image.open(tmp_path / "image.png").size == (16, 8)
    again = page_server.replicas.requests[-1]
    assert again is not made
    assert (again.prompt, again.seed, again.lora) == (PROMPT, made.seed, made.lora)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["Copy as curl", "Copy as Python"])
def test_an_answer(
    name: str,
    page_server: PageServer,
    open_page: OpenPage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = open_page(f"{page_server.url}/chat", **CLIPBOARD)
    page.locator(".near").first.wait_for()
    page.get_by_label("System prompt").fill("short")
    page.get_by_label("Message", exact=True).fill(PROMPT)
    page.keyboard.press("Enter")
    page.get_by_text("Hello").wait_for()
    made = page_server.replicas.requests[-1]
    told = run(copied(page, name), name, tmp_path, monkeypatch)
    again = page_server.replicas.requests[-1]
    assert again is not made
    assert again.messages == made.messages
    assert (
        json.loads(told)["choices"][0]["message"]["content"] if told else capsys.readouterr().out.strip()
    ) == "Hello"
