"""Ranks and classes over HTTP: asked by Cohere's client, and by bodies as Jina's and vLLM's clients write them."""

from __future__ import annotations

import base64
from typing import Any

import cohere
import httpx
import numpy as np
import pytest
from unit.deployments.ingress.http_fakes import Replicas, problem

QUERY = "alpha beta gamma"
DOCUMENTS = ["beta", "nothing", "gamma beta alpha", "beta alpha"]
SCORES = [1 / 3, 0.0, 1.0, 2 / 3]
ORDER = [2, 3, 0, 1]
RANK: dict[str, Any] = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS}


@pytest.fixture
def asks_cohere(http: httpx.AsyncClient) -> dict[str, Any]:
    return {"api_key": "none", "base_url": "http://test", "httpx_client": http, "max_retries": 0}


async def test_coheres_client_ranks(asks_cohere: dict[str, Any], replicas: Replicas) -> None:
    answer = await cohere.AsyncClientV2(**asks_cohere).rerank(**RANK, top_n=3, max_tokens_per_doc=64)
    assert [found.index for found in answer.results] == ORDER[:3]
    assert [found.relevance_score for found in answer.results] == pytest.approx([SCORES[at] for at in ORDER[:3]])
    assert answer.meta is not None
    assert answer.meta.tokens is not None
    assert answer.meta.tokens.input_tokens == 7
    [asked] = replicas.requests
    assert asked.input == tuple((QUERY, text) for text in DOCUMENTS)
    assert (asked.max_second_tokens, asked.raw, asked.model_version) == (64, False, "version of ranker")


async def test_coheres_older_client_gets_documents(asks_cohere: dict[str, Any]) -> None:
    given = [DOCUMENTS[0], {"text": DOCUMENTS[1], "title": "x"}, *DOCUMENTS[2:]]
    client = cohere.AsyncClient(**asks_cohere)
    answer = await client.rerank(**RANK | {"documents": given}, return_documents=True)
    assert [found.index for found in answer.results] == ORDER
    assert [found.document.text for found in answer.results if found.document] == [DOCUMENTS[at] for at in ORDER]


async def test_coheres_client_raises_its_own_errors(asks_cohere: dict[str, Any]) -> None:
    client = cohere.AsyncClientV2(**asks_cohere)
    with pytest.raises(cohere.BadRequestError, match="does not make ranks; models that do: ranker"):
        await client.rerank(**RANK | {"model": "sorter"})
    with pytest.raises(cohere.NotFoundError, match="no model 'nobody'"):
        await client.rerank(**RANK | {"model": "nobody"})


