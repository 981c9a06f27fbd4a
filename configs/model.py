"""The configuration of one model or adapter that a cluster may serve."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, PydanticKnownError, core_schema

from configs.errors import shown
from configs.hub_names import hub_hint
from configs.options import PictureOptions, SamplingOptions

# Ids become file names in the store and path segments in URLs, so they are kept to one plain word.
_MODEL_ID: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
ModelId = Annotated[str, StringConstraints(pattern=_MODEL_ID)]
DType = Literal["auto", "float32", "bfloat16", "float16"]
_MAX_LAYERS: Final = 10_000
_MAX_PATTERN: Final = 256  # characters
_UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@(refs/pr/\d+|[A-Za-z0-9][\w.-]*))?(/[^?#@]+)?")


def _parse_source(value: Any) -> Any:
    """Return a folder or file as Path; a URL stays text, because a Path would make one slash of two."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("expected a path, an s3:// or an hf:// URL")
    if not value.isprintable():  # a NUL or half a character is in no path, a line break makes two lines of a message
        raise ValueError("expected a path of printable characters")
    scheme, is_url, rest = value.partition("://")
    if not is_url:
        return Path(value)
    if scheme == "hf":
        if not _HUB_NAME.fullmatch(rest):
            raise ValueError(
                "expected hf://organization/name, with @revision and a path in the repository if need be; "
                "a token comes from HF_TOKEN only"
            )
        return value
    if scheme != "s3":
        hint = f"; a model of the hub is {meant}" if (meant := hub_hint(value)) else ""
        raise ValueError(f"unknown scheme {scheme}:// (known: s3://, hf://; a path needs none){hint}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]+(/[^?#]*)?", rest):
        raise ValueError("expected s3://bucket/prefix; credentials come from the environment only")
    return value


def _parse_root(value: Any) -> Any:
    """Return a folder as Path; a pattern of hub names stays text."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str):
        raise ValueError("expected a folder, or hf://organization/* (a pattern with *)")
    if "://" not in value:
        return Path(value)
    if not re.fullmatch(r"hf://[\w.*-]+/[\w.*-]+", value):
        raise ValueError("expected a folder, or hf://organization/* (a pattern with *)")
    return value


def _parse_bytes(value: Any) -> Any:
    """Parse `"2 GiB"` to 2147483648. Numbers pass through; anything else is left to pydantic to refuse."""
    if not isinstance(value, str):
        return value
    text = value.strip().upper()
    for unit in sorted(_UNITS, key=len, reverse=True):
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal():
            return int(Decimal(number) * _UNITS[unit])
    if text.isdecimal():
        return int(text)
    raise ValueError(f"not a size in bytes: {shown(value)} (expected a number or e.g. 512 MiB, 2 GiB)")


def _parse_spare_bytes(value: Any) -> Any:
    """Parse a size, or leave "auto" and None as they are."""
    if value is None or value == "auto":
        return value
    found = _parse_bytes(value)
    if not isinstance(found, int) or isinstance(found, bool) or found <= 0:
        raise ValueError(f"not a size in bytes: {shown(value)} (expected auto, a number or e.g. 512 MiB, 2 GiB)")
    return found


def _parse_local(value: object) -> Path | None:
    """Return a path of this machine, None for None. Raises ValueError for anything else."""
    if value is None:
        return None
    path = _parse_source(value)
    if not isinstance(path, Path):
        raise ValueError("expected a path; download it first")
    return path


def _parse_like(value: object) -> Path | str:
    """Return a folder, which has a slash in its name, or the id of a model. Raises ValueError for neither."""
    if isinstance(value, Path) or (isinstance(value, str) and "/" in value and "://" not in value):
        return Path(value)
    if isinstance(value, str) and re.fullmatch(_MODEL_ID, value):
        return value
    raise ValueError("expected the id of a model, or a pipeline's folder as a path with a slash")


def _parse_gpu_layers(value: object) -> int | str:
    """Return "auto", a number of layers or a pattern of their names. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_LAYERS:
        return value
    if isinstance(value, str) and 0 < len(value) <= _MAX_PATTERN and not value.strip().isdecimal():
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from None
        return value
    raise ValueError(
        f"not a choice of layers: {shown(value)} (expected auto, a number of layers such as 20, or a regular "
        r"expression of their names such as layers\.(0|1|2))"
    )


