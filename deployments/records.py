"""Requests and results of handle calls, CLI and HTTP alike. Free of Ray and of HTTP.

Requests are strict pydantic models: a handle call with a typo fails as clearly as an HTTP body with one. Results
are plain dataclasses that hold numpy arrays, which Ray moves without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from configs.batching import MAX_PRIORITY_LEVELS
from configs.model import LongText, TextPadding
from deployments.engines.llm.chat import CalledTool, Message, ResponseFormat, Tool, ToolChoice
from deployments.errors import InvalidRequest

MAX_SEED = 2**63 - 1  # accepted; drawn seeds are below 2**32
SEED_RULE = "0 to 2^63 - 1, as a whole number; a drawn one is below 2^32, which every JSON reader keeps exactly"
TimingsMs = dict[str, float]  # milliseconds by stage: queue, encode, switch, denoise, prefill, generate, decode, total
RequestT = TypeVar("RequestT", bound="RequestModel")
Finite = Field(allow_inf_nan=False)
# Bounds of what a request can mean. What one may ask of a cluster is in its config (`LimitsConfig`); see `limits.py`.
MAX_INT32 = 2**31 - 1
MAX_PARTIAL_IMAGES = 3  # OpenAI's
Name = Annotated[str, Field(max_length=256)]  # of a model, an adapter or a version
UserName = Annotated[str, Field(max_length=1024)]  # OpenAI's `user`, which nobody here looks at
Count = Annotated[int, Field(ge=1, le=MAX_INT32)]
TenantName = Annotated[str, Field(max_length=128)]  # "" for none; the config knows them
Priority = Annotated[int, Field(ge=0, le=MAX_PRIORITY_LEVELS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class RequestModel(BaseModel):
    """The base of requests: unknown fields are refused, and nothing changes a request once it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def as_record(class_: type[RequestT], request: RequestT | Mapping[str, Any]) -> RequestT:
    """Return the request itself, or one made of a mapping of its fields. Raises InvalidRequest naming the field."""
    if isinstance(request, class_):
        return request
    try:
        return class_.model_validate(request)
    except ValidationError as error:
        # A misspelt field shows as unknown, and often as a missing one too: the first says more.
        first = min(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
        where = ".".join(str(part) for part in first["loc"])
        text = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
        known = ", ".join(class_.model_fields)
        raise InvalidRequest(f"{where or class_.__name__}: {text} (fields: {known})", where or None) from None


def _as_pixels(value: Any, num_axes: int) -> npt.NDArray[np.uint8]:
    pixels = np.asarray(value)
    if pixels.dtype != np.uint8 or pixels.ndim != num_axes or pixels.shape[2:] not in ((), (3,)) or not pixels.size:
        expected = "(height, width, 3)" if num_axes == 3 else "(height, width)"
        raise ValueError(f"expected uint8 {expected}, got {pixels.dtype} {pixels.shape}")
    return pixels


def _as_image(value: Any) -> npt.NDArray[np.uint8]:
    return _as_pixels(value, 3)


def _as_mask(value: Any) -> npt.NDArray[np.uint8]:
    return _as_pixels(value, 2)


Pixels = Annotated[npt.NDArray[np.uint8], PlainValidator(_as_image)]  # (height, width, 3); a PIL image in RGB will do
Mask = Annotated[npt.NDArray[np.uint8], PlainValidator(_as_mask)]  # (height, width)


class LoraUse(RequestModel):
    """One adapter of a request and its strength."""

    name: Name
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)


class ControlNetUse(RequestModel):
    """One ControlNet of a request, the image that it reads, its weight, and the part of the steps in which it acts."""

    name: Name
    image: Pixels
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)
    start: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    end: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)


class ImageOptions(RequestModel):
    """The options of an image. Those that are None come from the model's defaults; a seed of None is drawn."""

    model: Name
    prompt: str = Field(min_length=1)
    negative_prompt: str | None = None
    n: Count = 1
    width: Count | None = Field(None, description="pixels")
    height: Count | None = Field(None, description="pixels")
    num_inference_steps: Count | None = None
    guidance_scale: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    true_cfg_scale: float = Field(1.0, ge=0, le=100, allow_inf_nan=False, description="Flux with a negative prompt")
    max_sequence_length: Count | None = Field(None, description="tokens of the T5 prompt (Flux)")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description=SEED_RULE)
    lora: tuple[LoraUse, ...] = ()
    scheduler: Name | None = Field(None, description="a class of diffusers, in place of the model's own")
    sigmas: tuple[Annotated[float, Finite], ...] | None = Field(None, min_length=1, max_length=1000)
    timesteps: tuple[int, ...] | None = Field(None, min_length=1, max_length=1000)
    deterministic: bool = Field(False, description="the same bits in any company, on devices of one kind")


