"""POST /v1/images/generations: OpenAI's fields and the ones that diffusion users need."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from PIL import Image
from pydantic import field_validator
from pydantic_core import to_json
from starlette.responses import Response

from deployments.errors import InvalidRequest
from deployments.ingress.api_docs import INFERENCE_ERRORS, documented
from deployments.ingress.json_answers import json_answer, with_list
from deployments.ingress.openai.answers import ImagesAnswer
from deployments.ingress.service import Service
from deployments.ingress.timing import rounded, server_timing
from deployments.records import ImageOptions, ImageRequest, ImageResult, UserName, as_record

ImageFormat = Literal["png", "jpeg", "webp"]


class ImagesBody(ImageOptions):
    """OpenAI's images request and more: `size` is "WIDTHxHEIGHT" or "auto"; `width` and `height` do as well."""

    size: str = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    output_format: ImageFormat = "png"
    quality: Literal["auto", "standard"] = "auto"
    user: UserName | None = None

    @field_validator("size")
    @classmethod
    def _is_a_size(cls, size: str) -> str:
        width, _, height = size.partition("x")
        if size != "auto" and not (width.isascii() and width.isdigit() and height.isascii() and height.isdigit()):
            raise ValueError('expected "WIDTHxHEIGHT" in pixels, such as "1024x1024", or "auto"')
        if len(size) > 16 or (size != "auto" and 0 in (int(width), int(height))):
            raise ValueError("out of range")
        return size

    def record(self) -> ImageRequest:
        fields = {name: getattr(self, name) for name in ImageOptions.model_fields}
        if self.size != "auto":
            if self.width or self.height:
                raise InvalidRequest("size: give either size, or width and height", "size")
            width, _, height = self.size.partition("x")
            fields |= {"width": int(width), "height": int(height)}
        return as_record(ImageRequest, fields)


def create_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["images"])

    @router.post("/v1/images/generations", response_model=ImagesAnswer, responses=documented(*INFERENCE_ERRORS))
    async def generate(body: ImagesBody) -> Response:
        """Make pictures from a prompt."""
        result = await service.generate(body.record())
        images = await asyncio.gather(
            *(asyncio.to_thread(_image_json, image, body.output_format) for image in result.images)
        )
        write = partial(with_list, _form(result, body.output_format), "data", images)
        return await json_answer(sum(map(len, images)), write, server_timing(result.timings_ms))

    return router


def encode_image(image: npt.NDArray[np.uint8], format_: ImageFormat) -> bytes:
    """(height, width, 3) uint8 as a file of that format."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format_.upper())
    return buffer.getvalue()


def _image_json(image: npt.NDArray[np.uint8], format_: ImageFormat) -> bytes:
    return to_json({"b64_json": base64.b64encode(encode_image(image, format_)).decode()})


def _form(result: ImageResult, format_: str) -> dict[str, Any]:
    """The answer without its images."""
    return {
        "created": int(time.time()),
        "output_format": format_,
        "model": result.model,
        "seed": result.seed,
        "num_inference_steps": result.num_inference_steps,
        "timings_ms": rounded(result.timings_ms),
        "switch": result.switch and {name: getattr(result.switch, name) for name in result.switch.__slots__},
        "encoder_cache": {"hits": result.cache.hits, "misses": result.cache.misses},
        "warnings": result.warnings,
    }
