"""ComfyUI's routes: workflows, their queue and history, their files, and what there is.

Source: comfyanonymous/ComfyUI, `server.py` and `execution.py`. Its server has one user, one card and one queue. Here
every key has its own queue, history and files, and prompts run at the same time.
"""

from __future__ import annotations

import asyncio
import io
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import numpy as np
import psutil
from fastapi import APIRouter, Query, Request
from PIL import Image
from pydantic_core import from_json
from starlette.responses import Response

from cluster.admission.fair_slots import FairSlots
from cluster.jobs.records import Job
from configs.cluster import ClusterConfig, LimitsConfig
from deployments.ingress.access.callers import current_key, current_tenant
from deployments.ingress.comfy.backend import KeyFiles, ServiceBackend, ServiceCatalog, png_file
from deployments.ingress.comfy.bodies import (
    ChangeBody,
    ComfyError,
    InterruptBody,
    PromptBody,
    PromptTaken,
    node_errors,
    workflow_error_response,
)
from deployments.ingress.comfy.descriptions import describe_kind
from deployments.ingress.comfy.files import FileType, WorkflowFiles
from deployments.ingress.comfy.model_files import ALIASES, FOLDERS
from deployments.ingress.comfy.prompts import MAX_LISTED, Prompts, prompt_id_of
from deployments.ingress.comfy.registered import catalog_for
from deployments.ingress.comfy.runs import PromptRun
from deployments.ingress.comfy.watching import Watches
from deployments.ingress.messages.bodies import AnyTypeRoute, body_bytes
from deployments.ingress.messages.responses import (
    call_aside,
    documented_as,
    json_response,
    status_of,
)
from deployments.ingress.messages.running_job import RunningJob, current_job
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.uploads import DecodedImage, decode_image, decode_named, read_named_form
from deployments.ingress.service.service import Service
from deployments.records.errors import InvalidRequest
from deployments.workflows.backend import SavedFile
from deployments.workflows.checking import Checked, check
from deployments.workflows.reading import read_workflow
from deployments.workflows.records import Workflow, WorkflowError
from deployments.workflows.running import NodeFailed, run
from deployments.workflows.table import KINDS

VERSION: Final = "0.3.64"  # of ComfyUI, whose protocol this is
_ERRORS: Final = documented_as(ComfyError, 400, 403, 404, 408, 409, 413, 429, 500, 503, 504)
# At the paths without /api, other servers' clients are answered while `http.compat.vllm` is on.
_BELOW_API: Final[Mapping[str, Any]] = MappingProxyType({"response_model": None, "include_in_schema": False})
_TEXTS: Final = "extra_pnginfo"
_FORMATS: Final = {
    **{b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp"},
    b"\x1aE\xdf\xa3": "video/webm",
}
_MP4: Final = b"ftyp"  # behind a length
_MAX_NAME: Final = 512
_QUALITY: Final = 90
Preview = Annotated[str | None, Query(max_length=32, description="webp or jpeg, and a quality: webp;90")]


@dataclass(frozen=True, slots=True)
class ComfyParts:
    """The parts that the routes share."""

    service: Service
    config: ClusterConfig
    prompts: Prompts
    watches: Watches
    files: WorkflowFiles
    readers: ImageReaders
    slots: FairSlots

    @property
    def limits(self) -> LimitsConfig:
        """The limits of one request."""
        return self.config.ingress.limits

    async def catalog(self, workflow: Workflow | None = None) -> ServiceCatalog:
        """Return the registered models, with all that a workflow asks about them. Raises ModelUnavailable."""
        return await catalog_for(self.service, workflow)

    def own_files(self) -> KeyFiles:
        """Return the files of the current task's key."""
        return KeyFiles(self.files, current_key())


def create_comfy_router(parts: ComfyParts) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["comfyui"], route_class=AnyTypeRoute)
    _add_prompt_routes(router, parts)
    _add_queue_routes(router, parts.prompts)
    _add_description_routes(router, parts)
    return router


def create_comfy_files_router(parts: ComfyParts) -> APIRouter:
    """Return the routes of files, whose bodies are forms."""
    router = APIRouter(tags=["comfyui"])
    _add_view_route(router, parts)
    _add_upload_routes(router, parts)
    return router


