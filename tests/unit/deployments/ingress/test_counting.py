"""Requests at the edge are counted once, by model, kind and status, whatever becomes of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping

import httpx
import pytest
from kit.waiting import until
from ray.exceptions import RayTaskError
from unit.deployments.ingress.http_fakes import (
    CHAT,
    CHATS,
    COMPLETION,
    COMPLETIONS,
    CONFIG,
    EMBEDDING,
    EMBEDDINGS,
    IMAGE,
    IMAGES,
    Replicas,
    client_over,
)
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service
from deployments.records import ImageRequest, ImageResult
from deployments.records.errors import GenerationFailed

PIPELINE = {
    "id": "twice",
    "inputs": {"text": "text"},
    "stages": [{"name": "first", "model": "clip", "inputs": {"text": "$text"}}],
    "outputs": {"embedding": "$first"},
}


class Meter:
    """Keeps what is counted."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.texts: list[tuple[str, int, int, int]] = []

    def count_request(self, kind: str, model: str, status: int) -> None:
        self.requests[kind, model, status] += 1

    def count_text(self, model: str, num_in: int, num_out: int, timings_ms: Mapping[str, float], n: int) -> None:
        assert timings_ms["total"] > 0
        self.texts.append((model, num_in, num_out, n))


class Held(Replicas):
    """Holds images for ever."""

    async def on_generate(self, request: ImageRequest) -> ImageResult:
        self.requests.append(request)
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
async def counted(replicas: Replicas, meter: Meter) -> AsyncIterator[httpx.AsyncClient]:
    config = ClusterConfig.model_validate(CONFIG.model_dump() | {"pipelines": [PIPELINE]})
    watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
    app = create_http_app(Service(config, watch, handle, handle, meter=meter), config)
    async with client_over(app, "http://test/v1/") as http:
        yield http
    watch.close()


async def test_answers_are_counted_by_model_and_kind(counted: httpx.AsyncClient, meter: Meter) -> None:
    streamed = CHAT | {"stream": True}
    bodies = [(IMAGES, IMAGE), (CHATS, CHAT), (CHATS, streamed), (COMPLETIONS, COMPLETION), (EMBEDDINGS, EMBEDDING)]
    for path, body in bodies:
        assert (await counted.post(path, json=body)).status_code == 200
    reranked = {"model": "ranker", "query": "a", "documents": ["b"]}
    assert (await counted.post("rerank", json=reranked)).status_code == 200
    assert meter.requests == {
        ("image", "flux", 200): 1,
        ("text", "chatty", 200): 3,
        ("embedding", "clip", 200): 1,
        ("score", "ranker", 200): 1,
    }
    assert meter.texts == [("chatty", 4, 3, 1)] * 3


async def test_what_goes_wrong_has_its_status_and_unknown_names_have_no_series(
    counted: httpx.AsyncClient, meter: Meter, replicas: Replicas
) -> None:
    for number in range(3):
        assert (await counted.post(CHATS, json=CHAT | {"model": f"made-up-{number}"})).status_code == 404
    await counted.post(IMAGES, json=IMAGE | {"n": 5})
    replicas.error = RayTaskError("f", "Traceback", GenerationFailed("no"))
    await counted.post(CHATS, json=CHAT)
    replicas.error = ValueError("broken")
    await counted.post(EMBEDDINGS, json=EMBEDDING)
    assert meter.requests == {
        ("text", "", 404): 3,
        ("image", "flux", 400): 1,
        ("text", "chatty", 500): 1,
        ("embedding", "clip", 500): 1,
    }
    assert meter.texts == []


@pytest.mark.parametrize("replicas", [Held()])
async def test_a_client_that_leaves_is_counted_as_one(
    counted: httpx.AsyncClient, meter: Meter, replicas: Replicas
) -> None:
    asking = asyncio.create_task(counted.post(IMAGES, json=IMAGE))
    await until(lambda: replicas.requests)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: meter.requests)
    assert meter.requests == {("image", "flux", 499): 1}


async def test_a_request_for_a_pipeline_is_one_of_it_and_one_of_each_model(
    counted: httpx.AsyncClient, meter: Meter
) -> None:
    await counted.post(EMBEDDINGS, json=EMBEDDING | {"model": "twice"})
    assert ("pipeline", "twice") in {(kind, model) for kind, model, _ in meter.requests}
    assert ("embedding", "twice") not in {(kind, model) for kind, model, _ in meter.requests}
