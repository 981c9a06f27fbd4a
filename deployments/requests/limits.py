"""Limits on one request, checked on records: handle calls, pipelines and local runs are bounded as HTTP is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from configs.cluster import LimitsConfig
from deployments.engines.records.input_images import find_bad_image
from deployments.engines.records.sounds import Sound
from deployments.records import (
    ChatRequest,
    ClipRequest,
    CompletionRequest,
    EmbeddingRequest,
    HeadRequest,
    ImageRequest,
    LoraUse,
    ProgramRequest,
    ScoringRequest,
)
from deployments.records.errors import InvalidRequest
from weights.programs.signature import ProgramSignature

_IMAGE_PROMPT: Final = 32_768  # characters, where the config says nothing else
_MAX_EXTRA: Final = 65_536
# Parameters of diffusers' classes that say how much is made.
_LENGTHS: Final = frozenset(
    {
        *("num_frames", "video_length", "audio_end_in_s", "audio_length_in_s", "audio_duration", "audio_duration_s"),
        *("duration", "silence_padding_duration"),
    }
)
_COUNTS: Final = frozenset(
    {
        *("num_videos_per_prompt", "num_waveforms_per_prompt", "num_images_per_prompt", "num_prompts_per_image"),
        *("batch_size", "view_batch_size", "layers", "prompt_reps"),
    }
)
_CELL: Final = 64  # pixels of a place in latents, at least
_SIDES: Final = ("height", "width", "resolution", "frame_size")  # ends of names of what is as wide or high
_LEAST_FPS: Final = 7  # of those that classes of diffusers have by themselves


def check_image(request: ImageRequest, limits: LimitsConfig, asked: ImageRequest | None = None) -> None:
    """Check an image request. Raises InvalidRequest naming the field.

    `request` has its defaults, and `asked` is the request before: the message says so when the value is a default.
    A field that is still None, in a request for a pipeline, is checked where the pipeline's stage fills it in.
    """
    _check_text("prompt", request.prompt, limits)
    _check_text("prompt_2", request.prompt_2 or "", limits)
    _check_text("negative_prompt", request.negative_prompt or "", limits)
    _check_most("n", request.n, limits.max_images)
    _check_loras(request.lora, limits)
    _check_most("control", len(request.control), limits.max_controls, unit=" ControlNets")
    _check_most("ip_adapter", len(request.ip_adapter), limits.max_controls, unit=" images")
    for use in request.ip_adapter:
        _check_most("ip_adapter", use.image.shape[0] * use.image.shape[1], limits.max_pixels, unit=" pixels")
    if bad := find_bad_image(request):
        raise InvalidRequest(": ".join(bad), bad[0])
    asked = asked or request
    if request.num_inference_steps is not None:
        unit = _default_of(asked.num_inference_steps)
        _check_most("num_inference_steps", request.num_inference_steps, limits.max_inference_steps, unit)
    unit = " pixels" + _default_of(asked.width, asked.height)
    _check_most("size", (request.width or 1) * (request.height or 1), limits.max_pixels, unit)
    _check_pictures(request.images, limits)
    for given in request.reference_latents:
        _check_most("reference_latents", given.shape[2] * given.shape[3], limits.max_pixels // _CELL, unit=" places")
    _check_extra(request.extra, limits)


def check_upscale(request: ImageRequest, limits: LimitsConfig, scale: int) -> None:
    """Check a request for an image that is enlarged by `scale`. Raises InvalidRequest naming the field."""
    if request.init_image is None:
        raise InvalidRequest("init_image: an upscaler enlarges an image, and the request has none", "init_image")
    height, width = request.init_image.shape[:2]
    _check_most("init_image", height * width, limits.max_pixels, unit=" pixels")
    shown = f" pixels, {scale} times {width}x{height}"
    _check_most("init_image", height * width * scale**2, limits.max_upload_pixels, unit=shown)


def check_clip(request: ClipRequest, limits: LimitsConfig, makes: Literal["video", "audio"]) -> None:
    """Check a request for a video or for audio, which has its defaults. Raises InvalidRequest naming the field."""
    _check_loras(request.lora, limits)
    _check_text("prompt", request.prompt, limits)
    _check_text("negative_prompt", request.negative_prompt or "", limits)
    _check_most("num_inference_steps", request.num_inference_steps or 1, limits.max_inference_steps)
    if makes == "video":
        _check_most("size", (request.width or 1) * (request.height or 1), limits.max_pixels, unit=" pixels")
        num_frames = request.num_frames or round((request.seconds or 0) * (request.fps or _LEAST_FPS))
        name = "num_frames" if request.num_frames else "seconds"
        _check_most(name, num_frames, limits.max_frames, unit=" frames")
    elif request.seconds is not None and request.seconds > limits.max_audio_s:
        raise InvalidRequest(f"seconds: {request.seconds:g}, at most {limits.max_audio_s:g} are allowed", "seconds")
    _check_pictures(request.images, limits)
    _check_audio(request.audio, limits)
    _check_extra(request.extra, limits)


def check_embedding(request: EmbeddingRequest, limits: LimitsConfig) -> None:
    """Check an embedding request. Raises InvalidRequest naming the field."""
    _check_most("input", len(request.input), limits.max_embedding_inputs, unit=" inputs")
    for text in request.input:
        if not text:
            raise InvalidRequest("input: an empty text has no embedding", "input")
        if isinstance(text, str):
            _check_read("input", len(text), limits)
        else:
            _check_read("input", len(text), limits, " tokens")
    num_chars = sum(map(len, request.input))
    _check_most("input", num_chars, limits.max_embedding_chars, unit=" characters or tokens in all")
    if (request.prompt_name or request.input_type) and not isinstance(request.input[0], str):
        name = "prompt_name" if request.prompt_name else "input_type"
        raise InvalidRequest(f"{name}: a prompt stands before texts, and the input is token ids", name)


def check_scoring(request: ScoringRequest, limits: LimitsConfig) -> None:
    """Check a request for scores, whose query counts once for each document. Raises InvalidRequest naming the field.

    Of pairs these are the fields of a request to rank.
    """
    are_texts = isinstance(request.input[0], str)
    name = "input" if are_texts else "documents"
    _check_most(name, len(request.input), limits.max_embedding_inputs, unit=f" {'texts' if are_texts else name}")
    for one in request.input:
        *firsts, last = (one,) if isinstance(one, str) else one
        for text in firsts:
            _check_text("query", text, limits)
        _check_text(name, last, limits)
    num_chars = sum(len(one) if isinstance(one, str) else sum(map(len, one)) for one in request.input)
    _check_most(name, num_chars, limits.max_embedding_chars, unit=" characters in all")


def check_text(request: ChatRequest | CompletionRequest, limits: LimitsConfig) -> None:
    """Check a chat or completion request. Raises InvalidRequest naming the field."""
    _check_loras(request.lora, limits)
    if any(use.text_scale is not None for use in request.lora):
        raise InvalidRequest("lora: text_scale is for image models, whose text encoders a LoRA may change", "lora")
    num_prompts = 1
    if isinstance(request, CompletionRequest):
        num_prompts = len(request.prompts)
        for prompt in request.prompts:
            _check_read("prompt", len(prompt), limits, " characters or tokens")
    else:
        _check_most("messages", len(request.messages), limits.max_messages, unit=" messages")
        images = [image for message in request.messages for image in message.images]
        _check_most("messages", len(images), limits.max_images, unit=" images")
        for image in images:
            _check_most("messages", image.shape[0] * image.shape[1], limits.max_pixels, unit=" pixels of an image")
        num_chars = sum(len(message.text) for message in request.messages)
        num_chars += sum(len(call.function.arguments) for message in request.messages for call in message.tool_calls)
        _check_read("messages", num_chars, limits)
        num_chars = sum(tool.function.num_chars for tool in request.tools)
        _check_read("tools", num_chars, limits)
    _check_most("prompt" if num_prompts > 1 else "n", num_prompts * request.n, limits.max_prompts, unit=" texts")


def check_head(request: HeadRequest, limits: LimitsConfig) -> None:
    """Check a head's input. Raises InvalidRequest naming the field."""
    if request.features.ndim != 2:
        raise InvalidRequest(f"features: {request.features.ndim} dimensions, expected rows of features", "features")
    if not request.features.size:
        rows, columns = request.features.shape
        raise InvalidRequest(f"features: {rows} rows of {columns} features, expected one of each at least", "features")
    _check_most("features", len(request.features), limits.max_head_rows, unit=" rows")


