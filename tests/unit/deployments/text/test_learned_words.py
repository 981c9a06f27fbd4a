"""Textual inversions against diffusers' load_textual_inversion: of prompts alone, and through files and the store."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.seeding import seeded_rng
from safetensors.torch import save_file
from unit.deployments.text.test_encode import service

from deployments.engines.records.protocol import EngineError
from deployments.modules.encoders import is_part_of_text
from weights.formats.checkpoint import read_checkpoint
from weights.formats.learned_words import WORDS_CLASS, words_in
from weights.operations.adapters import LoraAdapter, load_adapter
from weights.records.errors import AdapterError

Words = Mapping[str, LoraAdapter]


def vectors(encoder: Any, number: int) -> torch.Tensor:
    width = encoder.get_input_embeddings().embedding_dim
    return torch.from_numpy(seeded_rng().normal(size=(number, width)).astype("float32"))


def saved(demo: Any, file: Path, number: int = 2) -> Path:
    """An embedding for both text encoders, as the WebUI's trainers save it."""
    clip_l, clip_g = (vectors(one, number) for one in (demo.stock.text_encoder, demo.stock.text_encoder_2))
    save_file({"clip_l": clip_l, "clip_g": clip_g}, file)
    return file


def by_stock(demo: Any, words: Words, prompt: str, negative: str) -> dict[str, torch.Tensor]:
    """Return the conditioning of the prompts by diffusers' pipeline, with words in copies of its encoders."""
    stock = copy.deepcopy(demo.stock)
    for word, adapter in words.items():
        for name, rows in adapter.words.items():
            end = name.removeprefix("text_encoder")
            stock.load_textual_inversion(
                {word: rows},
                token=word,
                text_encoder=getattr(stock, name),
                tokenizer=getattr(stock, f"tokenizer{end}"),
            )
    with torch.no_grad():
        found = stock.encode_prompt(prompt, device="cpu", negative_prompt=negative)
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    return dict(zip(names, found, strict=True))


async def condition(demo: Any, encoders: Any, words: Words, prompt: str, negative: str, **options: Any) -> Any:
    keys = {name: f"key of {name}" for name in words}
    adapters = dict.fromkeys(words, 1.0)
    return await demo.condition(encoders, prompt, negative, adapters=adapters, loras=(words, keys), **options)


@pytest.mark.drawn
@pytest.mark.parametrize("number", [1, 3])
async def test_words_are_read_as_diffusers_reads_them(sdxl: Any, tmp_path: Path, number: int) -> None:
    words = {"mystyle": load_adapter(saved(sdxl, tmp_path / "mystyle.safetensors", number))}
    words["bad-hands"] = load_adapter(saved(sdxl, tmp_path / "bad-hands.safetensors", 2))
    table = sdxl.encoders["text_encoder"].encoder.module.get_input_embeddings().weight.clone()
    encoders, _ = service()
    for prompt, negative in (
        ("seven mystyle eight", "blurry"),
        ("mystyle", "a bad-hands seven"),
        ("seven mystyle, mystyle bad-hands", "mystyle"),
    ):
        expected = by_stock(sdxl, words, prompt, negative)
        found, _ = await condition(sdxl, encoders, words, prompt, negative)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
    assert torch.equal(sdxl.encoders["text_encoder"].encoder.module.get_input_embeddings().weight, table)


async def test_words_are_found_whatever_their_case(sdxl: Any, tmp_path: Path) -> None:
    """As by diffusers, whose tokenizer is CLIP's; of several vectors it would read the first alone."""
    words = {name: load_adapter(saved(sdxl, tmp_path / f"{name}.safetensors", 1)) for name in ("mystyle", "Bad-Hands")}
    encoders, _ = service()
    for prompt in ("seven MyStyle eight", "mystyle BAD-HANDS", "a bad-hands seven"):
        expected = by_stock(sdxl, words, prompt, "blurry")
        found, _ = await condition(sdxl, encoders, words, prompt, "blurry")
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


