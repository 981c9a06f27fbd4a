"""Bodies of /v1/videos and /v1/audio/generations, and the records that they become."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field, field_validator

from configs.cluster import LimitsConfig
from deployments.errors import InvalidRequest
from deployments.ingress.openai.client_parts import ClientPart, Seed
from deployments.ingress.openai.image_bodies import IMAGE, Size, from_form
from deployments.ingress.openai.image_uploads import decode_base64_image, decode_image
from deployments.records import MAX_NAMED_IMAGES, ClipOptions, ClipRequest, Name, UserName, VideoOptions, as_record

_REFERENCE: Final = "input_reference"
_FIRST_IMAGE: Final = "image"  # the parameter of diffusers' classes for it


class ReferenceBody(ClientPart):
    """An image by OpenAI's form. It is in the request: nothing is fetched."""

    image_url: str = Field(description="a data URL of a PNG, JPEG or WebP file")


class VideoBody(VideoOptions, ClientPart):
    """OpenAI's request for a video and more. In a form, `extra` and `scheduler_options` are JSON.

    `input_reference` is the image that the video begins with or follows, a file in a form.
    """

    seed: Seed = None
    size: Size = "auto"
    input_reference: str | ReferenceBody | None = Field(None, description=IMAGE)
    images: dict[Name, str] = Field(
        {}, max_length=MAX_NAMED_IMAGES, description=f"further images by the names of the class's parameters: {IMAGE}"
    )
    user: UserName | None = None

    @field_validator("extra", "scheduler_options", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        return from_form(value)

    def to_record(self, files: dict[str, list[bytes]], limits: LimitsConfig) -> ClipRequest:
        """Return the request with the files of its form. Blocks: it decodes images. Raises InvalidRequest."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in VideoOptions.model_fields}
        if self.size != "auto":
            if self.width or self.height:
                raise InvalidRequest("size: give either size, or width and height", "size")
            width, _, height = self.size.partition("x")
            fields |= {"width": int(width), "height": int(height)}
        given = dict(self.images)
        reference = self.input_reference
        if isinstance(reference, ReferenceBody):
            reference = reference.image_url
        if reference is not None:
            given = {_FIRST_IMAGE: reference} | given
        bounds = limits.max_pixels, limits.max_upload_pixels
        for text in given.values():
            if text.startswith(("http:", "https:")):
                raise InvalidRequest(f"{_REFERENCE}: an address, which is not fetched; send the image", _REFERENCE)
        images = {name: decode_base64_image(text, f"images.{name}", *bounds).pixels for name, text in given.items()}
        for name, contents in files.items():
            if len(contents) > 1:
                raise InvalidRequest(f"{name}: {len(contents)} files given, expected one", name)
            images[_FIRST_IMAGE if name == _REFERENCE else name] = decode_image(contents[0], name, *bounds).pixels
        return as_record(ClipRequest, fields | {"images": images, "reports_steps": True})


class AudioBody(ClipOptions, ClientPart):
    """A request for audio: music and sounds by a prompt."""

    seed: Seed = None
    user: UserName | None = None

    def to_record(self) -> ClipRequest:
        """Return the request as the service takes it."""
        return as_record(ClipRequest, {name: getattr(self, name) for name in ClipOptions.model_fields})