def check_program(request: ProgramRequest, signature: ProgramSignature, limits: LimitsConfig) -> None:
    """Check a program's inputs against the sizes that it was exported for. Raises InvalidRequest naming the input."""
    if refusal := signature.refusal({name: array.shape for name, array in request.inputs.items()}):
        raise InvalidRequest(f"model {request.model!r}: {refusal.text}", refusal.name)
    if signature.has_batch:
        name, array = next(iter(request.inputs.items()))
        _check_most(name, len(array), limits.max_head_rows, unit=" rows")


def _check_pictures(images: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Check the images and videos that go to parameters of a class by name."""
    num_pixels = 0
    for name, pictures in images.items():
        found = pictures if isinstance(pictures, tuple) else (pictures,)
        field = f"images.{name}"
        _check_most(field, len(found), limits.max_frames, unit=" frames")
        for image in found:
            _check_most(field, image.shape[0] * image.shape[1], limits.max_pixels, unit=" pixels of an image")
            num_pixels += image.shape[0] * image.shape[1]
    _check_most("images", num_pixels, limits.max_video_pixels, unit=" pixels in all")


def _check_audio(audio: Mapping[str, Sound], limits: LimitsConfig) -> None:
    """Check the audio that a request brings. Raises InvalidRequest naming the field."""
    seconds = sum(sound.seconds for sound in audio.values())
    if seconds > limits.max_audio_s:
        raise InvalidRequest(f"audio: {seconds:g} seconds in all, at most {limits.max_audio_s:g} are allowed", "audio")


def _check_extra(extra: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Check parameters that only their class knows: sizes and texts among them would fill the memory."""
    num_chars = 0
    for name, value in extra.items():
        leaves, most = list(_leaves_of(value)), _most_of(name, limits)
        if any(isinstance(leaf, int | float) and abs(leaf) > most for leaf in leaves):
            raise InvalidRequest(f"extra: {name}: a number above {most}, at most {most} are allowed", "extra")
        num_chars += sum(len(leaf) for leaf in leaves if isinstance(leaf, str))
    _check_most("extra", num_chars, limits.max_prompt_chars or _IMAGE_PROMPT, unit=" characters")


def _most_of(name: str, limits: LimitsConfig) -> int:
    """Return the largest number that a parameter may have, by its name."""
    if name.endswith(("num_inference_steps", "num_steps")):
        return limits.max_inference_steps
    if name in _LENGTHS:
        return limits.max_frames if "frames" in name or name == "video_length" else int(limits.max_audio_s)
    if name in _COUNTS:
        return limits.max_images
    if name.endswith(_SIDES):
        return math.isqrt(limits.max_pixels)
    return limits.max_pixels if name == "max_area" else _MAX_EXTRA


def _leaves_of(value: Any) -> Iterator[Any]:
    """Yield the values in lists and mappings; names of members count as texts."""
    if isinstance(value, Mapping):
        yield from value
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for item in value:
        yield from _leaves_of(item)


def _check_loras(uses: Sequence[LoraUse], limits: LimitsConfig) -> None:
    _check_most("lora", len(uses), limits.max_loras, unit=" adapters")
    if len({use.name for use in uses}) != len(uses):
        raise InvalidRequest("lora: an adapter may be used once per request", "lora")


def _check_text(name: str, text: str, limits: LimitsConfig) -> None:
    _check_most(name, len(text), limits.max_prompt_chars or _IMAGE_PROMPT, unit=" characters")


def _check_most(name: str, value: int, most: int, unit: str = "") -> None:
    if value > most:
        raise InvalidRequest(f"{name}: {value}{unit}, at most {most} are allowed", name)


def _check_read(name: str, value: int, limits: LimitsConfig, unit: str = " characters") -> None:
    """Check the size of what a language model reads: the model itself refuses what is too long for it."""
    if limits.max_prompt_chars is not None and value > limits.max_prompt_chars:
        most = f"at most {limits.max_prompt_chars} are allowed (ingress.limits.max_prompt_chars)"
        raise InvalidRequest(f"{name}: {value}{unit}, {most}", name)


def _default_of(*asked: int | None) -> str:
    return " (the model's default)" if None in asked else ""
