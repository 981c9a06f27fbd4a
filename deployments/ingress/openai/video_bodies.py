"""Bodies of /v1/videos and /v1/audio/generations, and the records that they become."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field, field_validator

from configs.cluster import LimitsConfig
from deployments.errors import InvalidRequest
from deployments.ingress.openai.client_parts import ClientPart, Seed
from deployments.ingress.openai.image_bodies import NAMED, NamedFiles, Size, from_form
from deployments.ingress.openai.image_uploads import decode_named
from deployments.records import ClipOptions, ClipRequest, UserName, VideoOptions, as_record

_REFERENCE: Final = "input_reference"
_FIRST_IMAGE, _VIDEO = "image", "video"  # the parameters of diffusers' classes for it
_FILE: Final = "a PNG, JPEG or WebP file, or an MP4 or WebM of a video, in base64, or a data URL of it"


class ReferenceBody(ClientPart):
    """An image or a video by OpenAI's form. It is in the request: nothing is fetched."""

    image_url: str = Field(description="a data URL of a PNG, JPEG or WebP file, or of a video")


class VideoBody(VideoOptions, ClientPart):
    """OpenAI's request for a video and more. In a form, `extra` and `scheduler_options` are JSON.

    `input_reference` is the image that the video begins with or follows, or the video that it is made of: a file in a
    form. It goes to the parameter `image` or `video` of the class.
    """

    seed: Seed = None
    size: Size = "auto"
    input_reference: str | ReferenceBody | None = Field(None, description=_FILE)
    images: NamedFiles = Field({}, description=f"further {NAMED}; a video (MP4 or WebM) goes as an image does")
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
        given: dict[str, Any] = {f"images.{name}": found for name, found in self.images.items()}
        given |= {name: found if len(found) > 1 else found[0] for name, found in files.items()}
        reference = self.input_reference
        reference = reference.image_url if isinstance(reference, ReferenceBody) else reference
        if reference is not None:
            given[_REFERENCE] = reference
        if isinstance(several := given.get(_REFERENCE), list):
            raise InvalidRequest(f"{_REFERENCE}: {len(several)} files given, expected one", _REFERENCE)
        decoded = decode_named(given, limits)
        images = {field.removeprefix("images."): found for field, found in decoded.items() if field != _REFERENCE}
        if (first := decoded.get(_REFERENCE)) is not None:
            images = {_VIDEO if isinstance(first, tuple) else _FIRST_IMAGE: first} | images
        return as_record(ClipRequest, fields | {"images": images, "reports_steps": True})


class AudioBody(ClipOptions, ClientPart):
    """A request for audio: music and sounds by a prompt."""

    seed: Seed = None
    user: UserName | None = None

    def to_record(self) -> ClipRequest:
        """Return the request as the service takes it."""
        return as_record(ClipRequest, {name: getattr(self, name) for name in ClipOptions.model_fields})