async def test_a_body_as_jinas_clients_write_it(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/rerank", json=RANK | {"top_n": 2, "truncation": True})
    body = answer.json()
    assert body["results"][0] == {"index": 2, "relevance_score": 1.0, "document": {"text": DOCUMENTS[2]}}
    assert len(body["results"]) == 2
    assert (body["model"], body["usage"]) == ("ranker", {"prompt_tokens": 7, "total_tokens": 7})
    assert answer.headers["x-atelier-warning"] == "unknown fields were ignored: 'truncation'"
    brief = (await http.post("/v1/rerank", json=RANK | {"return_documents": False, "top_n": 9})).json()
    assert [set(found) for found in brief["results"]] == [{"index", "relevance_score"}] * 4


async def test_ranks_before_their_activation(http: httpx.AsyncClient, replicas: Replicas) -> None:
    for use_activation in (False, True):
        await http.post("/v2/rerank", json=RANK | {"use_activation": use_activation})
        assert replicas.requests[-1].raw is not use_activation


async def test_equal_scores_keep_their_order(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v2/rerank", json=RANK | {"documents": ["beta", "x", "beta", "x"]})
    assert [found["index"] for found in answer.json()["results"]] == [0, 2, 1, 3]


async def test_a_body_as_vllms_clients_write_it(http: httpx.AsyncClient, replicas: Replicas) -> None:
    body = (await http.post("/v1/classify", json={"model": "sorter", "input": ["beta", "alpha", "x"]})).json()
    assert body["labels"] == ["alpha", "beta"]
    assert body["data"] == [
        {"index": 0, "label": "beta", "probs": [0.0, 1.0], "num_classes": 2},
        {"index": 1, "label": "alpha", "probs": [1.0, 0.0], "num_classes": 2},
        {"index": 2, "label": "alpha", "probs": [0.0, 0.0], "num_classes": 2},
    ]
    await http.post("/v1/classify", json={"model": "sorter", "input": "beta", "use_activation": False})
    assert replicas.requests[-1].raw
    one = (await http.post("/v1/classify", json={"model": "ranker", "input": "beta"})).json()
    assert one["data"][0]["label"] == "LABEL_0"


async def test_pairs_are_scored_as_vllms_clients_ask(http: httpx.AsyncClient, replicas: Replicas) -> None:
    for path, body in (
        ("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/score", {"queries": [QUERY], "documents": DOCUMENTS}),
        ("/v1/score", {"text_1": [QUERY] * 4, "text_2": DOCUMENTS}),
    ):
        answer = (await http.post(path, json={"model": "ranker", **body})).json()
        assert [(one["index"], one["object"]) for one in answer["data"]] == [(at, "score") for at in range(4)]
        assert [one["score"] for one in answer["data"]] == pytest.approx(SCORES)
    assert replicas.requests[-1].input == tuple((QUERY, text) for text in DOCUMENTS)
    for wrong, param in (
        ({"text_1": ["a", "b"], "text_2": ["x"] * 3}, "text_2"),
        ({"text_2": "x"}, "text_1"),
        ({"text_1": "a", "text_2": "x", "documents": "x"}, "text_2"),
    ):
        refused = await http.post("/v1/score", json={"model": "ranker", **wrong})
        assert (refused.status_code, problem(refused)["param"]) == (400, param)


async def test_what_is_not_served_says_what_is(http: httpx.AsyncClient) -> None:
    for path in ("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/realtime"):
        answer = await http.post(path, json={})
        assert answer.status_code == 404
        assert "/v1/chat/completions" in problem(answer)["message"]


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("path", "change", "param", "message"),
    [
        ("rerank", {"documents": []}, "documents", "at least 1 item"),
        ("rerank", {"documents": [3]}, "documents.0", "string"),
        ("rerank", {"documents": [{"image": "x"}]}, "documents.0.text", "required"),
        ("rerank", {"query": ""}, "query", "at least 1 character"),
        ("rerank", {"query": "x" * 101}, "query", "101 characters, at most 100 are allowed"),
        ("rerank", {"documents": ["x" * 101]}, "documents", "101 characters, at most 100 are allowed"),
        ("rerank", {"documents": ["x"] * 2049}, "documents", "2049 documents, at most 2048 are allowed"),
        ("rerank", {"query": "x" * 90, "documents": ["x" * 90] * 30}, "documents", "5400 characters in all"),
        ("rerank", {"top_n": 0}, "top_n", "greater than or equal to 1"),
        ("rerank", {"max_tokens_per_doc": 0}, "max_tokens_per_doc", "greater than or equal to 1"),
        ("classify", {"input": []}, "input", "at least 1 item"),
        ("classify", {"input": [[1, 2]]}, "input", "string"),
        ("classify", {"input": ["x" * 101]}, "input", "101 characters"),
        ("classify", {"model": "clip", "input": "x"}, "model", "does not make classes; models that do: ranker, sorter"),
    ],
)
async def test_wrong_requests_name_the_field(
    http: httpx.AsyncClient, path: str, change: dict[str, Any], param: str, message: str
) -> None:
    body = (RANK if path == "rerank" else {"model": "sorter"}) | change
    answer = await http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    assert problem(answer)["param"].startswith(param)
    assert message in problem(answer)["message"]


async def test_models_say_where_they_are_asked(http: httpx.AsyncClient) -> None:
    listed = {model["id"]: model["endpoints"] for model in (await http.get("/v1/models")).json()["data"]}
    assert listed["ranker"] == ["/v1/rerank", "/v1/classify"]
    assert listed["sorter"] == ["/v1/classify"]


@pytest.mark.parametrize("path", ["/v1/pooling", "/pooling"])
async def test_what_a_model_pools_as_vllm_s_clients_ask(http: httpx.AsyncClient, replicas: Replicas, path: str) -> None:
    vectors = (await http.post("/v1/embeddings", json={"model": "clip", "input": ["a", "b"]})).json()
    found = await http.post(path, json={"model": "clip", "input": ["a", "b"]})
    assert found.status_code == 200, found.text
    body = found.json()
    assert body["id"].startswith("pool-")
    assert [one["data"] for one in body["data"]] == [one["embedding"] for one in vectors["data"]]
    assert {one["object"] for one in body["data"]} == {"pooling"}
    assert body["usage"] == vectors["usage"]
    text = (await http.post(path, json={"model": "clip", "input": "a", "encoding_format": "base64"})).json()
    assert np.frombuffer(base64.b64decode(text["data"][0]["data"]), "<f4").tolist() == body["data"][0]["data"]
    assert (await http.post(path, json={"model": "clip", "input": [[1, 2]], "task": "embed"})).status_code == 200
    classes = (await http.post("/v1/classify", json={"model": "sorter", "input": "x"})).json()
    for task in ({}, {"task": "classify"}):
        scores = (await http.post(path, json={"model": "sorter", "input": "x", **task})).json()
        assert [one["data"] for one in scores["data"]] == [one["probs"] for one in classes["data"]]
    await http.post(path, json={"model": "sorter", "input": "x", "use_activation": False})
    assert replicas.requests[-1].raw
    for wrong, field in (({"task": "token_embed"}, "task"), ({"model": "sorter", "input": [1, 2]}, "input")):
        refused = await http.post(path, json={"model": "clip", "input": "a", **wrong})
        assert problem(refused)["param"] == field
    assert (await http.post(path, json={"model": "nobody", "input": "a"})).status_code == 404
