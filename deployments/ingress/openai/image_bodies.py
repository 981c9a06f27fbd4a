"""Bodies of /v1/images: OpenAI's fields and those that diffusion users need, and their conversion to records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import from_json

from configs.cluster import LimitsConfig
from deployments.engines.records.input_images import resize_pixels
from deployments.ingress.jobs.routes import BACKGROUND
from deployments.ingress.messages.bodies import ClientPart, Seed
from deployments.ingress.openai.image_files import ImageFormat
from deployments.ingress.openai.uploads import DecodedImage, decode_base64_within, decode_image, decode_named
from deployments.records import (
    MAX_NAMED_IMAGES,
    MAX_PARTIAL_IMAGES,
    NO_PROMPT,
    ControlNetUse,
    ImageOptions,
    ImagePromptUse,
    ImageRequest,
    Name,
    UserName,
    as_record,
)
from deployments.records.errors import InvalidRequest

IMAGE: Final = "a PNG, JPEG or WebP file in base64, or a data URL of one"
NAMED: Final = f"images by the names of the class's parameters, a list where it takes several: {IMAGE}"
_Files = str | Annotated[list[str], Field(min_length=1)]
NamedFiles = Annotated[dict[Name, _Files], Field(max_length=MAX_NAMED_IMAGES)]
_MAX_FORM_VALUES: Final = 4096  # lists, objects and their items in a field of a form
_Word = Annotated[str, Field(max_length=64)]
_WITHOUT_EFFECT: Final = {  # with the values that ask for nothing
    "background": ("auto", "opaque", True, False, "true", "false"),
    "quality": ("auto", "standard"),
    "style": ("auto",),
    "input_fidelity": ("auto",),
}
_RESUMABLE: Final = (
    "a stream whose image is made on when its connection breaks, for a minute or as the server is configured. Its "
    "events have ids (ask for `progress` to have one after every step): the same request with the header "
    "`Last-Event-ID`, or a GET of the answer's `Content-Location`, gets the events after that one, and no image is "
    "made twice. A DELETE there ends it. Without this, a stream ends with its connection"
)


def _is_a_size(size: str) -> str:
    width, _, height = size.partition("x")
    if size != "auto" and not (width.isascii() and width.isdigit() and height.isascii() and height.isdigit()):
        raise ValueError('expected "WIDTHxHEIGHT" in pixels, such as "1024x1024", or "auto"')
    if len(size) > 16 or (size != "auto" and 0 in (int(width), int(height))):
        raise ValueError("out of range")
    return size


Size = Annotated[str, AfterValidator(_is_a_size)]


def sides_of(body: Any) -> dict[str, int]:
    """Return `width` and `height` of a body with a `size`. Raises InvalidRequest for one that has both."""
    if body.size == "auto":
        return {}
    if body.width or body.height:
        raise InvalidRequest("size: give either size, or width and height", "size")
    width, _, height = body.size.partition("x")
    return {"width": int(width), "height": int(height)}


def from_form(value: object) -> object:
    """Return the value of a form's JSON field; a value that is no text stays as it is. Raises ValueError."""
    if not isinstance(value, str):
        return value
    # Images have none of these, and a parser of millions of values would hold Python's lock for seconds.
    if sum(value.count(mark) for mark in "[{,") > _MAX_FORM_VALUES:
        raise ValueError("has more values than are read")
    return from_json(value)


class ControlBody(ControlNetUse):
    """A ControlNet of a request, and its image."""

    image: str = Field(description=IMAGE)  # type: ignore[assignment]  # a file here, pixels in the record


class ImagePromptBody(ImagePromptUse):
    """An IP-Adapter of a request, and its image."""

    image: str = Field(description=IMAGE)  # type: ignore[assignment]  # a file here, pixels in the record


