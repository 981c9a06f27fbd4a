"""Limits on one request, checked on records: handle calls, pipelines and local runs are bounded as HTTP is."""

from __future__ import annotations

from collections.abc import Sequence

from configs.cluster import LimitsConfig
from deployments.engines.diffusion.input_images import find_bad_image
from deployments.errors import InvalidRequest
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest, HeadRequest, ImageRequest, LoraUse


def check_image(request: ImageRequest, limits: LimitsConfig, asked: ImageRequest | None = None) -> None:
    """Check an image request. Raises InvalidRequest naming the field.

    `request` has its defaults, and `asked` is the request before: the message says so when the value is a default.
    A field that is still None, in a request for a pipeline, is checked where the pipeline's stage fills it in.
    """
    _check_text("prompt", request.prompt, limits)
    _check_text("negative_prompt", request.negative_prompt or "", limits)
    _check_most("n", request.n, limits.max_images)
    _check_loras(request.lora, limits)
    _check_most("control", len(request.control), limits.max_controls, unit=" ControlNets")
    if bad := find_bad_image(request):
        raise InvalidRequest(": ".join(bad), bad[0])
    asked = asked or request
    if request.num_inference_steps is not None:
        unit = _default_of(asked.num_inference_steps)
        _check_most("num_inference_steps", request.num_inference_steps, limits.max_inference_steps, unit)
    unit = " pixels" + _default_of(asked.width, asked.height)
    _check_most("size", (request.width or 1) * (request.height or 1), limits.max_pixels, unit)


def check_embedding(request: EmbeddingRequest, limits: LimitsConfig) -> None:
    """Check an embedding request. Raises InvalidRequest naming the field."""
    _check_most("input", len(request.input), limits.max_embedding_inputs, unit=" inputs")
    for text in request.input:
        if not text:
            raise InvalidRequest("input: an empty text has no embedding", "input")
        if isinstance(text, str):
            _check_text("input", text, limits)
        else:
            _check_most("input", len(text), limits.max_prompt_chars, unit=" tokens")
    num_chars = sum(map(len, request.input))
    _check_most("input", num_chars, limits.max_embedding_chars, unit=" characters or tokens in all")


def check_text(request: ChatRequest | CompletionRequest, limits: LimitsConfig) -> None:
    """Check a chat or completion request. Raises InvalidRequest naming the field."""
    _check_loras(request.lora, limits)
    num_prompts = 1
    if isinstance(request, CompletionRequest):
        num_prompts = len(request.prompts)
        for prompt in request.prompts:
            _check_most("prompt", len(prompt), limits.max_prompt_chars, unit=" characters or tokens")
    else:
        _check_most("messages", len(request.messages), limits.max_messages, unit=" messages")
        num_chars = sum(len(message.content) for message in request.messages)
        num_chars += sum(len(call.function.arguments) for message in request.messages for call in message.tool_calls)
        _check_most("messages", num_chars, limits.max_prompt_chars, unit=" characters")
        num_chars = sum(tool.function.num_chars for tool in request.tools)
        _check_most("tools", num_chars, limits.max_prompt_chars, unit=" characters")
    _check_most("prompt" if num_prompts > 1 else "n", num_prompts * request.n, limits.max_prompts, unit=" texts")


def check_head(request: HeadRequest, limits: LimitsConfig) -> None:
    """Check a head's input. Raises InvalidRequest naming the field."""
    if request.features.ndim != 2:
        raise InvalidRequest(f"features: {request.features.ndim} dimensions, expected rows of features", "features")
    _check_most("features", len(request.features), limits.max_head_rows, unit=" rows")


def _check_loras(uses: Sequence[LoraUse], limits: LimitsConfig) -> None:
    _check_most("lora", len(uses), limits.max_loras, unit=" adapters")
    if len({use.name for use in uses}) != len(uses):
        raise InvalidRequest("lora: an adapter may be used once per request", "lora")


def _check_text(name: str, text: str, limits: LimitsConfig) -> None:
    _check_most(name, len(text), limits.max_prompt_chars, unit=" characters")


def _check_most(name: str, value: int, most: int, unit: str = "") -> None:
    if value > most:
        raise InvalidRequest(f"{name}: {value}{unit}, at most {most} are allowed", name)


def _default_of(*asked: int | None) -> str:
    return " (the model's default)" if None in asked else ""