def _add_prompt_routes(router: APIRouter, parts: ComfyParts) -> None:
    prompts = parts.prompts

    @router.post("/prompt", response_model=None, responses=_ERRORS)
    async def begin(body: PromptBody, request: Request) -> Response:
        """Run a workflow: its outputs are in the history once it has ended."""
        workflow: Workflow | None = None
        try:
            workflow = await call_aside(body_bytes.get(), _read, body)
            catalog = await parts.catalog(workflow)
            checked = await asyncio.to_thread(check, workflow, catalog, body.partial_execution_targets)
        except WorkflowError as error:
            return workflow_error_response(error, workflow)
        if not checked.outputs:
            return workflow_error_response(_without_outputs(checked), workflow)
        if (job := current_job.get()) is not None:
            return await _ran(parts, body, workflow, catalog, checked, job)
        kept = await prompts.add(request, body, checked.outputs)
        parts.watches.begun(kept)
        errors = node_errors(checked.errors, workflow)
        return json_response(PromptTaken(prompt_id=prompt_id_of(kept), number=kept.number, node_errors=errors))

    @router.get("/prompt", response_model=None, responses=_ERRORS)
    async def left() -> Response:
        """The number of prompts that have not ended."""
        num_left = sum(not job.has_ended for job in await prompts.newest())
        return json_response({"exec_info": {"queue_remaining": num_left}})


def _read(body: PromptBody) -> Workflow:
    if body.prompt is None:
        raise WorkflowError("No prompt provided", "no_prompt")
    return read_workflow(body.prompt)


def _without_outputs(checked: Checked) -> WorkflowError:
    return WorkflowError("Prompt outputs failed validation", "prompt_outputs_failed_validation", checked.errors)


async def _ran(
    parts: ComfyParts,
    body: PromptBody,
    workflow: Workflow,
    catalog: ServiceCatalog,
    checked: Checked,
    job: RunningJob,
) -> Response:
    """Run a workflow, and return its history as the answer of its job."""
    told = PromptRun(body, current_key(), workflow, parts.watches, job)
    texts = {"prompt": body.prompt, **_texts_of(body.extra_data)}
    backend = ServiceBackend(
        catalog, parts.service, parts.own_files(), parts.readers, parts.limits, texts, has_previews=told.wants_previews
    )
    status = 200
    await parts.slots.acquire(current_tenant.get())
    try:
        told.begin()
        history = told.succeed(await run(workflow, backend, told, checked.outputs))
    except NodeFailed as failed:
        cause = failed.__cause__
        status = status_of(cause) if isinstance(cause, Exception) else 500
        if status in (429, 503) and cause is not None:  # the job is begun again
            raise cause from None
        history = told.fail(failed.error)
        history["error"] = {"type": failed.error.type, "message": str(failed)}
    except asyncio.CancelledError:
        told.interrupt()
        raise
    finally:
        parts.slots.release()
    return json_response({"prompt": body.prompt, "extra_data": body.extra_data, **history}, status)


def _texts_of(extra_data: dict[str, Any]) -> dict[str, Any]:
    """Return the texts that a client wants in PNG files, by name."""
    found = extra_data.get(_TEXTS)
    return {str(name)[:79]: value for name, value in found.items()} if isinstance(found, dict) else {}


def _add_queue_routes(router: APIRouter, prompts: Prompts) -> None:
    @router.get("/queue", response_model=None, responses=_ERRORS)
    async def queue() -> Response:
        """The prompts that run and that wait."""
        running, waiting = await prompts.queued("running"), await prompts.queued("queued")
        return json_response({"queue_running": running, "queue_pending": waiting})

    @router.post("/queue", response_class=Response, response_model=None, responses=_ERRORS)
    async def change_queue(body: ChangeBody) -> Response:
        """Take waiting prompts out of the queue."""
        while body.clear and (waiting := await prompts.of("queued")):
            await _forget(prompts, waiting)
        named = await _found(prompts, body.delete)
        await _forget(prompts, [job for job in named if job.status == "queued"])
        return Response()

    @router.get("/history", response_model=None, responses=_ERRORS)
    async def history(
        max_items: Annotated[int, Query(ge=1)] = MAX_LISTED, offset: Annotated[int, Query(ge=-1, le=10**6)] = -1
    ) -> Response:
        """The prompts that have ended, the oldest first."""
        return json_response(await prompts.entries(await prompts.ended(min(max_items, MAX_LISTED), offset)))

    @router.post("/history", response_class=Response, response_model=None, responses=_ERRORS)
    async def change_history(body: ChangeBody) -> Response:
        """Forget prompts that have ended. Their files stay for their time."""
        while body.clear and (ended := await prompts.ended(MAX_LISTED, -1)):
            await _forget(prompts, ended)
        await _forget(prompts, [job for job in await _found(prompts, body.delete) if job.has_ended])
        return Response()

    @router.get("/history/{prompt_id}", response_model=None, responses=_ERRORS)
    async def of_one(prompt_id: str) -> Response:
        """A prompt that has ended; an empty object before."""
        job = await prompts.find(prompt_id)
        return json_response(await prompts.entries([job]) if job is not None and job.has_ended else {})

    @router.post("/interrupt", response_class=Response, response_model=None, responses=_ERRORS)
    async def interrupt(body: InterruptBody | None = None) -> Response:
        """End a running prompt, or all that run."""
        if body is not None and body.prompt_id is not None:
            found = await _found(prompts, [body.prompt_id])
        else:
            found = await prompts.of("running")
        for job in found:
            if job.status == "running":
                await prompts.desk.cancel(job.id)
        return Response()

    @router.post("/free", response_class=Response, response_model=None, responses=_ERRORS)
    async def free() -> Response:
        """Nothing: a cluster frees memory by itself, and other callers use it."""
        return Response()