class ImageRequest(ImageOptions):
    """A request for images from a diffusion model.

    The same prompt, seed, steps and guidance give the image that the stock diffusers pipeline gives with
    `torch.Generator("cpu").manual_seed(seed)`, up to rounding where requests share a step.

    `init_image` makes it image-to-image: `strength` (None is the pipeline's default) is the part of the steps that run,
    so 1 keeps nothing of it. `mask_image` makes that inpainting: what is 128 or more is painted anew. All images have
    the size of the result; where `width` and `height` are None, they are those of `init_image`, else of the first of
    `control`.

    `partial_images` asks a stream for so many previews on the way (fewer where there are not as many steps),
    `reports_steps` for every step, and `checkpoint_steps` for a checkpoint every so many steps; an answer in one piece
    has none of them. After its worker's death a request goes on from its last checkpoint; those that are not asked for
    are not told, and come every `checkpoint_interval_s` seconds (0: never).

    The ingress sets the last five fields. `model_version` and `adapter_versions` (by name) are the fingerprints of the
    versions that are current then, so that every replica on the way uses the same ones. `text_padding` and `long_text`
    are the model's. `priority`, `timeout_s` and `tenant` are as in EmbeddingRequest.
    """

    init_image: Pixels | None = None
    mask_image: Mask | None = None
    strength: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    control: tuple[ControlNetUse, ...] = ()
    priority: Priority = 0
    tenant: TenantName = ""
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    partial_images: int = Field(0, ge=0, le=MAX_PARTIAL_IMAGES)
    reports_steps: bool = False
    checkpoint_steps: int = Field(0, ge=0, le=MAX_INT32)
    checkpoint_interval_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    model_version: str | None = None
    adapter_versions: dict[str, str] = {}
    text_padding: TextPadding = "stock"
    long_text: LongText = "truncate"


class EmbeddingRequest(RequestModel):
    """A request for the embeddings of texts, or of texts that are token ids already.

    `dimensions` None is the model's size; fewer are for models that were trained for it.
    `priority` 1 is the most urgent, 0 the default one. `timeout_s` is the time that the request has in all, and
    `tenant` whose share of the cluster it takes. The ingress sets `model_version`.
    """

    model: Name
    input: tuple[str, ...] | tuple[tuple[int, ...], ...] = Field(min_length=1)
    dimensions: Count | None = None
    priority: Priority = 0
    tenant: TenantName = ""
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    model_version: str | None = None
    long_text: LongText = "truncate"


@dataclass(frozen=True, slots=True, eq=False)
class HeadRequest:
    """A linear layer's input: `features` is a float array (n, in_features). The ingress sets `model_version`."""

    model: Name
    features: npt.NDArray[np.floating[Any]]
    model_version: str | None = None


TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1)]
Prompts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...] | tuple[TokenIds, ...], Field(min_length=1)]


class TextOptions(RequestModel):
    """The options of generated text. Those that are None come from the model's defaults.

    The config's defaults of the model go before those of its generation_config.json, and `temperature` is 1 when
    neither says anything; 0 is greedy. `logprobs` asks for the log probability of each token, and of so many best ones.
    """

    n: Count = 1
    max_tokens: Count | None = None
    temperature: Annotated[float | None, Finite] = Field(None, ge=0, le=2)
    top_p: Annotated[float | None, Finite] = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT32)
    min_p: Annotated[float | None, Finite] = Field(None, ge=0, le=1)
    typical_p: Annotated[float | None, Finite] = Field(None, gt=0, le=1)
    repetition_penalty: Annotated[float | None, Finite] = Field(None, gt=0, le=100)
    frequency_penalty: Annotated[float, Finite] = Field(0.0, ge=-2, le=2)
    presence_penalty: Annotated[float, Finite] = Field(0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Bias] = Field({}, max_length=1024)
    logprobs: int | None = Field(None, ge=0, le=20)
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description=SEED_RULE)
    stop: tuple[Stop, ...] = Field((), max_length=4)
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=64)
    ignore_eos: bool = False
    lora: tuple[LoraUse, ...] = ()


class _TextRequest(TextOptions):
    """A request for text. `adapter_versions` is as in ImageRequest, the other fields are as in EmbeddingRequest."""

    model: Name
    priority: Priority = 0
    tenant: TenantName = ""
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    model_version: str | None = None
    adapter_versions: dict[str, str] = {}


