"""The backend of workflows over the ingress's service: its models, its images, and the files of the caller's key."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydantic_core import to_json

from cluster.registry.directory import ModelRecord
from configs.cluster import LimitsConfig
from deployments.ingress.comfy.files import WorkflowFiles
from deployments.ingress.comfy.model_files import ModelFiles
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.uploads import decode_image, decode_video
from deployments.ingress.service.service import Service
from deployments.records import (
    MAX_PARTIAL_IMAGES,
    NO_PROMPT,
    ChatRequest,
    ClipRequest,
    ImageProgress,
    ImageRequest,
    ImageResult,
    as_record,
)
from deployments.records.errors import UnknownFile
from deployments.workflows.backend import Array, Folder, Frames, ModelFacts, Report, SavedFile
from deployments.workflows.records import Workflow
from weights.records.errors import listed

_SAMPLED: Final[tuple[Folder, ...]] = ("checkpoints", "diffusion_models")
_KINDS: Final[Mapping[str, Literal["output", "temp", "input"]]] = {
    " [output]": "output",
    " [temp]": "temp",
    " [input]": "input",
}


class ServiceCatalog:
    """The registered models, as `deployments.workflows.backend.Catalog`: they stay the same during a workflow.

    `solvers` are the configs of solvers, by model.
    """

    def __init__(self, records: Iterable[ModelRecord], solvers: Mapping[str, Mapping[str, Any]]) -> None:
        self.records = {record.id: record for record in records}
        self.solvers = solvers
        self._files = ModelFiles(self.records.values())

    def named_in(self, workflow: Workflow) -> set[str]:
        """Return the models whose noise the workflow may ask about: a text of it names their file."""
        texts = {value for node in workflow.nodes.values() for value in node.inputs.values() if isinstance(value, str)}
        found = {model for folder in _SAMPLED for text in texts for model in self._files.models(folder, text)}
        return found & {record.id for record in self.records.values() if record.kind == "diffusion"}

    def files(self, folder: Folder) -> Sequence[str]:
        return self._files.names(folder)

    def models_of(self, folder: Folder, name: str) -> Sequence[str]:
        return self._files.models(folder, name)

    def facts(self, model: str) -> ModelFacts:
        record = self.records[model]
        return ModelFacts(record.class_name, record.variant, self.solvers.get(model, {}))


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """The files of one key."""

    files: WorkflowFiles
    key: str

    async def read(self, file: SavedFile) -> bytes:
        """Return a file. Raises UnknownFile with the known names where there is none."""
        data = await asyncio.to_thread(self.files.read, self.key, file)
        if data is None:
            name = f"{file.subfolder}/{file.filename}" if file.subfolder else file.filename
            known = listed(await asyncio.to_thread(self.files.names, self.key, file.type))
            raise UnknownFile(f"no {file.type} file {name[:200]!r} is kept for this key (known: {known})", "image")
        return data


class ServiceModels(ServiceCatalog):
    """The models of a cluster that work for a workflow. Errors are ServiceErrors.

    `has_previews`: somebody looks at them.
    """

    def __init__(self, catalog: ServiceCatalog, service: Service, *, has_previews: bool = False) -> None:
        super().__init__(catalog.records.values(), catalog.solvers)
        self._service = service
        self._has_previews = has_previews

    async def image(self, request: ImageRequest, report: Report) -> Array:
        previews = MAX_PARTIAL_IMAGES if self._has_previews and not request.is_of_vae else 0
        asked = request.model_copy(update={"reports_steps": True, "partial_images": previews})
        result: ImageResult | None = None
        async with self._service.generate_stream(asked) as pieces:
            async for piece in pieces:
                if isinstance(piece, ImageProgress):
                    report(piece.step, piece.num_steps, piece.previews[0] if piece.previews else None)
                else:
                    result = piece
        assert result is not None  # it is the last
        return _array_of(result)

    async def video(self, request: ClipRequest, report: Report) -> Frames:
        async def on_progress(progress: ImageProgress) -> None:
            report(progress.step, progress.num_steps)

        result = await self._service.make_clip(await self._service.checked_clip(request, "video"), on_progress)
        assert result.frames is not None  # the request asks for them
        return result.frames

    async def encode(self, model: str, images: Array) -> Array:
        fields: dict[str, Any] = {"pixels": np.ascontiguousarray(images[..., :3], np.float32), "output": "encoded"}
        return _array_of(await self._service.generate(_plain_request(model, fields)))

    async def decode(self, model: str, latents: Array) -> Array:
        fields: dict[str, Any] = {"latents": np.ascontiguousarray(latents, np.float32), "output": "decoded"}
        return _array_of(await self._service.generate(_plain_request(model, fields)))

    async def upscale(self, model: str, images: Array) -> Array:
        found = []
        for image in images:
            request = _plain_request(model, {"init_image": _pixels_of(image)})
            found.append(_array_of(await self._service.generate(request)))
        return np.concatenate(found)

    async def text(self, model: str, prompt: str, options: Mapping[str, Any], images: Array | None) -> str:
        content: Any = prompt if images is None else (*map(_pixels_of, images), prompt)
        message = {"role": "user", "content": content}
        request = as_record(ChatRequest, {"model": model, "messages": (message,), **options})
        return (await self._service.chat(request)).text


class ServiceBackend(ServiceModels):
    """A cluster that works, as `deployments.workflows.backend.Backend`, with the files of a key.

    `texts` are written into PNG files, by their names.
    """

    def __init__(
        self,
        catalog: ServiceCatalog,
        service: Service,
        files: KeyFiles,
        readers: ImageReaders,
        limits: LimitsConfig,
        texts: Mapping[str, Any],
        *,
        has_previews: bool,
    ) -> None:
        super().__init__(catalog, service, has_previews=has_previews)
        self._own = files
        self._readers = readers
        self._limits = limits
        self._texts = texts

    async def read_input(self, name: str) -> bytes:
        """Return an uploaded image, written anew: a process of its own has read the file, which may be hostile."""
        most = self._limits.max_upload_pixels
        image = await self._readers.read(decode_image, await self._own.read(input_file(name)), "image", most)
        return await asyncio.to_thread(png_file, image.with_alpha, {}, level=1)

    async def read_video(self, name: str) -> tuple[Frames, float]:
        """Return the frames of an uploaded video, which a process of its own reads."""
        data = await self._own.read(input_file(name))
        return await self._readers.read(decode_video, data, "file", self._limits)

    async def save_file(self, file: bytes, prefix: str, ending: str) -> SavedFile:
        (saved,) = await asyncio.to_thread(self._own.files.save, self._own.key, prefix, "output", [file], ending)
        return saved

    async def save(
        self, images: Sequence[npt.NDArray[np.uint8]], prefix: str, type: Literal["output", "temp"]
    ) -> list[SavedFile]:
        return await asyncio.to_thread(self._save, images, prefix, type)

    def _save(
        self, images: Sequence[npt.NDArray[np.uint8]], prefix: str, type_: Literal["output", "temp"]
    ) -> list[SavedFile]:
        files = [png_file(image, self._texts) for image in images]
        return self._own.files.save(self._own.key, prefix, type_, files)


def input_file(name: str) -> SavedFile:
    """Return the file that a node means by a name, which may end in its type."""
    kind: Literal["output", "temp", "input"] = "input"
    for ending, type_ in _KINDS.items():
        if name.endswith(ending):
            name, kind = name.removesuffix(ending), type_
    subfolder, _, filename = name.replace("\\", "/").rpartition("/")
    return SavedFile(filename, subfolder, kind)


def png_file(image: npt.NDArray[np.uint8], texts: Mapping[str, Any], level: int = 4) -> bytes:
    """Return an image as a PNG file with texts as JSON, as ComfyUI writes it and reads it again. Blocks."""
    chunks = PngInfo()
    for name, value in texts.items():
        chunks.add_text(name, to_json(value).decode())
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", pnginfo=chunks, compress_level=level)
    return file.getvalue()


def _plain_request(model: str, fields: Mapping[str, Any]) -> ImageRequest:
    return as_record(ImageRequest, {"model": model, "prompt": NO_PROMPT, **fields})


def _array_of(result: ImageResult) -> Array:
    """Return the array of a result, or its images from 0 to 1."""
    if result.array is not None:
        return result.array
    return np.stack(result.images).astype(np.float32) / np.float32(255)


def _pixels_of(image: Array) -> npt.NDArray[np.uint8]:
    return np.clip(np.rint(image[..., :3] * 255), 0, 255).astype(np.uint8)
