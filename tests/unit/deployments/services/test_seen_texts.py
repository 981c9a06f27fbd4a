"""Chats with images the whole way: from a model's folder through store, module cache and engine to the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.seeding import seeded_rng
from unit.deployments.engine_loops import written_chunks
from unit.deployments.services.test_adapted_texts import Extents

from configs.cluster import WorkerConfig
from deployments.engines.llm.chat import Message
from deployments.modules.budget import ModuleBudget
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder
from deployments.records import ChatRequest
from deployments.records.errors import InvalidRequest
from deployments.replicas.step_loop import DeviceThread
from deployments.services.text_service import TextService, whole_text
from infra.supported.language_models import TIE
from infra.supported.vision_models import (
    BANNED,
    drawn_chat,
    save_tiny,
    stock_answer,
    stock_inputs,
    tiny_model,
    tiny_processor,
)
from weights.operations.intake import import_model
from weights.records.manifest import Manifest
from weights.storage.store import WeightStore

SEER = "Qwen3VLForConditionalGeneration"


@pytest.fixture
def stock() -> Any:
    return tiny_model(SEER)


@pytest.fixture
def service(stock: Any, tmp_path: Path) -> TextService:
    store = WeightStore(tmp_path / "store")
    save_tiny(SEER, stock, tmp_path / "seer")
    import_model(store, "seer", tmp_path / "seer", dtype="float32")

    async def fetch(model: str, version: str | None) -> Manifest:
        return store.manifest(model)

    builder = ComponentBuilder(WorkerConfig(kv_cache_bytes=2**22))
    cache = ModuleCache(fetch, Extents(store.packs), store.models, ModuleBudget(2**30), builder)
    return TextService(cache, DeviceThread())


def asking(*content: Any) -> ChatRequest:
    return ChatRequest(
        model="seer",
        messages=(Message(role="user", content=content),),
        max_tokens=8,
        temperature=0.0,
        logit_bias=dict(BANNED),
        ignore_eos=True,
    )


async def test_an_answer_is_that_of_generate(stock: Any, service: TextService) -> None:
    chat, images = drawn_chat(seeded_rng(), 2)
    chat[0]["role"], pixels = "user", iter(images)
    parts = [part["text"] if part["type"] == "text" else next(pixels) for part in chat[0]["content"]]
    result = whole_text("seer", await written_chunks(service, asking(*parts)))
    tokens = [int(word[1:]) for word in result.text.split()]
    processor = tiny_processor(SEER)
    expected, logprobs = stock_answer(stock, stock_inputs(processor, chat, images), 8)
    shown = [at for at, token in enumerate(expected) if token not in processor.tokenizer.all_special_ids]
    expected, logprobs = [expected[at] for at in shown], logprobs[shown]
    place = next((at for at, pair in enumerate(zip(tokens, expected, strict=True)) if len(set(pair)) > 1), None)
    assert place is None or abs(logprobs[place, tokens[place]] - logprobs[place, expected[place]]) < TIE


async def test_an_image_that_the_model_does_not_take(service: TextService) -> None:
    with pytest.raises(InvalidRequest, match="model 'seer': the model takes no image of 1x900 pixels"):
        await written_chunks(service, asking(np.zeros((900, 1, 3), np.uint8)))
    with pytest.raises(ValueError, match=r"an image as uint8 \(height, width, 3\); got uint8 \(9, 9\)"):
        asking(np.zeros((9, 9), np.uint8))