Source = Annotated[Path | str, PlainValidator(_parse_source)]
GpuLayers = Annotated[int | str, PlainValidator(_parse_gpu_layers)]
Like = Annotated[Path | str, PlainValidator(_parse_like)]
Root = Annotated[Path | str, PlainValidator(_parse_root)]
Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(gt=0)]
SpareBytes = Annotated[int | Literal["auto"] | None, PlainValidator(_parse_spare_bytes)]


def _fields_of(schema: Any) -> list[Any]:
    """Return the schemas of a model's fields, which may lie within those of its validators."""
    while schema["type"] != "model-fields":
        if "schema" not in schema:
            return []
        schema = schema["schema"]
    return list(schema["fields"].values())


def _refuse_truths(schema: Any) -> None:
    """Let a number field accept only numbers and None. Fields with a parser stay as they are."""
    while schema["type"] in ("model-field", "default", "nullable"):
        outer, schema = schema, schema["schema"]
        if schema["type"] in ("int", "float"):
            error = PydanticKnownError("int_type" if schema["type"] == "int" else "float_type")
            outer["schema"] = core_schema.no_info_before_validator_function(partial(_as_number, error), schema)
            return


def _as_number(error: PydanticKnownError, value: Any) -> Any:
    """Return the value. Raises `error` for `true`, which pydantic reads as 1, and for text of digits."""
    if isinstance(value, bool | str):
        raise error
    return value


