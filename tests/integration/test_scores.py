"""Ranks, classes and prompted embeddings of the cluster against stock on the same folders, by every way to ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cohere
import httpx
import numpy as np
import openai
import pytest
from integration.harness import Cluster
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import pipeline
from unit.deployments.engines.text.test_classifiers import pairs_of

from deployments.records import ScoringRequest


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    [(query, _), *rest] = pairs_of(17, 8)
    return [(query, text) for _, text in rest]


@pytest.fixture(scope="module")
def ranks(cluster: Cluster, pairs: list[tuple[str, str]]) -> np.ndarray:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        stock: np.ndarray = CrossEncoder(str(cluster.broken / "ranker"), device="cpu").predict(pairs)
    return stock


@pytest.fixture(scope="module")
def kinds(cluster: Cluster, pairs: list[tuple[str, str]]) -> np.ndarray:
    stock = pipeline("text-classification", str(cluster.broken / "sorter"), device="cpu", top_k=None)
    found = [{one["label"]: one["score"] for one in stock([text])[0]} for _, text in pairs]
    return np.array([[scores[f"LABEL_{at}"] for at in range(3)] for scores in found])


def ask_tensors(cluster: Cluster, model: str, **texts: Sequence[str]) -> dict[str, np.ndarray]:
    inputs = [{"name": n, "datatype": "BYTES", "shape": [len(data)], "data": data} for n, data in texts.items()]
    answer = httpx.post(f"{cluster.url}/v2/models/{model}/infer", json={"inputs": inputs}, timeout=60)
    assert answer.status_code == 200, answer.text
    return {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in answer.json()["outputs"]}


@pytest.mark.parametrize("client_class", [cohere.Client, cohere.ClientV2])
def test_coheres_client_gets_the_scores_of_crossencoder(
    cluster: Cluster, pairs: list[tuple[str, str]], ranks: np.ndarray, client_class: Any
) -> None:
    client = client_class("none", base_url=cluster.url)
    answer = client.rerank(model="ranker", query=pairs[0][0], documents=[text for _, text in pairs])
    assert [found.index for found in answer.results] == np.argsort(-ranks, kind="stable").tolist()
    scores = np.array([found.relevance_score for found in answer.results])
    np.testing.assert_allclose(scores, np.sort(ranks)[::-1], atol=1e-5)


def test_tensors_and_handles_get_the_same_scores(
    cluster: Cluster, pairs: list[tuple[str, str]], ranks: np.ndarray, kinds: np.ndarray
) -> None:
    query, texts = pairs[0][0], [text for _, text in pairs]
    np.testing.assert_allclose(ask_tensors(cluster, "ranker", text=texts, query=[query])["score"], ranks, atol=1e-5)
    np.testing.assert_allclose(ask_tensors(cluster, "sorter", text=texts)["scores"], kinds, atol=1e-5)
    request = ScoringRequest(model="ranker", input=tuple(pairs))
    result = cluster.handle.score.remote(request).result(timeout_s=60)
    np.testing.assert_allclose(np.concatenate(result.embeddings), ranks, atol=1e-5)


def test_classes_are_those_of_transformers(cluster: Cluster, pairs: list[tuple[str, str]], kinds: np.ndarray) -> None:
    texts = [text for _, text in pairs]
    answer = httpx.post(f"{cluster.url}/v1/classify", json={"model": "sorter", "input": texts}, timeout=60).json()
    assert answer["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    np.testing.assert_allclose([one["probs"] for one in answer["data"]], kinds, atol=1e-5)
    assert [one["label"] for one in answer["data"]] == [f"LABEL_{at}" for at in kinds.argmax(1)]


def test_a_pipeline_ranks_and_sorts(
    cluster: Cluster, pairs: list[tuple[str, str]], ranks: np.ndarray, kinds: np.ndarray
) -> None:
    found = ask_tensors(cluster, "rank-and-sort", query=[pairs[0][0]], text=[text for _, text in pairs])
    np.testing.assert_allclose(found["score"], ranks, atol=1e-5)
    np.testing.assert_allclose(found["kinds"], kinds, atol=1e-5)


def test_embeddings_follow_the_stages_and_prompts_of_their_model(
    cluster: Cluster, pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stock = SentenceTransformer(str(cluster.broken / "sentences"), device="cpu")
    texts = [text for _, text in pairs]
    for asked, expected in [
        ({}, stock.encode(texts)),
        ({"prompt_name": "query"}, stock.encode(texts, prompt_name="query")),
        ({"input_type": "search_query"}, stock.encode_query(texts)),
        ({"input_type": "passage"}, stock.encode_document(texts)),
    ]:
        answer = cluster.openai.embeddings.create(model="sentences", input=texts, extra_body=asked)
        np.testing.assert_allclose([one.embedding for one in answer.data], expected, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match=r"no prompt 'quary' \(known: document, query\)"):
        cluster.openai.embeddings.create(model="sentences", input=texts, extra_body={"prompt_name": "quary"})
