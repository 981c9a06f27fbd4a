"""Enlarging as the Stable Diffusion WebUI does it: `extra-single-image`, and the second pass of `enable_hr`.

Source: AUTOMATIC1111/stable-diffusion-webui, `modules/upscaler.py`, `scripts/postprocessing_upscale.py` and
`modules/processing.py`: a network runs until the image is as large as asked for, three times at most, and Lanczos'
filter does the rest.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from configs.cluster import LimitsConfig
from deployments.engines.diffusion.input_images import resize_pixels
from deployments.errors import InvalidRequest
from deployments.ingress.openai.image_uploads import decode_base64_within
from deployments.ingress.service import Service
from deployments.records import NO_PROMPT, Count, ImageRequest, RequestModel

LANCZOS: Final = "Lanczos"
NONE: Final = "None"
_LATENT: Final = "Latent"
_MAX_PASSES: Final = 3
_SIDE_MULTIPLE: Final = 8  # of the second pass's sides
Pixels = npt.NDArray[np.uint8]


class Size(NamedTuple):
    """Width and height, in pixels."""

    width: int
    height: int


class SecondPass(NamedTuple):
    """The second pass of `enable_hr`. A size of 0 is `scale` times that of the first; steps of None are those of it."""

    upscaler: str
    scale: float
    width: int
    height: int
    steps: int | None
    strength: float

    def size_after(self, first: Pixels) -> Size:
        """Return the size of the second pass."""
        height, width = first.shape[:2]
        scale = self.scale
        if self.width or self.height:
            scale = max(self.width / width, self.height / height)
        sides = [self.width or int(width * scale), self.height or int(height * scale)]
        return Size(*(max(_SIDE_MULTIPLE, side // _SIDE_MULTIPLE * _SIDE_MULTIPLE) for side in sides))


class ExtraImageBody(RequestModel, extra="ignore"):
    """A request to enlarge an image. There are no face restorers, and no second upscaler beside the first."""

    image: str = Field(min_length=1, description="a file in base64, or a data URL of one")
    resize_mode: int = Field(0, ge=0, le=1, description="0: by a factor; 1: to a size")
    upscaling_resize: float = Field(2.0, gt=0, le=16, allow_inf_nan=False)
    upscaling_resize_w: Count = 512
    upscaling_resize_h: Count = 512
    upscaling_crop: bool = True
    upscaler_1: str = NONE
    extras_upscaler_2_visibility: float = 0
    gfpgan_visibility: float = 0
    codeformer_visibility: float = 0

    def pixels(self, limits: LimitsConfig) -> Pixels:
        """Return the image. Blocks, in a decoder process. Raises InvalidRequest."""
        for name in ("extras_upscaler_2_visibility", "gfpgan_visibility", "codeformer_visibility"):
            if getattr(self, name):
                raise InvalidRequest(f"{name}: there is only upscaler_1 here", name)
        return decode_base64_within(self.image, "image", limits).pixels

    def size_of(self, image: Pixels) -> Size:
        """Return the size that the image gets, before it is cut."""
        height, width = image.shape[:2]
        scale = self.upscaling_resize
        if self.resize_mode == 1:
            scale = max(self.upscaling_resize_w / width, self.upscaling_resize_h / height)
        return Size(max(1, round(width * scale)), max(1, round(height * scale)))

    def cut(self, image: Pixels) -> Pixels:
        """Return the middle of an image that is larger than the size that is asked for."""
        if self.resize_mode == 0 or not self.upscaling_crop:
            return image
        top = max(0, (image.shape[0] - self.upscaling_resize_h) // 2)
        left = max(0, (image.shape[1] - self.upscaling_resize_w) // 2)
        return image[top : top + self.upscaling_resize_h, left : left + self.upscaling_resize_w]


async def upscalers(service: Service) -> list[str]:
    """Return the names that `upscaler_1` and `hr_upscaler` may have."""
    networks = [card.id for card in await service.models() if card.kind == "upscaler"]
    return [NONE, LANCZOS, *networks]


async def resized(service: Service, image: Pixels, upscaler: str, size: Size, limits: LimitsConfig) -> Pixels:
    """Return an image in another size, by a network where it is to be larger. Raises the ServiceErrors.

    The WebUI's ways to enlarge latents ("Latent", "Latent (bicubic)") enlarge the image by Lanczos' filter here.
    """
    known = await upscalers(service)
    if upscaler.startswith(_LATENT):
        upscaler = LANCZOS
    if upscaler not in known:
        raise InvalidRequest(f"upscaler: no upscaler {upscaler!r:.80} (known: {', '.join(known)})", "upscaler")
    if size.width * size.height > limits.max_upload_pixels:
        text = f"{size.width}x{size.height} pixels, at most {limits.max_upload_pixels} are allowed"
        raise InvalidRequest(f"size: {text}", "upscaling_resize")
    if upscaler not in (NONE, LANCZOS):
        image = await _enlarged(service, image, upscaler, size)
    if image.shape[:2] == (size.height, size.width):
        return image
    return await asyncio.to_thread(resize_pixels, image, size)


async def _enlarged(service: Service, image: Pixels, upscaler: str, size: Size) -> Pixels:
    for _ in range(_MAX_PASSES):
        if image.shape[0] >= size.height and image.shape[1] >= size.width:
            break
        fields: dict[str, Any] = {"model": upscaler, "prompt": NO_PROMPT, "init_image": image}
        larger = (await service.generate(ImageRequest(**fields))).images[0]
        if larger.shape == image.shape:  # of scale 1
            return larger
        image = larger
    return image
