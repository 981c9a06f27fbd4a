"""Text and embeddings of the cluster against transformers and sentence-transformers on the same folders."""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
import torch
from integration.harness import DEMO_MODELS, MINILM, Cluster
from transformers import AutoModelForCausalLM, AutoTokenizer, CLIPTextModel

from deployments.engines.llm.chat import Message
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest


@pytest.fixture(scope="module")
def adder() -> tuple[Any, Any]:
    folder = DEMO_MODELS / "adder"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def stock_answer(adder: tuple[Any, Any], question: str, max_new_tokens: int = 32) -> str:
    model, tokenizer = adder
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def draw_question() -> str:
    return f"What is {random.randint(0, 99)} + {random.randint(0, 99)}?"


def chat(cluster: Cluster, question: str, **options: Any) -> Any:
    return cluster.openai.chat.completions.create(
        model="adder", messages=[{"role": "user", "content": question}], **options
    )


def test_greedy_chat_equals_transformers_alone_and_in_company(cluster: Cluster, adder: tuple[Any, Any]) -> None:
    questions = [draw_question() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda q: chat(cluster, q).choices[0].message.content, questions))
    assert answers == [stock_answer(adder, question) for question in questions]


def test_greedy_completion_equals_transformers(cluster: Cluster, adder: tuple[Any, Any]) -> None:
    model, tokenizer = adder
    prompt = "What is 4"
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    result = cluster.handle.complete.remote(
        CompletionRequest(model="adder", prompt=prompt, max_tokens=12, temperature=0)
    ).result(timeout_s=60)
    assert result.text == expected


def test_a_stream_says_what_the_whole_answer_says(cluster: Cluster) -> None:
    question = draw_question()
    chunks = list(chat(cluster, question, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    whole = chat(cluster, question)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]


def test_a_stream_for_a_client_that_knows_no_chunks_has_none(cluster: Cluster) -> None:
    """As `curl -0 -N` asks."""
    question = draw_question()
    body = {"model": "adder", "messages": [{"role": "user", "content": question}], "stream": True}
    where, text = urlsplit(cluster.url), json.dumps(body).encode()
    with socket.create_connection((where.hostname, where.port), 60) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n")
        connection.sendall(f"content-length: {len(text)}\r\n\r\n".encode() + text)
        head, _, lines = b"".join(iter(lambda: connection.recv(2**16), b"")).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    events = [line.removeprefix("data: ") for line in lines.decode().split("\n") if line]
    assert events.pop() == "[DONE]"
    pieces = [choice["delta"].get("content") or "" for event in events for choice in json.loads(event)["choices"]]
    assert "".join(pieces) == chat(cluster, question).choices[0].message.content


def test_handles_stream_too(cluster: Cluster) -> None:
    request = ChatRequest(model="adder", messages=(Message(role="user", content="What is 12 + 7?"),), temperature=0)
    chunks = list(cluster.handle.options(stream=True).chat_stream.remote(request))
    assert "".join(chunk.text for chunk in chunks) == "19."
    assert chunks[-1].finish_reason == "stop"


def test_sampling_options(cluster: Cluster) -> None:
    assert chat(cluster, "What is 12 + 7?", stop=["9"]).choices[0].message.content == "1"
    cut = chat(cluster, "What is 50 + 7?", max_tokens=1)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens == 1
    hot = {"temperature": 2.0, "seed": 11, "max_tokens": 12}
    assert (
        chat(cluster, "What is 12 + 7?", **hot).choices[0].message.content
        == chat(cluster, "What is 12 + 7?", **hot).choices[0].message.content
    )


def test_minilm_equals_sentence_transformers(cluster: Cluster) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["A cat sits on the mat.", "short", f"random {random.random()} " * random.randint(1, 40), "ünïcödé 日本語"]
    expected = SentenceTransformer(str(MINILM), device="cpu").encode(texts)
    for encoding_format in ("float", "base64"):
        answer = cluster.openai.embeddings.create(model="minilm", input=texts, encoding_format=encoding_format)
        vectors = [item.embedding for item in answer.data]
        if encoding_format == "base64":
            vectors = [
                np.frombuffer(__import__("base64").b64decode(v), "<f4") if isinstance(v, str) else v for v in vectors
            ]
        np.testing.assert_allclose(np.array(vectors), expected, atol=1e-5)


def test_clip_of_a_pipeline_is_an_embedding_model(cluster: Cluster) -> None:
    folder = DEMO_MODELS / "digits-flux"
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    texts = ("a handwritten seven", "3")
    ids = tokenizer(list(texts), padding="max_length", max_length=16, truncation=True, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = model(ids).pooler_output.numpy()
    result = cluster.handle.embed.remote(EmbeddingRequest(model="digits-clip", input=texts)).result(timeout_s=60)
    np.testing.assert_allclose(np.array(result.embeddings), expected, atol=1e-5)


def test_equal_texts_are_encoded_once(cluster: Cluster) -> None:
    text = f"never seen before {random.random()}"
    first = cluster.handle.embed.remote({"model": "minilm", "input": (text, text, text)}).result(timeout_s=60)
    again = cluster.handle.embed.remote({"model": "minilm", "input": (text,)}).result(timeout_s=60)
    assert (first.cache.misses, first.cache.hits) == (1, 2)
    assert (again.cache.misses, again.cache.hits) == (0, 1)
    np.testing.assert_array_equal(first.embeddings[0], again.embeddings[0])


def test_typed_openai_errors(cluster: Cluster) -> None:
    with pytest.raises(openai.NotFoundError, match=r"no model 'gpt-9' \(known: digits-flux"):
        cluster.openai.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="does not make text"):
        cluster.openai.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(cluster, "hi", temperature=9)
    long = "1 + " * 2000
    with pytest.raises(openai.BadRequestError, match="tokens"):
        chat(cluster, long)
