"""ComfyUI's protocol over fake replicas: an ingress on a port, since websockets need one, and small workflows."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import websockets
from kit.serving import served
from kit.waiting import until
from PIL import Image
from unit.deployments.ingress.http_fakes import CONFIG, Replicas
from unit.deployments.ingress.jobs.job_fakes import RegistryWithJobs
from unit.deployments.serve_fakes import FakeHandle

from cluster.jobs.owner import JobOwner
from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig, WorkflowFilesConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service
from deployments.records import ImageRequest, ImageResult

CELL = 8  # pixels of a latent's side


class Samplers(Replicas):
    """Replicas that sample, and whose VAE makes a square of pixels of each latent: as bright as that is."""

    async def on_generate(self, request: ImageRequest) -> ImageResult:
        result = await super().on_generate(request)
        if request.output == "latent":
            assert request.width is not None
            assert request.height is not None
            shape = request.n, 16, request.height // CELL, request.width // CELL
            return replace(result, images=[], array=np.full(shape, 0.25, np.float32))
        if request.output == "decoded":
            assert request.latents is not None
            squares = np.kron(request.latents[:, 0], np.ones((CELL, CELL), np.float32))
            return replace(result, images=[], array=np.repeat(squares[..., None], 3, axis=3))
        return result


class Comfy(NamedTuple):
    """A client of an ingress, and the ingress's port."""

    http: httpx.AsyncClient
    port: int

    async def begin(self, prompt: Mapping[str, Any], **more: Any) -> str:
        answer = await self.http.post("/prompt", json={"prompt": prompt, **more})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert set(found) == {"prompt_id", "number", "node_errors"}
        return str(found["prompt_id"])

    async def ended(self, id_: str, **options: Any) -> dict[str, Any]:
        """Return the history of a prompt once it has ended."""

        async def look() -> Any:
            return (await self.http.get(f"/history/{id_}", **options)).json()

        found: dict[str, Any] = (await until(look))[id_]
        return found

    async def image(self, file: Mapping[str, str], **more: str) -> Image.Image:
        answer = await self.http.get("/view", params={**file, **more})
        assert answer.status_code == 200, answer.text
        return Image.open(io.BytesIO(answer.content))

    def socket(self, client: str = "", **options: Any) -> Any:
        query = f"?clientId={client}" if client else ""
        return websockets.connect(f"ws://127.0.0.1:{self.port}/ws{query}", **options)


@asynccontextmanager
async def comfy_over(
    replicas: Any, owner: JobOwner, folder: Path, config: ClusterConfig = CONFIG, num_runners: int = 1
) -> AsyncIterator[Comfy]:
    """Yield a client of an ingress over replicas and jobs. `num_runners` 0: it runs no jobs."""
    ingress = config.ingress.model_copy(update={"workflow_files": WorkflowFilesConfig(folder=folder)})
    config = config.model_copy(update={"ingress": ingress, "grpc": None})
    registry, handle = RegistryWithJobs(replicas, owner), FakeHandle(replicas)
    watch = RegistrySnapshot(NamedActor(lambda: registry))
    app = create_http_app(Service(config, watch, handle, handle), config)
    async with AsyncExitStack() as stack:
        if num_runners:
            await stack.enter_async_context(app.router.lifespan_context(app))
        port = await stack.enter_async_context(served(app))
        url = f"http://127.0.0.1:{port}"
        # Without certificates, which would take longer to read than a request takes.
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, verify=False))
        yield Comfy(http, port)
    watch.close()


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def plain_workflow(color: int = 0xFF8000, width: int = 16, height: int = 8, prefix: str = "made") -> dict[str, Any]:
    """An image of one color that is saved."""
    inputs = {"width": width, "height": height, "batch_size": 1, "color": color}
    return {
        "1": {"class_type": "EmptyImage", "inputs": inputs, "_meta": {"title": "A color"}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": prefix}},
    }


def enlarged_workflow(model: str) -> dict[str, Any]:
    """An image of one color that a model enlarges."""
    workflow = plain_workflow()
    enlarged = {"upscale_model": ["3", 0], "image": ["1", 0]}
    workflow["2"]["inputs"]["images"] = ["4", 0]
    return workflow | {
        "3": {"class_type": "UpscaleModelLoader", "inputs": {"model_name": model}},
        "4": {"class_type": "ImageUpscaleWithModel", "inputs": enlarged},
    }


def inverted_workflow(name: str) -> dict[str, Any]:
    """An uploaded image that is inverted and saved."""
    return {
        "1": {"class_type": "LoadImage", "inputs": {"image": name}},
        "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
        "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "ComfyUI"}},
    }


def text_to_image(steps: int = 4) -> dict[str, Any]:
    """The workflow that every page begins with."""
    return {
        "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "flux.safetensors"}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 32, "height": 16, "batch_size": 1}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a seven", "clip": ["4", 1]}},
        "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["4", 1]}},
        "3": {
            "class_type": "KSampler",
            "inputs": {
                **{"seed": 5, "steps": steps, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"},
                **{"denoise": 1.0, "model": ["4", 0], "positive": ["6", 0], "negative": ["7", 0]},
                "latent_image": ["5", 0],
            },
        },
        "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "seven"}},
    }


class Heard(NamedTuple):
    """The messages to a client: events in order, and binary ones."""

    events: list[tuple[str, dict[str, Any]]]
    frames: list[bytes]

    def names(self) -> list[str]:
        return [name for name, _ in self.events if name != "status"]

    def data(self, name: str) -> list[dict[str, Any]]:
        return [data for one, data in self.events if one == name]


async def heard_until_end(socket: Any, prompt_id: str) -> Heard:
    """Return the messages until a prompt is over, as clients wait for it."""
    heard = Heard([], [])
    async with asyncio.timeout(60):
        async for message in socket:
            if isinstance(message, bytes):
                heard.frames.append(message)
                continue
            assert message.startswith('{"type":')
            event = json.loads(message)
            assert set(event) == {"type", "data"}
            heard.events.append((event["type"], event["data"]))
            if event["type"] == "executing" and event["data"]["node"] is None:
                assert event["data"]["prompt_id"] == prompt_id
                return heard
    raise AssertionError("the connection ended before")


def preview_in(frame: bytes) -> tuple[Image.Image, dict[str, Any] | None]:
    """Return the image of a binary message, and its facts where it has some."""
    (kind,) = struct.unpack_from(">I", frame)
    if kind == 1:
        assert struct.unpack_from(">I", frame, 4) == (1,)
        return Image.open(io.BytesIO(frame[8:])), None
    assert kind == 4
    (length,) = struct.unpack_from(">I", frame, 4)
    return Image.open(io.BytesIO(frame[8 + length :])), json.loads(frame[8 : 8 + length])