class ImagesBody(ImageOptions, ClientPart):
    """The options of all three endpoints.

    `size` is "WIDTHxHEIGHT" or "auto"; `width` and `height` are an alternative. A request's images are resized to
    it; without it, the first one has the size of the result, as nearly as the model takes it.
    """

    seed: Seed = None
    size: Size = "auto"
    control: tuple[ControlBody, ...] = ()
    ip_adapter: tuple[ImagePromptBody, ...] = Field((), description="IP-Adapters, and images that are prompts to them")
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: ImageFormat = "png"
    output_compression: int | None = Field(None, ge=0, le=100, description="quality of jpeg and webp, not of png")
    background: bool | _Word = Field("auto", description=f"{BACKGROUND}. No image is transparent")
    quality: _Word = Field("auto", description="say it with `num_inference_steps`")
    style: _Word = Field("auto", description="say it in the prompt")
    input_fidelity: _Word = Field("auto", description="say it with `strength`")
    moderation: _Word = Field("auto", description="no image is moderated here")
    user: UserName | None = None
    safety_identifier: UserName | None = None
    stream: bool | None = Field(False, description="server-sent events while the image is made")
    partial_images: int | None = Field(None, ge=0, le=MAX_PARTIAL_IMAGES, description="previews in a stream")
    progress: bool = Field(False, description="an event for every step in a stream")
    resumable: bool = Field(False, description=_RESUMABLE)

    def warnings(self) -> tuple[str, ...]:
        vain = [name for name, usual in _WITHOUT_EFFECT.items() if getattr(self, name) not in usual]
        shown = (f"without effect here: {', '.join(f'{name} {getattr(self, name)!r}' for name in vain)}",)
        return super().warnings() + (shown if vain else ())

    def record_with(self, image: DecodedImage | None, mask: DecodedImage | None, limits: LimitsConfig) -> ImageRequest:
        """Return the request in the service's form, with its separate images. Raises InvalidRequest."""
        fields = {name: getattr(self, name) for name in ImageOptions.model_fields}
        fields |= self._stream_fields() | sides_of(self)
        controls = [
            decode_base64_within(use.image, f"control.{place}.image", limits) for place, use in enumerate(self.control)
        ]
        fields["ip_adapter"] = [
            use.model_dump() | {"image": decode_base64_within(use.image, f"ip_adapter.{place}.image", limits).pixels}
            for place, use in enumerate(self.ip_adapter)
        ]
        first = image or next(iter(controls), None)
        if first is None:
            return as_record(ImageRequest, fields)
        if first.file_size != first.size and not (fields["width"] and fields["height"]):
            fields["scaled_from"] = first.file_size
        size = fields["width"] or first.size[0], fields["height"] or first.size[1]
        if size[0] * size[1] > limits.max_pixels:  # before anything is resized to it
            raise InvalidRequest(f"size: {size[0]}x{size[1]}, at most {limits.max_pixels} pixels are allowed", "size")
        fields["control"] = [
            use.model_dump() | {"image": resize_pixels(decoded.pixels, size)}
            for use, decoded in zip(self.control, controls, strict=True)
        ]
        return as_record(ImageRequest, fields | _painted(image, mask, size))

    def _stream_fields(self) -> dict[str, Any]:
        if not self.stream:
            for name in ("partial_images", "progress", "resumable"):
                if getattr(self, name):
                    raise InvalidRequest(f"{name}: only a stream has them; set `stream`", name)
            return {}
        if self.n > 1:
            raise InvalidRequest(f"n: {self.n} images, and a stream makes one", "n")
        if self.response_format == "url":
            raise InvalidRequest("response_format: a stream has its images in base64", "response_format")
        return {"partial_images": self.partial_images or 0, "reports_steps": self.progress or self.resumable}


class GenerationBody(ImagesBody):
    """OpenAI's images request and more. With `init_image` and `mask_image` it does what /v1/images/edits does."""

    init_image: str | None = Field(None, description=IMAGE)
    mask_image: str | None = Field(
        None, description=f"{IMAGE}; what is transparent, else what is white, is painted anew"
    )
    images: NamedFiles = Field({}, description=f"further {NAMED}")

    @property
    def has_images(self) -> bool:
        """Return whether the body has images, which take long to read."""
        return bool(self.init_image or self.mask_image or self.control or self.ip_adapter or self.images)

    def to_record(self, limits: LimitsConfig) -> ImageRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        image, mask = (
            None if text is None else decode_base64_within(text, name, limits)
            for name, text in (("init_image", self.init_image), ("mask_image", self.mask_image))
        )
        named = decode_named({f"images.{name}": files for name, files in self.images.items()}, limits)
        images = {field.removeprefix("images."): pictures for field, pictures in named.items()}
        return self.record_with(image, mask, limits).model_copy(update={"images": images})


JSON_FIELDS: Final = (
    *("lora", "control", "ip_adapter", "scheduler_options", "acceleration", "variation", "sampler", "extra"),
)


class VariationBody(ImagesBody):
    """The fields of a form with an image, of which `JSON_FIELDS` are JSON.

    A variation may do without a prompt.
    """

    prompt: str = Field(NO_PROMPT, min_length=1)

    @field_validator(*JSON_FIELDS, mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        return from_form(value)

    def to_record(self, files: dict[str, list[bytes]], limits: LimitsConfig) -> ImageRequest:
        """Return the request with the files of its form. Raises InvalidRequest."""
        images = _decode_one(files.get("image", ()), "image", limits)
        mask = _decode_one(files.get("mask", ()), "mask", limits)
        if images is None:
            came = f" (files that came: {', '.join(sorted(files))[:200]})" if files else ""
            raise InvalidRequest(f"image: the form has no file of this name{came}", "image")
        return self.record_with(images, mask, limits)


class EditBody(VariationBody):
    """The fields of /v1/images/edits. Without a mask, the transparent parts are painted anew, or all without any."""

    prompt: str = Field(min_length=1)


def _decode_one(files: Sequence[bytes], name: str, limits: LimitsConfig) -> DecodedImage | None:
    if len(files) > 1:
        raise InvalidRequest(f"{name}: {len(files)} files given, expected one", name)
    return decode_image(files[0], name, limits.max_pixels, limits.max_upload_pixels) if files else None


def _painted(image: DecodedImage | None, mask: DecodedImage | None, size: tuple[int, int]) -> dict[str, Any]:
    """Return the fields for the image to begin with, and for the part painted anew."""
    if image is None:
        if mask is not None:
            raise InvalidRequest("mask_image: a mask needs the image that it belongs to", "mask_image")
        return {}
    if mask is not None and mask.file_size != image.file_size:
        shown = ["{}x{}".format(*decoded.file_size) for decoded in (mask, image)]
        raise InvalidRequest(f"mask: {shown[0]} pixels, expected those of the image, {shown[1]}", "mask")
    painted = image.to_repaint if mask is None else mask.as_mask()
    return {
        "init_image": resize_pixels(image.pixels, size),
        "mask_image": None if painted is None else resize_pixels(painted, size),
    }