async def _forget(prompts: Prompts, jobs: Sequence[Job]) -> None:
    for job in jobs:
        await prompts.desk.forget(job.id)


async def _found(prompts: Prompts, ids: Sequence[str]) -> list[Job]:
    return [job for id_ in ids if (job := await prompts.find(id_)) is not None]


def _add_view_route(router: APIRouter, parts: ComfyParts) -> None:
    @router.get("/view", response_model=None, responses=_ERRORS)
    async def view(
        filename: Annotated[str, Query(max_length=_MAX_NAME)],
        subfolder: Annotated[str, Query(max_length=_MAX_NAME)] = "",
        type: Literal["output", "input", "temp"] = "output",
        preview: Preview = None,
        channel: Literal["rgba", "rgb", "a"] = "rgba",
    ) -> Response:
        """A file of this key, as it is, smaller, or a part of its channels."""
        data = await _kept(parts, SavedFile(filename, subfolder, type))
        if preview is not None or channel != "rgba":
            image = await _decoded(parts, data)
            content, media_type = await asyncio.to_thread(_shown, image, preview, channel)
        else:
            content, media_type = data, _media_type(data)
        quoted = filename.encode("ascii", "replace").decode().replace('"', "'")
        headers = {"Content-Disposition": f'filename="{quoted}"', "X-Content-Type-Options": "nosniff"}
        return Response(content, media_type=media_type, headers=headers)


async def _kept(parts: ComfyParts, file: SavedFile) -> bytes:
    return await parts.own_files().read(file)


async def _decoded(parts: ComfyParts, data: bytes) -> DecodedImage:
    return await parts.readers.read(decode_image, data, "image", parts.limits.max_upload_pixels)


def _media_type(data: bytes) -> str:
    if data[4:8] == _MP4:
        return "video/mp4"
    return next((type_ for begin, type_ in _FORMATS.items() if data.startswith(begin)), "application/octet-stream")


def _shown(image: DecodedImage, preview: str | None, channel: str) -> tuple[bytes, str]:
    """Return an image as another file. Blocks."""
    name, _, given = (preview or "png").partition(";")
    format_ = name if name in ("png", "jpeg") else "webp"
    quality = min(100, int(given)) if given.isascii() and given.isdigit() and len(given) < 4 else _QUALITY
    shown = Image.fromarray(image.pixels if channel == "rgb" or format_ == "jpeg" else image.with_alpha)
    if channel == "a":
        alpha = shown.getchannel("A") if shown.mode == "RGBA" else Image.new("L", shown.size, 255)
        shown, format_ = Image.new("RGBA", shown.size), "png"
        shown.putalpha(alpha)
    file = io.BytesIO()
    shown.save(file, format_.upper(), **({} if format_ == "png" else {"quality": quality}))
    return file.getvalue(), f"image/{format_}"


def _add_upload_routes(router: APIRouter, parts: ComfyParts) -> None:
    @router.post("/upload/image", response_model=None, responses=_ERRORS)
    async def upload(request: Request) -> Response:
        """Keep an image, or a video, for the workflows of this key."""
        name, data, fields = await _uploaded(parts, request)
        # Or it is refused here, and not in each workflow.
        await parts.readers.read(decode_named, {"image": data}, parts.limits)
        return await _keep(parts, name, data, fields)

    @router.post("/upload/mask", response_model=None, responses=_ERRORS)
    async def upload_mask(request: Request) -> Response:
        """Keep an image that is kept already, with the transparency of this one."""
        name, data, fields = await _uploaded(parts, request)
        try:
            named = from_json(str(fields.get("original_ref", "")))
        except ValueError:
            named = None
        if not isinstance(named, dict) or not isinstance(named.get("filename"), str):
            raise InvalidRequest("original_ref: expected JSON with the filename of the image", "original_ref")
        of = SavedFile(named["filename"], str(named.get("subfolder") or ""), _type_of(named.get("type") or "output"))
        original = await _decoded(parts, await _kept(parts, of))
        mask = await _decoded(parts, data)
        return await _keep(parts, name, await asyncio.to_thread(_with_alpha, original, mask), fields)


async def _uploaded(parts: ComfyParts, request: Request) -> tuple[str, bytes, dict[str, Any]]:
    """Return the name and the content of the uploaded image, and the other fields of the form."""
    fields, files, names = await read_named_form(request, parts.limits.max_upload_bytes)
    images = files.get("image", [])
    if len(images) != 1:
        raise InvalidRequest(f"image: {len(images)} files came, expected one", "image")
    return names["image"][0] or "image.png", images[0], fields


