"""Server-sent events of an image on its way: OpenAI's partial and completed images, progress on request."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from deployments.ingress.openai.image_bodies import ImagesBody
from deployments.ingress.openai.image_files import ImageDescription, ImageFormat, describe_image, encode_image
from deployments.ingress.responses import Answer, TimesMs, call_aside, event_of, json_text, rounded
from deployments.records import CacheUse, ImageProgress, ImageRequest, ImageResult, SwitchReport
from deployments.services.output_channel import OutputChannel

ImagePieces = OutputChannel[ImageProgress | ImageResult]
Task = Literal["image_generation", "image_edit"]


class ImageOrigin(Answer):
    """The origin of images: model, seed, steps and times. Pipelines know no `seed`, `switch` and step count."""

    model: str
    seed: int | None
    num_inference_steps: int | None
    timings_ms: TimesMs
    switch: SwitchReport | None
    encoder_cache: CacheUse
    warnings: tuple[str, ...]


def origin_of(result: ImageResult) -> dict[str, Any]:
    """Return the members of an `ImageOrigin`."""
    return {
        "model": result.model,
        "seed": result.seed,
        "num_inference_steps": result.num_inference_steps,
        "timings_ms": rounded(result.timings_ms),
        "switch": result.switch,
        "encoder_cache": result.cache,
        "warnings": result.warnings,
    }


class _ImageEvent(Answer):
    """The members that partial and completed images share. Source: OpenAI's API reference, "Image streaming"."""

    type: str
    b64_json: str
    created_at: int
    size: str
    quality: Literal["auto"]
    background: Literal["opaque"]
    output_format: ImageFormat


class _PartialImage(_ImageEvent):
    """An image as the step that it follows expects it at the end."""

    partial_image_index: int
    step: int
    num_steps: int


class _TokenUsage(Answer):
    """OpenAI's token counts. Diffusion models have none: all are 0."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]


class _CompletedImage(ImageOrigin, _ImageEvent):
    """The image itself, and how it was made."""

    usage: _TokenUsage


class _Progress(Answer):
    """The steps that are done. `eta_s` is the time that the others take at the pace so far; None after the first."""

    type: str
    step: int
    num_steps: int
    eta_s: float | None


class ImageEvents:
    """The events of one request, made of the pieces of its stream."""

    def __init__(
        self, task: Task, body: ImagesBody, record: ImageRequest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._task: Final = task
        self._body = body
        self._record = record
        self._clock = clock
        self._first: tuple[int, float] | None = None  # the first step that was reported, and when

    async def events_of(self, pieces: AsyncIterator[ImageProgress | ImageResult]) -> AsyncIterator[str]:
        """Yield the events of all pieces."""
        async for piece in pieces:
            if isinstance(piece, ImageResult):
                yield await self._completed(piece)
                continue
            if self._body.progress:
                yield self._progress(piece)
            if piece.previews and piece.preview_index is not None:
                shared = await self._shared("partial_image", piece.previews[0], None)
                partial = _PartialImage(
                    partial_image_index=piece.preview_index, step=piece.step, num_steps=piece.num_steps, **shared
                )
                yield event_of(json_text(partial), partial.type)

    async def _completed(self, result: ImageResult) -> str:
        shared = await self._shared("completed", result.images[0], describe_image(self._record, result, 0))
        completed = _CompletedImage(
            usage=_TokenUsage(
                input_tokens=0,
                output_tokens=0,
                total_tokens=0,
                input_tokens_details={"image_tokens": 0, "text_tokens": 0},
            ),
            **origin_of(replace(result, warnings=(*result.warnings, *self._body.warnings()))),
            **shared,
        )
        return event_of(json_text(completed), completed.type)

    def _progress(self, piece: ImageProgress) -> str:
        now = self._clock()
        if self._first is None:
            self._first = piece.step, now
        steps, seconds = piece.step - self._first[0], now - self._first[1]
        eta_s = round((piece.num_steps - piece.step) * seconds / steps, 3) if steps else None
        type_ = f"{self._task}.progress"
        progress = _Progress(type=type_, step=piece.step, num_steps=piece.num_steps, eta_s=eta_s)
        return event_of(json_text(progress), type_)

    async def _shared(
        self, kind: str, image: npt.NDArray[np.uint8], description: ImageDescription | None
    ) -> dict[str, Any]:
        body, (height, width, _) = self._body, image.shape
        return {
            "type": f"{self._task}.{kind}",
            "b64_json": await call_aside(image.nbytes, _encoded, image, body, description),
            "created_at": int(time.time()),
            "size": f"{width}x{height}",
            "quality": "auto",
            "background": "opaque",
            "output_format": body.output_format,
        }


def _encoded(image: npt.NDArray[np.uint8], body: ImagesBody, description: ImageDescription | None) -> str:
    file = encode_image(image, body.output_format, compression=body.output_compression, description=description)
    return base64.b64encode(file).decode()
