"""Image files of answers: format, compression and the image's description within the file; and links to them.

Links are for `response_format: url`: files in a folder, under names that cannot be guessed, for a while. Its holder
can open it until it expires, without a key, as with any signed link. All ingress replicas that share the folder serve
every link; on several nodes it has to be a shared one.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from configs.cluster import ImageLinksConfig
from configs.options import Denoising, PromptReading, said
from deployments.ingress.messages.responses import Failure, documented, failure_response
from deployments.records import ImageRequest, ImageResult
from deployments.records.errors import Overloaded
from weights.platform.durable import replaced
from weights.platform.private_folder import private_folder, temporary_folder

ImageFormat = Literal["png", "jpeg", "webp"]
_SOFTWARE: Final = "Atelier"
SAMPLER_NAMES: Final = {  # the WebUI's names of diffusers' classes
    "DDIMScheduler": "DDIM",
    "DDPMScheduler": "DDPM",
    "DPMSolver2SAncestralScheduler": "DPM++ 2S a",
    "DPMSolver3MSDEScheduler": "DPM++ 3M SDE",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
    "DPMSolverSDEScheduler": "DPM++ SDE",
    "DPMSolverSinglestepScheduler": "DPM++ 2S",
    "EulerAncestralDiscreteScheduler": "Euler a",
    "EulerDiscreteScheduler": "Euler",
    "HeunDiscreteScheduler": "Heun",
    "KDPM2AncestralDiscreteScheduler": "DPM2 a",
    "KDPM2DiscreteScheduler": "DPM2",
    "LCMScheduler": "LCM",
    "LMSDiscreteScheduler": "LMS",
    "PNDMScheduler": "PLMS",
    "UniPCMultistepScheduler": "UniPC",
}

PATH: Final = "/files/images/"
_NAME: Final = re.compile(r"[0-9a-f]{32}\.(png|jpeg|webp)")  # 128 random bits
_SWEEP_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ImageDescription:
    """The description of an image: facts by name, and the text of the Stable Diffusion WebUI."""

    facts: dict[str, Any]
    parameters: str


def encode_image(
    image: npt.NDArray[np.uint8],
    format_: ImageFormat,
    *,
    compression: int | None = None,
    description: ImageDescription | None = None,
) -> bytes:
    """Return an image, (height, width, 3) uint8, as a file of that format.

    `compression` is the quality of JPEG and WebP, 0 to 100, where 100 makes the largest files: OpenAI's
    `output_compression`. PNG loses nothing and ignores it. `description` is written as JSON: into PNG's text chunk
    `Description` (PNG specification, section 11.3.3), elsewhere into Exif's `ImageDescription` (tag 0x010E). In a PNG,
    the chunk `parameters` has it as the Stable Diffusion WebUI writes it.
    """
    buffer = io.BytesIO()
    options: dict[str, Any] = {}
    if format_ != "png" and compression is not None:
        options["quality"] = compression
    if description is not None:
        options |= _written_description(format_, description)
    Image.fromarray(image).save(buffer, format_.upper(), **options)
    return buffer.getvalue()


def describe_image(request: ImageRequest, result: ImageResult, index: int) -> ImageDescription:
    """Return the description of image `index` of a result: all that is needed to make it again."""
    return ImageDescription(_facts_of(request, result, index), _parameters_of(request, result, index))


def _facts_of(request: ImageRequest, result: ImageResult, index: int) -> dict[str, Any]:
    height, width, _ = result.images[index].shape
    description: dict[str, Any] = {"model": result.model, "size": f"{width}x{height}", "index": index}
    if result.seed is not None:
        description |= {"seed": result.seed, "num_inference_steps": result.num_inference_steps}
    if result.guidance_scale is not None:
        description["guidance_scale"] = result.guidance_scale
    for name, value in (said(request, Denoising) | said(request, PromptReading)).items():
        if name != "strength" or request.init_image is not None:
            description[name] = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
    if request.scheduler_options:
        description["scheduler_options"] = dict(request.scheduler_options)
    if request.lora:
        description["lora"] = [{"name": use.name, "scale": use.scale} for use in request.lora]
    if request.ip_adapter:
        description["ip_adapter"] = [use.model_dump(exclude={"image"}) for use in request.ip_adapter]
    if request.control:
        description["control"] = [use.model_dump(exclude={"image"}) for use in request.control]
    if request.init_image is not None:
        description["task"] = "image-to-image" if request.mask_image is None else "inpainting"
    return description


def _parameters_of(request: ImageRequest, result: ImageResult, index: int) -> str:
    """Return the prompt, LoRAs in it, the negative prompt, and a line of options.

    Source: AUTOMATIC1111/stable-diffusion-webui, `create_infotext` in modules/processing.py.
    """
    height, width, _ = result.images[index].shape
    has_image = request.init_image is not None
    options = {
        "Steps": result.num_inference_steps,
        "Sampler": SAMPLER_NAMES.get(request.scheduler or "", request.scheduler),
        "CFG scale": result.guidance_scale,
        "Seed": result.seed,
        "Variation seed": request.variation.seed if request.variation else None,
        "Variation seed strength": request.variation.strength if request.variation else None,
        "Size": f"{width}x{height}",
        "Model": result.model,
        "Batch size": len(result.images) if index else None,
        "Batch pos": index or None,
        "Clip skip": request.clip_skip + 1 if request.clip_skip else None,  # the WebUI counts from 1
        "Denoising strength": request.strength if has_image else None,
        "Version": _SOFTWARE,
    }
    prompt = " ".join([request.prompt, *(f"<lora:{use.name}:{use.scale:g}>" for use in request.lora)])
    lines = [prompt, f"Negative prompt: {request.negative_prompt}"] if request.negative_prompt else [prompt]
    shown = (f"{name}: {_quoted(value)}" for name, value in options.items() if value is not None)
    return "\n".join([*lines, ", ".join(shown)])


def _quoted(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if set(text) & set(",:\n") else text


def _written_description(format_: ImageFormat, description: ImageDescription) -> dict[str, Any]:
    text = json.dumps(description.facts)
    if format_ == "png":
        chunks = PngInfo()
        chunks.add_text("Software", _SOFTWARE)
        chunks.add_text("Description", text)
        chunks.add_text("parameters", description.parameters)
        return {"pnginfo": chunks}
    exif = Image.Exif()
    exif[ExifTags.Base.Software] = _SOFTWARE
    exif[ExifTags.Base.ImageDescription] = text
    return {"exif": exif}


class ImageLinks:
    """A folder of image files that expire by age and by the folder's size, oldest first. Called in threads."""

    def __init__(self, config: ImageLinksConfig, cluster: str, clock: Callable[[], float] = time.time) -> None:
        self._folder = config.folder or temporary_folder() / f"images-{cluster}"
        self._config = config
        self._clock = clock
        self._next_sweep = 0.0

    def keep_file(self, data: bytes, format_: ImageFormat, server_url: str) -> str:
        """Keep a file, and return its link, below the config's `base_url` or else the client's `server_url`.

        Raises Overloaded when the file cannot be written.
        """
        name = f"{secrets.token_hex(16)}.{format_}"
        try:
            if self._config.folder is None:
                private_folder(self._folder.parent)
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            with replaced(self._folder / name) as staged:
                staged.write_bytes(data)
            self._sweep()
        except OSError as error:
            raise Overloaded(
                f"links to images cannot be made now: {error.strerror or error}; ask for b64_json"
            ) from None
        return (self._config.base_url or server_url).rstrip("/") + PATH + name

    def find(self, name: str) -> tuple[Path, float] | None:
        """Return a file and the remaining seconds of its link; None for an expired or unknown one."""
        if not _NAME.fullmatch(name):
            return None
        path = self._folder / name
        try:
            left_s = path.stat().st_mtime + self._config.ttl_s - self._clock()
        except OSError:
            return None
        return (path, left_s) if left_s > 0 else None

    def _sweep(self) -> None:
        """Remove expired files. HAZARD: other ingress replicas sweep the same folder."""
        now = self._clock()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_EVERY_S
        found = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        left_bytes = sum(nbytes for _, nbytes, _ in found)
        for written, nbytes, path in sorted(found):
            if left_bytes <= self._config.max_bytes and written + self._config.ttl_s > now:
                break
            path.unlink(missing_ok=True)
            left_bytes -= nbytes


def create_links_router(links: ImageLinks) -> APIRouter:
    """Return the route that serves the files."""
    router = APIRouter(tags=["images"])

    @router.get(
        PATH + "{name}", response_class=FileResponse, responses=documented(_404="no such link, or it has ended")
    )
    async def image(name: str, request: Request) -> Response:
        """An image of an answer with `response_format: url`."""
        found = await run_in_threadpool(links.find, name)
        if found is None:
            message = f"{request.url.path[:200]}: no image is here; the links of answers end after a while"
            return failure_response(Failure(404, message, "invalid_request_error", "unknown_url"))
        path, left_s = found
        headers = {"Cache-Control": f"private, max-age={int(left_s)}, immutable", "X-Content-Type-Options": "nosniff"}
        return FileResponse(path, media_type=f"image/{path.suffix[1:]}", headers=headers)

    return router
