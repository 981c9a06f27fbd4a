"""The cluster as a whole: sharing, switching, broken weights, bad input, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import ray
from integration.harness import Cluster
from kit.waiting import until, wait_until

from cluster.records.actor_names import NAMESPACE, registry_name
from deployments.records.errors import InvalidRequest, UnknownModel
from infra.bench.command.figures import percentile
from infra.bench.door_load import Ask, LoadGenerator
from weights.storage.store import WeightStore

PROBE_S = 5.0  # on a machine whose cores all make images; behind the images it would be a minute


def post(cluster: Cluster, path: str, **options: Any) -> httpx.Response:
    return httpx.post(f"{cluster.url}{path}", timeout=120, **options)


def test_models_are_listed_with_their_state(cluster: Cluster) -> None:
    models = {model.id: model for model in cluster.openai.models.list(extra_query={"all": True})}
    assert list(models) == [*cluster.config.entries, *(pipeline.id for pipeline in cluster.config.pipelines)]
    assert models["digits-flux"].state == "ready"
    assert (models["bold"].kind, models["bold"].endpoints) == ("adapter", [])
    listed = [model.id for model in cluster.openai.models.list()]
    assert listed == [id_ for id_, model in models.items() if model.endpoints or model.kind is None]
    assert {"adder", "sum-to-digit", "truncated"} <= {*listed}
    assert not {"bold", "texts-head"} & {*listed}
    assert cluster.openai.models.retrieve("adder").kind == "llm"
    with pytest.raises(openai.NotFoundError, match="known: digits-flux"):
        cluster.openai.models.retrieve("nope")


def test_two_workers_share_one_copy_that_was_read_once(cluster: Cluster) -> None:
    """Storage gave each extent once, however many replicas have attached it."""
    with ThreadPoolExecutor(12) as pool:
        jobs = [
            pool.submit(
                lambda n: (
                    post(
                        cluster, "/v1/images/generations", json={"model": "digits-flux", "prompt": str(n), "seed": n}
                    ).status_code
                ),
                number,
            )
            for number in range(12)
        ]
        assert {job.result() for job in jobs} == {200}
    node = httpx.get(f"{cluster.url}/admin/cluster").json()["nodes"][0]
    store = WeightStore(cluster.config.store.path)
    known = {id_: extent for model in store.model_names() for id_, extent in store.manifest(model).extents.items()}
    assert node["num_evicted"] == 0
    assert node["read_bytes"] == node["resident_bytes"]
    assert 0 < node["read_bytes"] <= sum(extent.nbytes for extent in known.values())


def test_shared_components_are_stored_once(cluster: Cluster) -> None:
    store = WeightStore(cluster.config.store.path)
    flux, inverted, sdxl = (store.manifest(f"digits-{name}") for name in ("flux", "flux-inverted", "sdxl"))
    for component in ("vae", "text_encoder", "text_encoder_2"):
        assert flux.components[component].module_key == inverted.components[component].module_key
        assert flux.extents_of([component]) == inverted.extents_of([component])
    assert flux.extents_of(["vae"]) == sdxl.extents_of(["vae"])
    assert not set(flux.extents_of(["transformer"])) & set(inverted.extents_of(["transformer"]))


def test_a_text_encoder_has_memory_for_pipelines_before_it_is_asked(cluster: Cluster) -> None:
    (encoder,) = httpx.get(f"{cluster.url}/admin/cluster").json()["text_encoders"]
    assert encoder["segments"]["arena_bytes"] > 0
    assert encoder["segments"]["num_temporary"] == 0


def test_a_truncated_file_takes_down_its_own_model_only(cluster: Cluster) -> None:
    model = cluster.openai.models.retrieve("truncated")
    assert model.state == "unavailable"
    assert re.search(r"truncated/model\.safetensors.*'layer\.weight'", model.error)
    answer = post(cluster, "/v1/completions", json={"model": "truncated", "prompt": "x"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "model_unavailable"
    assert "layer.weight" in answer.json()["error"]["message"]
    assert httpx.get(f"{cluster.url}/healthz").json()["status"] == "degraded"


def test_a_model_that_cannot_be_built_says_why(cluster: Cluster) -> None:
    answer = post(cluster, "/v1/completions", json={"model": "incomplete", "prompt": "x"})
    assert answer.status_code == 503
    assert "model.norm.weight" in answer.json()["error"]["message"]
    assert "model.norm.weight" in cluster.openai.models.retrieve("incomplete").error


def test_a_flipped_bit_in_the_store_is_caught_and_named(cluster: Cluster) -> None:
    store = WeightStore(cluster.config.store.path)
    (extent,) = store.manifest("adder-copy").extents_of(["model"])
    with (store.packs / extent.pack).open("r+b") as file:
        file.seek(extent.offset + extent.nbytes // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    for _ in range(3):
        answer = post(cluster, "/v1/completions", json={"model": "adder-copy", "prompt": "1"})
        assert answer.status_code == 503, answer.text
        message = answer.json()["error"]["message"]
        assert extent.pack in message
        assert "model.embed_tokens.weight" in message or "more tensors" in message
    listed = cluster.openai.models.retrieve("adder-copy")
    assert (listed.state, extent.pack in listed.error) == ("unavailable", True)
    good = post(cluster, "/v1/completions", json={"model": "adder", "prompt": "1", "max_tokens": 1})
    assert good.status_code == 200


IMAGE = {"model": "digits-flux", "prompt": "x", "num_inference_steps": 1}
CHAT = {"model": "adder", "messages": [{"role": "user", "content": "1 + 1"}]}
BAD_REQUESTS = [
    ("/v1/images/generations", IMAGE | {"model": "nope"}, 404, "known: digits-flux"),
    ("/v1/images/generations", IMAGE | {"prompt": ""}, 400, "prompt"),
    ("/v1/images/generations", IMAGE | {"prompt": "x" * 1_000_000}, 400, "1000000 characters"),
    ("/v1/images/generations", IMAGE | {"prompt": "x" * 3_000_000}, 400, "at most"),
    ("/v1/embeddings", {"model": "minilm", "input": "x" * 3_000_000}, 413, "at most"),
    ("/v1/images/generations", IMAGE | {"n": 0}, 400, "n"),
    ("/v1/images/generations", IMAGE | {"n": 11}, 400, "at most 10"),
    ("/v1/images/generations", IMAGE | {"n": "many"}, 400, "n"),
    ("/v1/images/generations", IMAGE | {"num_inference_steps": 0}, 400, "num_inference_steps"),
    ("/v1/images/generations", IMAGE | {"num_inference_steps": 10**9}, 400, "at most"),
    ("/v1/images/generations", IMAGE | {"size": "33x32"}, 400, "multiple of 8"),
    ("/v1/images/generations", IMAGE | {"size": "0x32"}, 400, "size"),
    ("/v1/images/generations", IMAGE | {"size": "huge"}, 400, "size"),
    ("/v1/images/generations", IMAGE | {"size": "32x32", "width": 32}, 400, "either size, or width and height"),
    ("/v1/images/generations", IMAGE | {"width": 33, "height": 32}, 400, "multiple of 8"),
    ("/v1/images/generations", IMAGE | {"size": "99999x99999"}, 400, "pixels"),
    ("/v1/images/generations", IMAGE | {"guidance_scale": -1}, 400, "guidance_scale"),
    ("/v1/images/generations", IMAGE | {"seed": -2}, 400, "seed"),
    ("/v1/images/generations", IMAGE | {"lora": [{"name": "italic"}]}, 404, "known: bold"),
    ("/v1/images/generations", IMAGE | {"model": "digits-sdxl", "lora": [{"name": "bold"}]}, 404, "known: none"),
    ("/v1/images/generations", IMAGE | {"lora": [{"name": "bold"}, {"name": "bold"}]}, 400, "once"),
    ("/v1/images/generations", IMAGE | {"lora": [{"name": "bold", "scael": 1}]}, 400, "unknown field"),
    ("/v1/images/generations", IMAGE | {"response_format": "file"}, 400, "b64_json"),
    ("/v1/images/generations", IMAGE | {"model": "adder"}, 400, "does not make images"),
    ("/v1/images/generations", [1, 2], 400, ""),
    ("/v1/embeddings", {"model": "minilm", "input": ""}, 400, "input"),
    ("/v1/embeddings", {"model": "minilm", "input": []}, 400, "input"),
    ("/v1/embeddings", {"model": "minilm", "input": [[10**9]]}, 400, "token ids"),
    ("/v1/embeddings", {"model": "minilm", "input": ["x"], "dimensions": 7}, 400, "384"),
    ("/v1/embeddings", {"model": "digits-flux", "input": ["x"]}, 400, "does not make embeddings"),
    ("/v1/chat/completions", CHAT | {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "wizard", "content": "x"}]}, 400, "role"),
    ("/v1/chat/completions", CHAT | {"max_tokens": 0}, 400, "max_tokens"),
    ("/v1/chat/completions", CHAT | {"top_p": -1}, 400, "top_p"),
    ("/v1/chat/completions", CHAT | {"n": 0}, 400, "n"),
    ("/v1/chat/completions", CHAT | {"stream": True, "model": "nope"}, 404, "known"),
    ("/v1/completions", {"model": "adder", "prompt": 3}, 400, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "status", "text"), BAD_REQUESTS)
def test_bad_input_is_a_readable_4xx(cluster: Cluster, path: str, body: Any, status: int, text: str) -> None:
    answer = post(cluster, path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert text in error["message"]


def test_malformed_json(cluster: Cluster) -> None:
    answer = post(
        cluster, "/v1/chat/completions", content='{"model": "adder", ', headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_handle_calls_are_checked_like_http(cluster: Cluster) -> None:
    with pytest.raises(UnknownModel, match="known: digits-flux"):
        cluster.handle.generate.remote({"model": "nope", "prompt": "x"}).result(timeout_s=60)
    with pytest.raises(InvalidRequest, match=r"promt.*fields: .*model, prompt"):
        cluster.handle.generate.remote({"model": "digits-flux", "promt": "x"}).result(timeout_s=60)


def test_every_answer_has_server_timing(cluster: Cluster) -> None:
    answer = post(cluster, "/v1/images/generations", json=IMAGE)
    stages = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert {"queue", "encode", "switch", "denoise", "decode", "total"} <= stages.keys()
    assert float(stages["total"]) >= float(stages["denoise"]) > 0


def test_a_client_that_leaves_frees_its_place(cluster: Cluster) -> None:
    """The whole request would take seconds more than the wait allows."""
    body = IMAGE | {"n": 10, "num_inference_steps": 200}

    def denoising() -> int:
        workers = httpx.get(f"{cluster.url}/admin/cluster").json()["workers"]
        assert len(workers) == 2
        return sum(worker["denoising"] for worker in workers)

    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(httpx.post, f"{cluster.url}/v1/images/generations", json=body, timeout=1.0)
        wait_until(lambda: denoising() > 0, "the request's start")
        with pytest.raises(httpx.TimeoutException):
            leaving.result()
    wait_until(lambda: denoising() == 0, "the end of the abandoned request", timeout_s=2.0)


def test_metrics_are_prometheus_text(cluster: Cluster) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def found() -> dict[str, list[Any]]:
        page = httpx.get(f"{cluster.url}/metrics", timeout=30).text
        return {family.name: family.samples for family in text_string_to_metric_families(page)}

    assert post(cluster, "/v1/images/generations", json=IMAGE).status_code == 200
    names = {"ray_atelier_requests", "ray_atelier_phase_ms", "ray_atelier_phase_ms_measured"}
    wait_until(lambda: names <= found().keys(), "Atelier's metrics")
    families = found()
    measured = {tuple(sorted(one.labels.items())): one.value for one in families["ray_atelier_phase_ms_measured"]}
    sums = [one for one in families["ray_atelier_phase_ms"] if one.name.endswith("_sum")]
    known = [one for one in sums if tuple(sorted(one.labels.items())) in measured]
    assert known, "a phase that took some time"
    assert all(one.value == measured[tuple(sorted(one.labels.items()))] for one in known)


def test_the_registry_answers_by_name(cluster: Cluster) -> None:
    registry = ray.get_actor(registry_name(cluster.config), namespace=NAMESPACE)
    statuses = {status.id: status.state for status in ray.get(registry.list_models.remote())}
    assert statuses["digits-flux"] == "ready"
    assert statuses["truncated"] == "unavailable"


async def test_probes_answer_beside_more_requests_than_are_taken(cluster: Cluster) -> None:
    """Serve lets a replica work on so many at once; what it held back there, probes would wait behind.

    HAZARD: for each request and each answer, httpx looks at all of its connections for each of its connections. With
    hundreds of them that takes seconds, which would be counted as the probe's. aiohttp does not.
    """
    most, num_more = cluster.config.ingress.max_ongoing_requests, 100
    body = {"model": "digits-flux", "prompt": "a handwritten two", "num_inference_steps": 200}
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(cluster.url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def num_denoising() -> int:
            async with http.get("/admin/cluster") as answer:
                return sum(worker["denoising"] for worker in (await answer.json())["workers"])

        async def ask(path: str, **options: Any) -> int:
            async with http.request("POST" if options else "GET", path, **options) as answer:
                await answer.read()
                return answer.status

        async def all_decided() -> bool:
            return sum(task.done() for task in asking) >= num_more

        terms = {"x-request-timeout-seconds": "20"}  # which is too short for so many, however quick the machine is
        asking = [
            asyncio.create_task(ask("/v1/images/generations", json=body, headers=terms)) for _ in range(most + num_more)
        ]
        try:
            await until(all_decided)
            statuses = {await task for task in asking if task.done()}
            assert 429 in statuses <= {200, 429}
            for path in ("/healthz", "/v2/health/live", "/v2/health/ready"):
                start = time.monotonic()
                assert await ask(path) == 200
                assert time.monotonic() - start < PROBE_S
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

        async def is_idle() -> bool:
            return await num_denoising() == 0

        await until(is_idle)


@pytest.mark.long
def test_probes_from_outside_answer_while_a_thousand_come_at_once(cluster: Cluster) -> None:
    """Both from processes of their own, as a client and a prober are. Once, /healthz hung for as long as the burst."""
    image = {"model": "digits-flux", "num_inference_steps": 8, "prompt": "a handwritten two"}
    chat = {"model": "adder", "max_tokens": 8, "messages": [{"role": "user", "content": "What is 12 + 7?"}]}
    asks = [
        Ask("burst", path, body | {"seed": number}, timeout_s=8.0)
        for number in range(500)
        for path, body in (("/v1/images/generations", image), ("/v1/chat/completions", chat))
    ]
    with contextlib.closing(LoadGenerator()) as prober, contextlib.closing(LoadGenerator()) as burst:
        prober.begin_order("watch", cluster.url, [Ask("health", "/healthz")], period_s=0.02)
        outcomes = burst.run("open", cluster.url, asks, probe_every=0)
        probes = prober.stop()
    assert {one.status for one in outcomes} <= {200, 429, 504}
    assert sum(one.is_good for one in outcomes) >= 10
    assert {one.status for one in probes} == {200}
    length_s = max(one.done_s for one in outcomes) - min(one.sent_s for one in outcomes)
    assert percentile([one.latency_s for one in probes], 0.9) < length_s / 10
