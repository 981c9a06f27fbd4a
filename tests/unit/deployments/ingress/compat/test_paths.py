"""Paths without /v1, HEAD, probes, versions, tokens; and that each edge can be switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from unit.deployments.ingress.compat.conftest import OpenApp
from unit.deployments.ingress.http_fakes import CHAT, COMPLETION, EMBEDDING, IMAGE, Replicas, problem

from configs.errors import ConfigFileError
from configs.http import INFERENCE_PATHS, CompatConfig
from configs.loading import load_cluster_config
from deployments.ingress.gate import _need_of

OWN_PATHS = {
    "vllm": ["/health", "/version", "/tokenize", "/detokenize"],
    "anthropic": ["/v1/messages", "/v1/messages/count_tokens"],
    "ollama": ["/api/chat", "/api/generate", "/api/embed", "/api/tags", "/api/show", "/api/ps", "/api/version"],
    "a1111": ["/sdapi/v1/txt2img", "/sdapi/v1/img2img", "/sdapi/v1/sd-models", "/sdapi/v1/options"],
    "comfyui": ["/view", "/upload/image", "/upload/mask", "/object_info", "/system_stats", "/features", "/free"],
}


def volatile(answer: httpx.Response) -> Any:
    body = answer.json()
    return {name: value for name, value in body.items() if name not in ("id", "created", "timings_ms", "seed", "data")}


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT),
        ("/completions", COMPLETION),
        ("/embeddings", EMBEDDING),
        ("/rerank", {"model": "ranker", "query": "x", "documents": ["x"]}),
        ("/classify", {"model": "sorter", "input": "x"}),
        ("/score", {"model": "ranker", "text_1": "x", "text_2": "x"}),
        ("/pooling", {"model": "clip", "input": "x"}),
        ("/images/generations", IMAGE),
        ("/responses", {"model": "chatty", "input": "x"}),
        ("/chat/completions", CHAT | {"temperature": 9}),
        ("/chat/completions", CHAT | {"model": "nobody"}),
    ],
)
async def test_paths_without_the_prefix_answer_as_those_with_it(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answers = [await http.post(prefix + path, json=body) for prefix in ("", "/v1")]
    assert answers[0].status_code == answers[1].status_code
    if answers[0].status_code == 200:
        assert volatile(answers[0]).keys() == volatile(answers[1]).keys()
    else:
        assert answers[0].json() == answers[1].json()


async def test_models_without_the_prefix(http: httpx.AsyncClient) -> None:
    assert (await http.get("/models")).json() == (await http.get("/v1/models")).json()
    assert (await http.get("/models/flux")).json()["id"] == "flux"
    assert problem(await http.get("/chats"))["code"] == "unknown_url"


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/healthz", "/v2", "/v2/health/live", "/v1/models/flux"])
async def test_head_is_a_get_without_its_body(http: httpx.AsyncClient, path: str) -> None:
    got, head = await http.get(path), await http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]
    assert (await http.head("/v1/nothing")).status_code == 404
    assert (await http.head("/v1/chat/completions")).status_code == 405


async def test_probes_and_versions(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/version")).json() == {"version": (await http.get("/v2")).json()["version"]}


async def test_health_is_503_without_a_model_that_answers(replicas: Replicas, http: httpx.AsyncClient) -> None:
    replicas.states = {"broken": replicas.states["broken"]}
    answer = await http.get("/health")
    assert (answer.status_code, problem(answer)["code"]) == (503, "model_unavailable")


async def test_tokens_of_a_text_and_of_a_chat(http: httpx.AsyncClient, replicas: Replicas) -> None:
    body: dict[str, Any] = {"model": "chatty", "prompt": "ab", "return_token_strs": True}
    assert (await http.post("/tokenize", json=body)).json() == {
        "count": 2,
        "max_model_len": 512,
        "tokens": [97, 98],
        "token_strs": ["a", "b"],
    }
    chat = {"model": "chatty", "messages": [{"role": "user", "content": "abc"}], "add_generation_prompt": True}
    assert (await http.post("/tokenize", json=chat)).json()["tokens"] == [97, 98, 99]
    without = await http.post("/tokenize", json=body | {"add_special_tokens": False})
    assert without.json()["token_strs"] == ["a", "b"]
    assert [has_special for _, has_special in replicas.tokenized] == [True, True, False]
    assert (await http.post("/detokenize", json={"model": "chatty", "tokens": [104, 105]})).json() == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "chatty"}, "prompt"),
        ("/tokenize", {"model": "chatty", "prompt": "x", "messages": CHAT["messages"]}, "prompt"),
        (
            "/tokenize",
            {"model": "chatty", "messages": CHAT["messages"], "add_generation_prompt": False},
            "add_generation_prompt",
        ),
        ("/tokenize", {"model": "flux", "prompt": "x"}, "model"),
        ("/tokenize", {"model": "chatty", "prompt": "x" * 101}, "prompt"),
        ("/detokenize", {"model": "chatty", "tokens": []}, "tokens"),
        ("/detokenize", {"model": "chatty", "tokens": [-1]}, "prompt"),
    ],
)
async def test_wrong_wishes_for_tokens(http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert problem(answer)["param"].startswith(param)


@pytest.mark.drawn
@pytest.mark.parametrize("edge", OWN_PATHS)
async def test_each_edge_can_be_switched_off(open_app: OpenApp, edge: str) -> None:
    async with open_app(http={"compat": {edge: False}}) as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            listed = (await client.get("/openapi.json")).json()["paths"]
            for other, paths in OWN_PATHS.items():
                for path in paths:
                    assert (path in listed) is (other != edge)
                    statuses = {(await client.get(path)).status_code, (await client.post(path)).status_code}
                    assert (statuses == {404}) is (other == edge), path
            assert ("data" in (await client.get("/models")).json()) is (edge != "vllm")  # or they are ComfyUI's folders


def test_the_config_knows_the_edges_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("models: [{id: m, path: /m}]\nhttp: {compat: {ollama: no}}")
    assert load_cluster_config(path).http.compat == CompatConfig(ollama=False)
    assert set(OWN_PATHS) == CompatConfig.model_fields.keys()
    path.write_text(path.read_text().replace("ollama", "llamacpp"))
    with pytest.raises(ConfigFileError, match="llamacpp"):
        load_cluster_config(path)


def test_every_path_that_asks_a_model_takes_turns_and_needs_a_key(open_app: OpenApp) -> None:
    asking = [path for paths in OWN_PATHS.values() for path in paths if path.startswith(INFERENCE_PATHS)]
    assert {"/v1/messages", "/tokenize", "/api/chat", "/api/generate", "/api/embed", "/sdapi/v1/txt2img"} <= {*asking}
    assert {_need_of(path) for path in asking} == {"key"}


async def test_keys_bodies_and_hosts_are_checked_at_every_edge(open_app: OpenApp) -> None:
    small = {"limits": {"max_body_bytes": 2**17, "max_upload_bytes": 2**18}}
    async with open_app(access={"allowed_hosts": ["test"]}, ingress=small) as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as client:
            for path in ("/v1/messages", "/api/chat", "/sdapi/v1/txt2img", "/chat/completions", "/tokenize"):
                assert (await client.post(path, json={})).status_code == 403
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in ("/v1/messages", "/api/chat", "/sdapi/v1/txt2img", "/chat/completions", "/tokenize"):
                assert (await client.post(path, content=b"x" * (2**17 + 1))).status_code == 413
                page = {"origin": "https://evil.example"}
                assert (await client.post(path, json={}, headers=page)).status_code == 403
            assert (await client.post("/sdapi/v1/img2img", content=b'"' + b"x" * 2**17 + b'"')).status_code == 400
            assert (await client.post("/sdapi/v1/img2img", content=b'"' + b"x" * 2**18 + b'"')).status_code == 413
