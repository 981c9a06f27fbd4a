"""From a client's request to an enlarged image: the HTTP edge over a real worker's image service, without Ray."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from kit.seeding import seeded_rng
from PIL import Image
from safetensors.torch import save_file
from unit.deployments.engine_loops import stream_images
from unit.deployments.engines.upscaler_files import compact, enlarged
from unit.deployments.ingress.http_fakes import CONFIG, STATUSES, Replicas, client_over
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import LimitsConfig, WorkerConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder
from deployments.replicas.step_loop import DeviceThread
from deployments.services.image_service import ImageService

pytestmark = pytest.mark.slow  # imports diffusers
SCALE = 2


class Worker(Replicas):
    """The registry of the fakes, and a worker whose image service is real."""

    def __init__(self, cache: ModuleCache) -> None:
        super().__init__()
        self._images = ImageService(cache, WorkerConfig(), DeviceThread())
        self.states["larger"] = replace(
            STATUSES["flux"], id="larger", kind="upscaler", class_name="SRVGGNetCompact", variant={"scale": SCALE}
        )

    async def on_stream_images(self, request: Any) -> AsyncIterator[Any]:
        async def no_text(_: Any) -> Any:
            raise AssertionError("an upscaler has no text")

        async with stream_images(self._images, request, no_text) as pieces:
            async for piece in pieces:
                yield piece


@pytest.fixture
async def http(tmp_path: Path, open_host: Callable[..., ModuleCache]) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    save_file(tensors := compact(scale=SCALE), tmp_path / "x.safetensors")
    cache = open_host(ComponentBuilder(WorkerConfig()), {"larger": tmp_path / "x.safetensors"})
    worker = Worker(cache)
    limits = CONFIG.ingress.limits.model_copy(update={"max_upload_pixels": LimitsConfig().max_upload_pixels})
    config = CONFIG.model_copy(update={"ingress": CONFIG.ingress.model_copy(update={"limits": limits})})
    watch, handle = RegistrySnapshot(NamedActor(lambda: worker)), FakeHandle(worker)
    app = create_http_app(Service(config, watch, handle, handle), config)
    async with client_over(app) as client:
        yield client, tensors
    watch.close()


def png(pixels: np.ndarray) -> bytes:
    Image.fromarray(pixels).save(file := io.BytesIO(), "png")
    return file.getvalue()


def pixels_of(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"))


def image_of(*shape: int) -> np.ndarray:
    return seeded_rng().integers(0, 256, (*shape, 3), dtype=np.uint8)


async def test_the_openai_client_gets_a_variation_and_an_edit(http: Any) -> None:
    client, tensors = http
    ask = openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=client, max_retries=0)
    image = image_of(10, 14)
    expected = enlarged(tensors, image).clip(0, 255).round()
    for answer in (
        await ask.images.create_variation(model="larger", image=png(image)),
        await ask.images.edit(model="larger", image=png(image), prompt="a cat"),
    ):
        assert answer.data is not None
        assert np.abs(pixels_of(answer.data[0].b64_json or "") - expected).max() <= 1
    assert answer.model_extra is not None
    assert "without effect on an upscaler: prompt" in answer.model_extra["warnings"]
    with pytest.raises(openai.BadRequestError, match="width: an upscaler takes an image alone"):
        await ask.images.edit(model="larger", image=png(image), prompt="a cat", extra_body={"width": 16, "height": 16})
    with pytest.raises(openai.BadRequestError, match="init_image: an upscaler enlarges an image"):
        await ask.images.generate(model="larger", prompt="a cat")
    models = {one.id: one for one in (await ask.models.list()).data}
    assert models["larger"].model_extra is not None
    assert models["larger"].model_extra["endpoints"] == ["/v1/images/variations", "/v1/images/edits"]


async def test_the_tensors_of_v2(http: Any) -> None:
    client, tensors = http
    images = image_of(2, 6, 8)
    given = {"name": "image", "datatype": "UINT8", "shape": list(images.shape), "data": images.tolist()}
    answer = await client.post("/v2/models/larger/infer", json={"inputs": [given]})
    assert answer.status_code == 200, answer.text
    [output] = answer.json()["outputs"]
    assert (output["name"], output["shape"]) == ("images", [2, 12, 16, 3])
    found = np.array(output["data"]).reshape(output["shape"])
    for image, one in zip(images, found, strict=True):
        assert np.abs(one - enlarged(tensors, image).clip(0, 255).round()).max() <= 1
    metadata = (await client.get("/v2/models/larger")).json()
    assert [one["name"] for one in metadata["inputs"]] == ["image"]
    refused = await client.post("/v2/models/larger/infer", json={"inputs": [given | {"name": "prompt"}]})
    assert (refused.status_code, "unknown input 'prompt'" in refused.text) == (400, True)


async def test_steps_of_a_stream_are_tiles(http: Any) -> None:
    client, _ = http
    body = {"model": "larger", "prompt": "x", "stream": True, "progress": True}
    body["init_image"] = base64.b64encode(png(image_of(8, 8))).decode()
    answer = await asyncio.wait_for(client.post("/v1/images/generations", json=body), 30)
    assert answer.status_code == 200, answer.text
    assert "image_generation.completed" in answer.text