class StrictModel(BaseModel):
    """Immutable. An unknown key is an error rather than a silent default, and so are `true` and "5" for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        for field in _fields_of(schema):
            _refuse_truths(field)
        return schema


def located_errors(title: str, problems: Iterable[tuple[tuple[str | int, ...], str]]) -> ValidationError:
    """Return one error with a place, keys from the model's own mapping on, for each problem: the loader finds its line.

    Raised by a validator of the model `title`.
    """
    details = [
        InitErrorDetails(type=PydanticCustomError("located", "{text}", {"text": text}), loc=location, input={})
        for location, text in problems
    ]
    return ValidationError.from_exception_data(title, details)


_Finite = Annotated[float, Field(allow_inf_nan=False)]
_TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]

# What happens to a text that is longer than its encoder takes.
LongText = Literal["truncate", "error", "chunk"]
# "stock": T5 and CLIP see the padding, as in diffusers. "trimmed": a T5 sees the real tokens only; no others are kept.
TextPadding = Literal["stock", "trimmed"]


class GenerationDefaults(StrictModel, SamplingOptions, PictureOptions):
    """The values of fields that requests for this model leave open: any option of an image or of a text.

    None leaves it to the checkpoint's own settings, then to the engine's defaults.
    """

    seed: int | None = Field(None, ge=0, le=2**63 - 1, description="seed of every request; null draws one")
    width: int | None = Field(None, ge=8, le=4096, description="width in pixels")
    height: int | None = Field(None, ge=8, le=4096, description="height in pixels")
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    max_sequence_length: int | None = Field(None, ge=1, le=4096, description="maximum tokens of the T5 prompt")
    scheduler_options: dict[str, bool | int | _Finite | str] | None = Field(
        None, max_length=16, description='options of the scheduler, such as {"use_karras_sigmas": true}'
    )
    extra: dict[str, Any] | None = Field(
        None, max_length=64, description="further parameters of the pipeline's class, where diffusers' code runs it"
    )
    logit_bias: dict[_TokenId, _Bias] | None = Field(None, max_length=1024)
    stop: tuple[_Stop, ...] | None = Field(None, max_length=64)
    stop_token_ids: tuple[_TokenId, ...] | None = Field(None, max_length=64)
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=64, description="variables of the model's chat template, such as {enable_thinking: false}"
    )
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tool_form: str | None = Field(
        None, max_length=64, description="how the model writes tool calls, where its chat template does not say"
    )
    reasoning_form: str | None = Field(
        None, max_length=64, description="how the model marks its reasoning, where its chat template does not say"
    )

    @model_validator(mode="after")
    def _one_schedule(self) -> GenerationDefaults:
        given = [name for name in ("num_inference_steps", "sigmas", "timesteps") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say which steps there are; give one of them")
        return self


FileNames = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=300)], ...], Field(max_length=64)]
_FILE_NAMES = (
    "further names of its files in ComfyUI's workflows: of itself, its VAE and its text encoders (ae.safetensors, say)"
)


class ModelConfig(StrictModel):
    """A checkpoint folder in a stock layout: diffusers pipeline, transformers LLM or sentence encoder.

    `path` is local, or an s3:// or hf:// URL that is copied to the store's disk first (`store.object_storage` says how
    s3:// is reached).
    `component` serves one component of a pipeline folder as a model of its own (its text encoder as an
    embedding model, say). `like` is for a whole pipeline, or parts of one, in a single .safetensors file: the pipeline
    that gives its configs, its tokenizers and what it lacks, by the id of a model or as a folder (a path with a slash);
    a .gguf file is a denoiser alone. `transformer` is another word for the `path` of what is but a denoiser.
    `vae` takes the place of a pipeline's own: a folder of diffusers on this machine, or a .safetensors file; a
    `preview_vae`, a folder with an AutoencoderTiny, makes the partial images alone. `draft` is a small language model
    on this machine, of the same vocabulary: it proposes tokens, several of which the model checks in a step.
    `dtype` other than `auto` casts floating tensors once, when they enter the store. `auto`
    keeps their types, but for those that a worker on the CPU would compute slowly: these become float32.
    """

    id: ModelId
    path: Source
    component: str | None = None
    like: Like | None = None
    vae: Annotated[Path | None, PlainValidator(_parse_local)] = None
    preview_vae: Annotated[Path | None, PlainValidator(_parse_local)] = None
    draft: Annotated[Path | None, PlainValidator(_parse_local)] = None
    dtype: DType = "auto"
    long_text: LongText = Field(
        "truncate",
        description="text beyond the encoder's limit: truncated with a warning, refused, or (CLIP) encoded in chunks",
    )
    text_padding: TextPadding = "stock"
    preload: bool = Field(
        False, description="build the model when a replica starts, if it fits without evicting another"
    )
    defaults: GenerationDefaults = GenerationDefaults()
    description: str = ""
    file_names: FileNames = Field((), description=_FILE_NAMES)
    gpu_layers: GpuLayers = Field(
        "auto",
        description="layers of a language model that are on the worker's device, the others are computed on the host: "
        "auto, as many as have room; a number, of the last ones; or a regular expression of names, layers.0 and on",
    )
    compiled: bool = Field(
        False, description="compile a program of torch.export (.pt2) on the node; until it is, it runs as it is"
    )

    @model_validator(mode="after")
    def _compiles_a_program(self) -> ModelConfig:
        if self.compiled and not str(self.path).lower().endswith(".pt2"):
            text = f"compiled is for a program of torch.export (.pt2), and this is {str(self.path)!r}"
            raise located_errors(type(self).__name__, [(("compiled",), text)])
        return self

    @model_validator(mode="after")
    def _parts_of_a_whole(self) -> ModelConfig:
        for name in self.own_parts:
            if self.component is not None:
                raise ValueError(f"{name} is for a whole model, and component takes one part of it")
        return self

    @property
    def own_parts(self) -> dict[str, Path]:
        """Return the sources of parts that its path does not have, by the component that each becomes."""
        given = {"vae": self.vae, "preview_vae": self.preview_vae, "draft": self.draft}
        return {name: path for name, path in given.items() if path is not None}

    @model_validator(mode="before")
    @classmethod
    def _is_a_denoiser(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "transformer" not in data:
            return data
        lack = "" if "like" in data else "say which pipeline it belongs to (`like`)"
        if lack or "path" in data:
            text = lack or "it is the `path` of a model that is a denoiser alone; give one of them"
            raise located_errors(cls.__name__, [(("transformer",), text)])
        return {("path" if key == "transformer" else key): value for key, value in data.items()}


class AdapterConfig(StrictModel):
    """A LoRA as diffusers, kohya or PEFT save it, a ControlNet, or the folder of an IP-Adapter, and its models.

    A ControlNet that asks for no dtype gets that of its models.

    A LoRA that most requests have is cheaper merged: those that name it alone and at `merged_scale` run it as private
    copies of the layers that it changes, in forwards of their own. Others have it on the side, which any LoRAs share.
    """

    id: ModelId
    path: Source
    base: tuple[ModelId, ...] = Field(min_length=1)
    dtype: DType = "auto"
    merged_scale: float | None = Field(
        None,
        gt=0,
        le=10,
        allow_inf_nan=False,
        description="scale at which an image LoRA runs merged, for requests that name it alone; null: never",
    )
    file_names: FileNames = Field((), description=_FILE_NAMES)
