"""The cluster as clients of other servers see it: Anthropic's, Ollama's, vLLM's and the Stable Diffusion WebUI's."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import numpy as np
import ollama
import pytest
import webuiapi
from integration.harness import DEMO_MODELS, Cluster, pixels
from transformers import AutoTokenizer

QUESTION = "What is 12 + 7?"
ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def claude(cluster: Cluster) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="none", base_url=cluster.url, max_retries=0)


@pytest.fixture(scope="module")
def llama(cluster: Cluster) -> ollama.Client:
    return ollama.Client(cluster.url)


def test_anthropics_client_gets_sums_whole_and_in_pieces(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "adder", "max_tokens": 20, "messages": [{"role": "user", "content": QUESTION}]}
    answer = claude.messages.create(**asked)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "19."}]
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "19."
        usage = stream.get_final_message().usage
    counted = claude.messages.count_tokens(model="adder", messages=asked["messages"]).input_tokens
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    with pytest.raises(anthropic.NotFoundError, match="known: digits-flux"):
        claude.messages.create(**asked | {"model": "nobody"})


def test_anthropics_client_gets_tool_calls_and_sends_their_results(claude: anthropic.Anthropic) -> None:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"name": "add", "input_schema": ADD}]
    asked: Any = {
        "model": "adder-tools",
        "max_tokens": 100,
        "tools": tools,
        "tool_choice": {"type": "tool", "name": "add"},
    }
    answer = claude.messages.create(**asked, messages=turns)
    (call,) = answer.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (call.name, answer.stop_reason, set(call.input)) == ("add", "tool_use", {"a", "b"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "19"}
    turns += [{"role": "assistant", "content": [call.to_dict()]}, {"role": "user", "content": [result]}]
    after = claude.messages.create(model="adder-tools", max_tokens=5, messages=turns, tools=tools)
    assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) > answer.usage.input_tokens


def test_ollamas_client_gets_sums_schemas_and_vectors(llama: ollama.Client, cluster: Cluster) -> None:
    turns = [{"role": "user", "content": QUESTION}]
    assert llama.chat("adder:latest", turns, options={"temperature": 0}).message.content == "19."
    pieces = [piece.response for piece in llama.generate("adder", QUESTION, stream=True, keep_alive="1m")]
    assert "".join(pieces) == "19."
    schema = {"type": "object", "properties": {"total": ADD["properties"]["a"]}, "required": ["total"]}  # type: ignore[index]
    options = {"temperature": 0, "num_predict": 200}
    text = llama.chat("adder", turns, format=schema | {"additionalProperties": False}, options=options).message.content
    assert 0 <= json.loads(text or "")["total"] <= 99
    vectors = llama.embed("minilm", ["a river", "a house"]).embeddings
    theirs = cluster.openai.embeddings.create(model="minilm", input=["a river", "a house"], encoding_format="float")
    np.testing.assert_allclose(vectors, [item.embedding for item in theirs.data], atol=1e-5)
    listed = {model.model for model in llama.list().models}
    assert {"adder", "minilm", "text-classifier"} <= listed
    assert not {"digits-flux", "bold", "sum-to-digit"} & listed
    assert "adder" in {model.model for model in llama.ps().models}


def test_the_webuis_client_gets_the_images_of_the_openai_route(cluster: Cluster) -> None:
    client = webuiapi.WebUIApi(baseurl=f"{cluster.url}/sdapi/v1", sampler="Automatic", scheduler="Automatic")
    assert "digits-flux" in client.util_get_model_names()
    override = {"sd_model_checkpoint": "digits-flux"}
    found = client.txt2img(
        prompt="a handwritten three", seed=7, steps=8, cfg_scale=0, width=32, height=32, override_settings=override
    )
    body = {"model": "digits-flux", "prompt": "a handwritten three", "seed": 7, "num_inference_steps": 8}
    sizes = {"width": 32, "height": 32, "guidance_scale": 0, "deterministic": False}
    answer = httpx.post(f"{cluster.url}/v1/images/generations", json=body | sizes, timeout=60)
    assert answer.status_code == 200, answer.text
    near = np.abs(np.asarray(found.image, int) - pixels(answer).astype(int))
    assert near.mean() < 2  # requests that shared no step
    assert client.get_progress()["progress"] == 0


def test_tokens_and_paths_without_the_prefix(cluster: Cluster) -> None:
    stock = AutoTokenizer.from_pretrained(DEMO_MODELS / "adder")
    body = {"model": "adder", "prompt": QUESTION}
    found = httpx.post(f"{cluster.url}/tokenize", json=body, timeout=60).json()
    assert found["tokens"] == stock(QUESTION)["input_ids"]
    text = httpx.post(f"{cluster.url}/detokenize", json={"model": "adder", "tokens": found["tokens"]}, timeout=60)
    assert text.json() == {"prompt": stock.decode(found["tokens"])}
    chat = {"model": "adder", "messages": [{"role": "user", "content": QUESTION}]}
    answer = httpx.post(f"{cluster.url}/chat/completions", json=chat, timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == "19."
    for path in ("/health", "/models", "/v1/models"):
        head = httpx.head(f"{cluster.url}{path}")
        assert (head.status_code, head.content) == (200, b"")
