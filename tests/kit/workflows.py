"""A backend of workflows without a cluster: a VAE that averages squares, an upscaler that repeats pixels, files in
memory. It takes and gives what a cluster does, so a node that hands on something else fails here as it would there."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from deployments.records import ChatRequest, ClipRequest, ImageRequest, as_record
from deployments.records.errors import InvalidRequest
from deployments.workflows.backend import Folder, ModelFacts, Report, SavedFile
from deployments.workflows.records import Link, Node, Workflow

Array = npt.NDArray[np.float32]

FACTOR = 8
FILES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "checkpoints": {"base.safetensors": ("base",), "other.safetensors": ("other",)},
    "diffusion_models": {"unet.safetensors": ("base", "flux")},
    "text_encoders": {
        "writer.safetensors": ("writer",),
        "clip_l.safetensors": ("base", "flux"),
        "t5xxl.safetensors": ("flux",),
    },
    "vae": {"ae.safetensors": ("flux",)},
    "loras": {"ink.safetensors": ("ink",)},
    "controlnet": {"canny.safetensors": ("canny",)},
    "upscale_models": {"twice.safetensors": ("twice",)},
}


class FakeBackend:
    """One cluster. `inputs` are uploaded files by their names, `saved` what was saved, `asked` the requests."""

    def __init__(self, inputs: Mapping[str, bytes] | None = None, class_name: str = "FluxPipeline") -> None:
        self.inputs = dict(inputs or {})
        self.saved: list[tuple[str, str, npt.NDArray[np.uint8]]] = []
        self.asked: list[Any] = []
        self.files_saved: list[bytes] = []
        self.videos: dict[str, tuple[npt.NDArray[np.uint8], float]] = {}
        self.class_name = class_name

    def files(self, folder: Folder) -> Sequence[str]:
        return sorted(FILES.get(folder, ()))

    def models_of(self, folder: Folder, name: str) -> Sequence[str]:
        return FILES.get(folder, {}).get(name, ())

    def facts(self, model: str) -> ModelFacts:
        return ModelFacts("Qwen3ForCausalLM" if model == "writer" else self.class_name)

    async def image(self, request: ImageRequest, report: Report) -> Array:
        raise NotImplementedError

    async def video(self, request: ClipRequest, report: Report) -> npt.NDArray[np.uint8]:
        await asyncio.sleep(0)
        assert (request.output, request.reports_steps) == ("frames", True)
        self.asked.append(request)
        shape = request.num_frames or 0, request.height or 0, request.width or 0, 3
        return np.arange(math.prod(shape), dtype=np.uint32).astype(np.uint8).reshape(shape)

    async def encode(self, model: str, images: Array) -> Array:
        await asyncio.sleep(0)
        number, height, width, channels = images.shape
        if channels != 3 or height % FACTOR or width % FACTOR or images.dtype != np.float32:
            raise InvalidRequest(f"expected RGB with sides of multiples of {FACTOR}, got {images.shape} {images.dtype}")
        squares = images.reshape(number, height // FACTOR, FACTOR, width // FACTOR, FACTOR, 3).mean((2, 4))
        return np.moveaxis(squares, -1, 1)

    async def decode(self, model: str, latents: Array) -> Array:
        await asyncio.sleep(0)
        if latents.ndim != 4 or latents.dtype != np.float32:
            raise InvalidRequest(f"expected latents, got {latents.shape} {latents.dtype}")
        return np.moveaxis(latents, 1, -1)[..., :3].repeat(FACTOR, 1).repeat(FACTOR, 2)

    async def upscale(self, model: str, images: Array) -> Array:
        await asyncio.sleep(0)
        return images.repeat(2, 1).repeat(2, 2)

    async def text(self, model: str, prompt: str, options: Mapping[str, Any], images: Array | None) -> str:
        await asyncio.sleep(0)
        request = as_record(
            ChatRequest, {"model": model, "messages": ({"role": "user", "content": prompt},), **options}
        )
        self.asked.append((request, None if images is None else len(images)))
        return f"<think>of {prompt}</think> {prompt}!"

    async def read_input(self, name: str) -> bytes:
        await asyncio.sleep(0)
        if name not in self.inputs:
            raise InvalidRequest(f"no uploaded file {name!r}; there are {', '.join(self.inputs) or 'none'}")
        return self.inputs[name]

    async def read_video(self, name: str) -> tuple[npt.NDArray[np.uint8], float]:
        await asyncio.sleep(0)
        return self.videos[name]

    async def save_file(self, file: bytes, prefix: str, ending: str) -> SavedFile:
        await asyncio.sleep(0)
        self.files_saved.append(file)
        return SavedFile(f"{prefix}_{len(self.files_saved):05}_.{ending}", "", "output")

    async def save(
        self, images: Sequence[npt.NDArray[np.uint8]], prefix: str, type: Literal["output", "temp"]
    ) -> list[SavedFile]:
        await asyncio.sleep(0)
        assert all(one.dtype == np.uint8 and one.ndim == 3 for one in images)
        first = len(self.saved) + 1
        self.saved += [(type, prefix, one) for one in images]
        return [SavedFile(f"{prefix}_{first + at:05}_.png", "", type) for at in range(len(images))]


class Told:
    """The events of a run, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def executing(self, node: str) -> None:
        self.events.append(("executing", node))

    def progress(self, node: str, value: int, max: int, preview: npt.NDArray[np.uint8] | None) -> None:
        self.events.append(("progress", node, value, max))

    def executed(self, node: str, output: Mapping[str, Any] | None) -> None:
        self.events.append(("executed", node, output))

    @property
    def ran(self) -> list[str]:
        return [event[1] for event in self.events if event[0] == "executing"]


def png_file(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return an image (height, width, 3 or 4) as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def workflow_of(**nodes: tuple[str, Mapping[str, Any]]) -> Workflow:
    """Return a workflow of nodes by their ids: `a=("EmptyImage", {"width": 8}), b=("Invert", {"image": ("a", 0)})`."""
    return Workflow(
        {
            id: Node(
                id,
                kind,
                kind,
                {name: Link(*value) if isinstance(value, tuple) else value for name, value in inputs.items()},
            )
            for id, (kind, inputs) in nodes.items()
        }
    )