class ChatRequest(_TextRequest):
    """A request for the next message of a chat."""

    messages: tuple[Message, ...] = Field(min_length=1)
    response_format: ResponseFormat | None = None
    tools: tuple[Tool, ...] = Field((), max_length=128)
    tool_choice: ToolChoice = "auto"


class CompletionRequest(_TextRequest):
    """A request for the continuations of a text, or of several: texts, or token ids already.

    With `echo`, each continuation begins with its prompt, whose tokens come with theirs where `logprobs` asks for them.
    """

    prompt: Annotated[str, Field(min_length=1)] | TokenIds | Prompts
    echo: bool = False

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Return the prompts, one or several."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return (self.prompt,)
        return self.prompt


TextRequestRecord = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """The work of making a model ready: components that were built, and components that were there already.

    `attached_bytes` are those of the components that were built. `storage_bytes` were read from storage or a peer for
    them, `host_bytes` were newly mapped from the node's memory (whole extents), `device_bytes` were copied to the
    device, and `reused_bytes` were there.
    """

    model: str
    switch_ms: float
    attach_ms: float
    build_ms: float
    attached_bytes: int
    built: tuple[str, ...]
    reused: tuple[str, ...]
    storage_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    reused_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Counts of one request's text encodings: found in the cache, and computed."""

    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class ImageResult:
    """The answer to an ImageRequest: n arrays (height, width, 3) uint8, and the seed that was used.

    A multi-model pipeline does not know what its models did: its `seed`, `switch` and `num_inference_steps` are None.
    """

    model: str
    images: list[npt.NDArray[np.uint8]]
    seed: int | None
    num_inference_steps: int | None
    timings_ms: TimingsMs
    switch: SwitchReport | None
    cache: CacheUse
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ImageProgress:
    """A piece of an image stream before its ImageResult: `step` of `num_steps` are done.

    `previews` are n arrays (height, width, 3) uint8, the images as this step expects them, or (); `preview_index`
    counts them from 0. `checkpoint` is what `Worker.stream_images` takes to go on after this step in another replica.
    """

    step: int
    num_steps: int
    previews: tuple[npt.NDArray[np.uint8], ...] = ()
    preview_index: int | None = None
    checkpoint: bytes | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """The answer to an EmbeddingRequest: one float32 array (dimensions,) per input."""

    model: str
    embeddings: list[npt.NDArray[np.float32]]
    num_tokens: int
    timings_ms: TimingsMs
    cache: CacheUse
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token of an answer as text and as bytes (part of a character, maybe), and its natural log probability.

    `best` are the best tokens in its place, without any of their own. The first token of a prompt has None.
    """

    text: str
    data: bytes
    logprob: float | None
    best: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of completion `index` of a request; the completions of a prompt come before those of the next one.

    The finish reason comes with the last piece of each completion; timings, switch and warnings with the last of all.
    The counts are of the whole request so far; the KV cache had `num_cached_tokens` of the prompts.
    """

    text: str
    num_prompt_tokens: int
    num_completion_tokens: int
    finish_reason: str | None = None
    timings_ms: TimingsMs = field(default_factory=dict)
    switch: SwitchReport | None = None
    warnings: tuple[str, ...] = ()
    index: int = 0
    logprobs: tuple[TokenText, ...] = ()
    num_cached_tokens: int = 0
    tool_calls: tuple[CalledTool, ...] = ()


@dataclass(frozen=True, slots=True)
class TextChoice:
    """One of the texts of an answer."""

    text: str
    finish_reason: str
    logprobs: tuple[TokenText, ...] = ()
    tool_calls: tuple[CalledTool, ...] = ()


@dataclass(frozen=True, slots=True)
class TextResult:
    """The whole text of an answer, and the `others` where several were asked for."""

    model: str
    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    timings_ms: TimingsMs
    switch: SwitchReport | None = None
    warnings: tuple[str, ...] = ()
    logprobs: tuple[TokenText, ...] = ()
    others: tuple[TextChoice, ...] = ()
    num_cached_tokens: int = 0
    tool_calls: tuple[CalledTool, ...] = ()

    @property
    def choices(self) -> tuple[TextChoice, ...]:
        """Return all texts in the order of their indices."""
        return (TextChoice(self.text, self.finish_reason, self.logprobs, self.tool_calls), *self.others)


def warnings_by_item(warnings: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the warnings of a request's items, each with the number of its item unless there is only one."""
    if len(warnings) == 1:
        return tuple(warnings[0])
    return tuple(f"item {number}: {text}" for number, texts in enumerate(warnings) for text in texts)
