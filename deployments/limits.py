"""What one request may ask for. Checked on records: handle calls, pipelines and local runs are bounded as HTTP is."""

from __future__ import annotations

from configs.cluster import LimitsConfig
from deployments.errors import InvalidRequest
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest, ImageRequest


def check_image(request: ImageRequest, limits: LimitsConfig, asked: ImageRequest | None = None) -> None:
    """Raises InvalidRequest naming the field.

    `request` has its defaults, and `asked` is what it was before: whoever left a field out is told whose value it is.
    What is None still, in a request for a pipeline, is checked where the pipeline's step fills it in.
    """
    _check_text("prompt", request.prompt, limits)
    _check_text("negative_prompt", request.negative_prompt or "", limits)
    _check_most("n", request.n, limits.max_images)
    asked = asked or request
    if request.num_inference_steps is not None:
        unit = _default_of(asked.num_inference_steps)
        _check_most("num_inference_steps", request.num_inference_steps, limits.max_inference_steps, unit)
    unit = " pixels" + _default_of(asked.width, asked.height)
    _check_most("size", (request.width or 1) * (request.height or 1), limits.max_pixels, unit)


def check_embedding(request: EmbeddingRequest, limits: LimitsConfig) -> None:
    _check_most("input", len(request.input), limits.max_embedding_inputs, unit=" inputs")
    for text in request.input:
        if not text:
            raise InvalidRequest("input: an empty text has no embedding", "input")
        if isinstance(text, str):
            _check_text("input", text, limits)
        else:
            _check_most("input", len(text), limits.max_prompt_chars, unit=" tokens")


def check_text(request: ChatRequest | CompletionRequest, limits: LimitsConfig) -> None:
    if isinstance(request, CompletionRequest):
        _check_text("prompt", request.prompt, limits)
    else:
        _check_text("messages", "".join(message.content for message in request.messages), limits)


def _check_text(name: str, text: str, limits: LimitsConfig) -> None:
    if len(text) > limits.max_prompt_chars:
        raise InvalidRequest(f"{name}: {len(text)} characters, at most {limits.max_prompt_chars} are allowed", name)


def _check_most(name: str, value: int, most: int, unit: str = "") -> None:
    if value > most:
        raise InvalidRequest(f"{name}: {value}{unit}, at most {most} are allowed", name)


def _default_of(*asked: int | None) -> str:
    return " (the model's default)" if None in asked else ""
