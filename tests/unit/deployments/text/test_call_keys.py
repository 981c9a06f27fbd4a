"""The identity of a call of stock encoders: what may change its result, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.text import stock_texts
from deployments.text.stock_texts import _key


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(stock_texts, "is_stock_text", lambda part: part.is_text)
    monkeypatch.setattr(stock_texts, "TextCall", lambda arguments: SimpleNamespace(key=(tuple(arguments.items()),)))

    def of(text: str = "t", other: str = "o", class_name: str = "C", prompt: str = "p", **index: Any) -> Any:
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": class_name, "unet": ["a", "b"]} | index))
        parts = {
            "text_encoder": SimpleNamespace(module_key=text, structure_key="s", is_text=True),
            "unet": SimpleNamespace(module_key=f"{other} weights", structure_key=other, is_text=False),
        }
        manifest: Any = SimpleNamespace(components=parts, class_name=class_name)
        cache: Any = SimpleNamespace(skeleton=lambda _: tmp_path)
        return _key(manifest, cache, {"prompt": prompt})

    return of


def test_a_call_has_the_key_of_all_that_may_change_its_result(key: Any) -> None:
    assert key() == key()
    assert key(_private=1) == key()  # of diffusers' own books
    assert key(vae=["c", "d"]) == key()  # a part, which counts by its structure
    changed = [key(text="u"), key(other="p"), key(class_name="D"), key(prompt="q"), key(is_distilled=True)]
    assert len({key(), *changed}) == 6
