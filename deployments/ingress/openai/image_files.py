"""Image files of answers: format, compression, and how the image was made, written into the file itself."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from deployments.records import ImageRequest, ImageResult

ImageFormat = Literal["png", "jpeg", "webp"]
_SOFTWARE: Final = "Atelier"
SAMPLER_NAMES: Final = {  # the WebUI's names of diffusers' classes
    "DDIMScheduler": "DDIM",
    "DDPMScheduler": "DDPM",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
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


@dataclass(frozen=True, slots=True)
class ImageDescription:
    """The making of an image: as facts by name, and as the text of the Stable Diffusion WebUI."""

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
    """Return how image `index` of a result was made: what one needs to make it again."""
    return ImageDescription(_facts_of(request, result, index), _parameters_of(request, result, index))


def _facts_of(request: ImageRequest, result: ImageResult, index: int) -> dict[str, Any]:
    height, width, _ = result.images[index].shape
    description: dict[str, Any] = {"model": result.model, "size": f"{width}x{height}", "index": index}
    if result.seed is not None:
        description |= {"seed": result.seed, "num_inference_steps": result.num_inference_steps}
    if request.scheduler is not None:
        description["scheduler"] = request.scheduler
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
        description |= {} if request.strength is None else {"strength": request.strength}
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
