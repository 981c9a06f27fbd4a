"""A chat with images, by the clients of OpenAI, Anthropic and Ollama, against the class's own `generate`."""

from __future__ import annotations

import base64
import io
from typing import Any

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest
import torch
import transformers
from integration.harness import SEER, Cluster
from kit.seeding import seeded_rng
from PIL import Image

from infra.supported.language_models import TIE
from infra.supported.vision_models import (
    BANNED,
    Chat,
    stock_answer,
    stock_inputs,
    tiny_processor,
)

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def seer(cluster: Cluster) -> Any:
    return transformers.Qwen3VLForConditionalGeneration.from_pretrained(cluster.broken / "seer", dtype=torch.float32)


def png_of(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def test_openais_client_gets_stock_tokens(cluster: Cluster, seer: Any) -> None:
    images = [seeded_rng().integers(0, 256, (24, 40, 3), dtype=np.uint8) for _ in range(2)]
    client = openai.OpenAI(api_key="none", base_url=f"{cluster.url}/v1")
    parts: Any = [{"type": "text", "text": "w7 w9"}]
    chat: Chat = [{"role": "user", "content": [{"type": "text", "text": "w7 w9"}]}]
    for pixels in images:
        url = f"data:image/png;base64,{png_of(pixels)}"
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "w11"}]
        chat[0]["content"] += [{"type": "image"}, {"type": "text", "text": "w11"}]
    expected, logprobs = stock_answer(seer, stock_inputs(tiny_processor(SEER), chat, images), NUM_TOKENS)
    asked: Any = {"model": "seer", "messages": [{"role": "user", "content": parts}], "temperature": 0}
    asked |= {"max_tokens": NUM_TOKENS, "logit_bias": {str(token): bias for token, bias in BANNED}}
    pieces = client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    tokens = [int(word[1:]) for word in text.split()]
    place = next((at for at, pair in enumerate(zip(tokens, expected, strict=True)) if len(set(pair)) > 1), None)
    assert place is None or abs(logprobs[place, tokens[place]] - logprobs[place, expected[place]]) < TIE
    assert client.models.retrieve("seer").to_dict()["sees"]


def test_other_clients_get_the_same_text(cluster: Cluster) -> None:
    data = png_of(seeded_rng().integers(0, 256, (24, 24, 3), dtype=np.uint8))
    chosen = {"temperature": 0.0, "top_k": 1}
    claude = anthropic.Anthropic(api_key="none", base_url=cluster.url).messages.create(
        model="seer",
        max_tokens=6,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
                    {"type": "text", "text": "w8"},
                ],
            }
        ],
        extra_body=chosen,
    )
    llama = ollama.Client(host=cluster.url).chat(
        "seer",
        messages=[{"role": "user", "content": "w8", "images": [data]}],
        options={**chosen, "num_predict": 6},
    )
    block: Any = claude.content[0]
    assert block.text == llama.message.content != ""


def test_an_image_for_a_model_without_eyes(cluster: Cluster) -> None:
    data = png_of(np.zeros((8, 8, 3), np.uint8))
    content = [{"type": "image_url", "image_url": {"url": data}}]
    body = {"model": "adder", "messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=30)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "model 'adder' sees no images; models that do: seer",
    )