async def _keep(parts: ComfyParts, name: str, data: bytes, fields: dict[str, Any]) -> Response:
    overwrite = str(fields.get("overwrite", "")).lower() in ("true", "1")
    name = name.replace("\\", "/").rpartition("/")[2]
    wanted = SavedFile(name, str(fields.get("subfolder", "")), _type_of(fields.get("type", "input")))
    kept = await asyncio.to_thread(_upload, parts.files, current_key(), wanted, data, overwrite)
    return json_response({"name": kept.filename, "subfolder": kept.subfolder, "type": kept.type})


def _upload(files: WorkflowFiles, key: str, wanted: SavedFile, data: bytes, overwrite: bool) -> SavedFile:
    return files.upload(key, wanted, data, overwrite=overwrite)


def _type_of(name: Any) -> FileType:
    if name not in ("input", "output", "temp"):
        raise InvalidRequest(f"type: no files of type {str(name)[:40]!r} (known: input, output, temp)", "type")
    return name


def _with_alpha(original: DecodedImage, mask: DecodedImage) -> bytes:
    """Return an image with the transparency of another one as a PNG file. Blocks."""
    alpha = Image.fromarray(mask.alpha if mask.alpha is not None else np.full(mask.pixels.shape[:2], 255, np.uint8))
    if alpha.size != original.size:
        alpha = alpha.resize(original.size)
    pixels = np.dstack([original.pixels, np.asarray(alpha)])
    return png_file(pixels, {})


def _add_description_routes(router: APIRouter, parts: ComfyParts) -> None:
    async def uploads() -> list[str]:
        return await asyncio.to_thread(parts.files.names, current_key(), "input")

    @router.get("/object_info", response_model=None, responses=_ERRORS)
    async def object_info() -> Response:
        """All kinds of nodes."""
        catalog, names = await parts.catalog(), await uploads()
        described = {name: describe_kind(kind, catalog, names) for name, kind in KINDS.items()}
        return json_response(described)

    @router.get("/object_info/{kind}", response_model=None, responses=_ERRORS)
    async def one_kind(kind: str) -> Response:
        """A kind of nodes; an empty object for an unknown one."""
        known = KINDS.get(kind)
        described = {} if known is None else {kind: describe_kind(known, await parts.catalog(), await uploads())}
        return json_response(described)

    @router.get("/embeddings", **_BELOW_API)
    async def embeddings() -> Response:
        """The names of textual inversions."""
        names = (await parts.catalog()).files("embeddings")
        return json_response([name for name in names if "." not in name] or list(names))

    @router.get("/models", **_BELOW_API)
    async def folders() -> Response:
        """The folders of models."""
        return json_response(list(FOLDERS))

    @router.get("/models/{folder}", **_BELOW_API)
    async def in_folder(folder: str) -> Response:
        """The names of the models in a folder."""
        known = next((one for one in FOLDERS if one == folder), ALIASES.get(folder))
        if known is None:
            raise InvalidRequest(f"folder: no folder {folder[:80]!r} (known: {', '.join(FOLDERS)})", "folder")
        return json_response(list((await parts.catalog()).files(known)))

    @router.get("/features", response_model=None, responses=_ERRORS)
    async def features() -> Response:
        """The features of this server beyond the first version of the protocol."""
        return json_response(features_of(parts.limits))

    @router.get("/system_stats", response_model=None, responses=_ERRORS)
    async def stats() -> Response:
        """The machine of this ingress, and the devices of the workers with what models may take of them."""
        return json_response({"system": _system(), "devices": _devices(parts.config)})


def features_of(limits: LimitsConfig) -> dict[str, Any]:
    """Return the features of this server."""
    return {"supports_preview_metadata": True, "max_upload_size": limits.max_upload_bytes}


def _system() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "os": platform.system().lower(),
        "ram_total": memory.total,
        "ram_free": memory.available,
        "comfyui_version": VERSION,
        "python_version": platform.python_version(),
        "pytorch_version": "",
        "embedded_python": False,
        "argv": ["atelier"],
    }


def _devices(config: ClusterConfig) -> list[dict[str, Any]]:
    """Return the devices. What is free is what a model may have: others make room for it."""
    worker = config.worker
    kind, _, index = worker.device.partition(":")
    budget = worker.device_budget_bytes or worker.resident_bytes
    numbers = {"vram_total": budget, "vram_free": budget, "torch_vram_total": budget, "torch_vram_free": budget}
    name = f"{worker.device}: {worker.num_replicas} workers"
    return [{"name": name, "type": kind, "index": int(index or 0), **numbers}]