async def test_texts_without_words_share_their_encodings(sdxl: Any, tmp_path: Path) -> None:
    words = {"mystyle": load_adapter(saved(sdxl, tmp_path / "mystyle.safetensors"))}
    encoders, _ = service()
    plain, _ = await sdxl.condition(encoders, "seven", "blurry")
    same, encoded = await condition(sdxl, encoders, words, "seven", "blurry")
    assert encoded.cache.misses == 0
    assert all(torch.equal(same[name], plain[name]) for name in plain)
    first, encoded = await condition(sdxl, encoders, words, "seven mystyle", "blurry")
    assert encoded.cache.misses == 2
    again, encoded = await condition(sdxl, encoders, words, "seven mystyle", "blurry")
    assert encoded.cache.misses == 0
    other = {"mystyle": load_adapter(saved(sdxl, tmp_path / "other.safetensors", 3))}
    encoders_, _ = service()
    changed, _ = await condition(sdxl, encoders_, other, "seven mystyle", "blurry")
    assert torch.equal(first["prompt_embeds"], again["prompt_embeds"])
    assert not torch.allclose(first["prompt_embeds"], changed["prompt_embeds"])


async def test_words_have_weights_and_long_prompts_chunks(sdxl: Any, tmp_path: Path) -> None:
    words = {"mystyle": load_adapter(saved(sdxl, tmp_path / "mystyle.safetensors"))}
    encoders, _ = service()
    plain, _ = await condition(sdxl, encoders, words, "seven mystyle", "x")
    same, _ = await condition(sdxl, encoders, words, "seven mystyle", "x", prompt_syntax="weighted")
    strong, _ = await condition(sdxl, encoders, words, "seven (mystyle:1.4)", "x", prompt_syntax="weighted")
    assert torch.equal(same["prompt_embeds"], plain["prompt_embeds"])
    assert not torch.allclose(strong["prompt_embeds"], plain["prompt_embeds"])
    _, encoded = await condition(sdxl, encoders, words, "mystyle " * 60, "x")
    assert any("were ignored" in told for told in encoded.warnings)


async def test_words_of_another_model_are_refused(sdxl: Any, tmp_path: Path) -> None:
    save_file({"emb_params": torch.zeros(2, 7)}, tmp_path / "w.safetensors")
    words = {"w": load_adapter(tmp_path / "w.safetensors")}
    encoders, _ = service()
    with pytest.raises(EngineError, match=r"'w' has vectors of 7 numbers, and this text encoder reads \d+: it is for"):
        await condition(sdxl, encoders, words, "seven w", "x")


@pytest.mark.parametrize(
    ("name", "tensors", "encoders"),
    [
        ("a.safetensors", {"emb_params": (2, 8)}, {"text_encoder": (2, 8)}),
        ("a.safetensors", {"clip_l": (2, 8), "clip_g": (2, 16)}, {"text_encoder": (2, 8), "text_encoder_2": (2, 16)}),
        ("a.safetensors", {"<cat>": (8,)}, {"text_encoder": (1, 8)}),
        ("learned_embeds.safetensors", {"cat": (3, 8)}, {"text_encoder": (3, 8)}),
    ],
)
def test_files_are_recognised(name: str, tensors: Any, encoders: Any, tmp_path: Path) -> None:
    save_file({key: torch.zeros(shape) for key, shape in tensors.items()}, tmp_path / name)
    path = tmp_path if name.startswith("learned") else tmp_path / name
    checkpoint = read_checkpoint(path)
    assert (checkpoint.kind, checkpoint.class_name) == ("adapter", WORDS_CLASS)
    (part,) = checkpoint.components
    stored = SimpleNamespace(**{name: getattr(part, name) for name in ("name", "library", "class_name", "tensors")})
    stored.parts_hash = None
    assert is_part_of_text(stored)  # type: ignore[arg-type]
    assert {key: tuple(rows.shape) for key, rows in load_adapter(tmp_path / name).words.items()} == encoders


@pytest.mark.parametrize("shape", [(0, 8), (2, 2, 8), (76, 8)])
def test_what_are_no_vectors_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    save_file({"emb_params": torch.zeros(shape)}, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError, match="expected 1 to 75 vectors of a word"):
        read_checkpoint(tmp_path / "a.safetensors")


def test_words_are_found_as_words() -> None:
    words = ["cat", "my-cat", "v1.5"]
    assert words_in("a cat", words) == ["cat"]
    assert words_in("a my-cat, (cat:1.2)", words) == ["cat", "my-cat"]
    assert words_in("cats concat my-cats cat.s", words) == []
    assert words_in("v1.5. cat.", words) == ["cat", "v1.5"]
    assert words_in("a CAT, My-Cat", words) == ["cat", "my-cat"]
    assert words_in("a Cat", ["cat", "Cat", "CAT"]) == ["Cat"]
    assert len(words_in("a cAt", ["Cat", "CAT"])) == 1
