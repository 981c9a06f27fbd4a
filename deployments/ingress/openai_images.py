"""POST /v1/images/generations: OpenAI's fields and the ones that diffusion users need."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from PIL import Image
from pydantic import field_validator

from deployments.errors import InvalidRequest
from deployments.ingress.api_docs import INFERENCE_ERRORS, documented
from deployments.ingress.openai_answers import ImagesAnswer
from deployments.ingress.service import Service
from deployments.ingress.timing import rounded, server_timing
from deployments.records import ImageOptions, ImageRequest, ImageResult, as_record

ImageFormat = Literal["png", "jpeg", "webp"]


class ImagesBody(ImageOptions):
    """OpenAI's images request and more: `size` is "WIDTHxHEIGHT" or "auto"; `width` and `height` do as well."""

    size: str = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    output_format: ImageFormat = "png"
    quality: Literal["auto", "standard"] = "auto"
    user: str | None = None

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
    async def generate(body: ImagesBody) -> JSONResponse:
        """Make pictures from a prompt."""
        result = await service.generate(body.record())
        data = await asyncio.gather(
            *(asyncio.to_thread(encode_image, image, body.output_format) for image in result.images)
        )
        answer = _answer(result, [base64.b64encode(image).decode() for image in data], body.output_format)
        return JSONResponse(answer, headers=server_timing(result.timings_ms))

    return router


def encode_image(image: npt.NDArray[np.uint8], format_: ImageFormat) -> bytes:
    """(height, width, 3) uint8 as a file of that format."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format_.upper())
    return buffer.getvalue()


def _answer(result: ImageResult, images: list[str], format_: str) -> dict[str, Any]:
    return {
        "created": int(time.time()),
        "data": [{"b64_json": image} for image in images],
        "output_format": format_,
        "model": result.model,
        "seed": result.seed,
        "num_inference_steps": result.num_inference_steps,
        "timings_ms": rounded(result.timings_ms),
        "switch": result.switch and {name: getattr(result.switch, name) for name in result.switch.__slots__},
        "encoder_cache": {"hits": result.cache.hits, "misses": result.cache.misses},
        "warnings": result.warnings,
    }
