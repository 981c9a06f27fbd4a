"""Tensors and parameters of a request as the service's records: prompts with their options, priority, timeout.

An option of a model is an optional input (one element for all prompts, or one for each) or, for all prompts, a request
parameter of the same name. The generate extension knows parameters only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from configs.batching import MAX_PRIORITY_LEVELS
from configs.cluster import MAX_LORAS
from deployments.ingress.kserve.tensors import Parameters, shown, texts
from deployments.pipelines.records import TensorSpec, TensorValue
from deployments.records import (
    NO_PROMPT,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ImageRequest,
    LoraUse,
    ScoringRequest,
    as_record,
)
from deployments.records.errors import InvalidRequest

_PARAMETER_TYPES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "BYTES": ((str,), "text"),
    "BOOL": ((bool,), "true or false"),
    "INT32": ((int,), "a whole number"),
    "INT64": ((int,), "a whole number"),
    "FP32": ((int, float), "a number"),
}


def image_requests(
    model: str,
    given: Mapping[str, TensorValue],
    specs: Sequence[TensorSpec],
    parameters: Parameters,
    schedule: Schedule,
) -> list[ImageRequest]:
    """Return one request for each prompt.

    Raises InvalidRequest, also when the images would not fit into one tensor.
    """
    prompts = texts(given["prompt"])
    options = _options(len(prompts), given, specs[1:], parameters)
    for name in ("width", "height"):
        if len({option.get(name) for option in options}) > 1:
            raise InvalidRequest(f"{name}: the images of one request are one tensor, so all have one size", name)
    for option in options:
        option["lora"] = _lora(option.get("lora", ""))
        option["ip_adapter"] = _image_prompts(option.get("ip_adapter"), option.pop("ip_adapter_image", None))
    fields = schedule.fields_of(model)
    return [
        as_record(ImageRequest, {**fields, "prompt": prompt, **option})
        for prompt, option in zip(prompts, options, strict=True)
    ]


def upscale_requests(model: str, images: TensorValue, schedule: Schedule) -> list[ImageRequest]:
    """Return one request for each image to enlarge. Raises InvalidRequest."""
    fields = schedule.fields_of(model) | {"prompt": NO_PROMPT}
    return [as_record(ImageRequest, fields | {"init_image": image}) for image in images.data]


def text_requests(
    model: str, given: Mapping[str, TensorValue], specs: Sequence[TensorSpec], parameters: Parameters
) -> list[ChatRequest | CompletionRequest]:
    """Return one request for each prompt: to continue the text, or with `chat` to answer it."""
    prompts = texts(given["text_input"])
    per_prompt = [spec for spec in specs[1:] if spec.name != "stop"]
    stop = _stop(given, parameters)
    records: list[ChatRequest | CompletionRequest] = []
    for prompt, option in zip(prompts, _options(len(prompts), given, per_prompt, parameters), strict=True):
        fields = {"model": model, "stop": stop, **option, "lora": _lora(option.get("lora", ""))}
        if fields.pop("chat", False):
            records.append(as_record(ChatRequest, fields | {"messages": [{"role": "user", "content": prompt}]}))
        else:
            records.append(as_record(CompletionRequest, fields | {"prompt": prompt}))
    return records


def embedding_request(
    model: str, given: Mapping[str, TensorValue], parameters: Parameters, wishes: Sequence[str], schedule: Schedule
) -> EmbeddingRequest:
    """Return the request for a language model's embeddings, with the parameter `pooling`. Raises InvalidRequest."""
    if len(wishes) > 1:
        raise InvalidRequest(f"outputs: {', '.join(wishes)}; an embedding is asked for alone", "outputs")
    if others := given.keys() - {"text_input"}:
        raise InvalidRequest(f"{min(others)}: an embedding takes text_input alone", min(others))
    fields = {"input": texts(given["text_input"]), "pooling": parameters.get("pooling")}
    return as_record(EmbeddingRequest, fields | schedule.fields_of(model))


def scoring_request(
    model: str, given: Mapping[str, TensorValue], parameters: Parameters, schedule: Schedule
) -> ScoringRequest:
    """Return the request for the scores of texts, beside their queries if there are any. Raises InvalidRequest.

    The parameter `use_activation` false asks for the numbers before the activation.
    """
    items: Sequence[Any] = texts(given["text"])
    if "query" in given:
        queries = texts(given["query"])
        if len(queries) not in (1, len(items)):
            raise InvalidRequest(
                f"query: {len(queries)} elements for {len(items)} texts, expected 1 or {len(items)}", "query"
            )
        items = list(zip(queries * (len(items) // len(queries)), items, strict=True))
    use_activation = parameters.get("use_activation", True)
    if not isinstance(use_activation, bool):
        raise InvalidRequest(f"use_activation: expected true or false, got {shown(use_activation)}", "use_activation")
    fields = {"input": items, "raw": not use_activation}
    return as_record(ScoringRequest, fields | schedule.fields_of(model))


def _options(
    num_prompts: int, given: Mapping[str, TensorValue], specs: Sequence[TensorSpec], parameters: Parameters
) -> list[dict[str, Any]]:
    options: list[dict[str, Any]] = [{} for _ in range(num_prompts)]
    for spec in specs:
        value = given.get(spec.name)
        if value is not None:
            if (number := len(value.data)) not in (1, num_prompts):
                raise InvalidRequest(
                    f"{spec.name}: {number} elements for {num_prompts} prompts, expected 1 or {num_prompts}", spec.name
                )
            elements = _elements(value)
        if spec.name in parameters:
            elements = [_parameter(spec, value, parameters[spec.name])]
        elif value is None:
            continue
        for index, option in enumerate(options):
            option[spec.name] = elements[index % len(elements)]
    return options


def _elements(value: TensorValue) -> list[Any]:
    if value.datatype == "BYTES":
        return list(texts(value))
    if value.datatype == "FP32":
        # The shortest decimal that is this number, as a client of JSON would have written it: 0.7, not 0.69999998.
        return [float(str(number)) for number in value.data]
    elements: list[Any] = value.data.tolist() if value.data.ndim == 1 else list(value.data)
    return elements


def _parameter(spec: TensorSpec, given: TensorValue | None, parameter: Any) -> Any:
    if spec.datatype not in _PARAMETER_TYPES:
        raise InvalidRequest(f"{spec.name}: an input of {spec.datatype}, which no parameter can be", spec.name)
    types, wanted = _PARAMETER_TYPES[spec.datatype]
    if given is not None:
        raise InvalidRequest(f"{spec.name}: given as an input and as a parameter", spec.name)
    if not isinstance(parameter, types) or (isinstance(parameter, bool) and bool not in types):
        raise InvalidRequest(f"{spec.name}: expected {wanted}, got {shown(parameter)}", spec.name)
    return parameter


def _stop(given: Mapping[str, TensorValue], parameters: Parameters) -> list[str]:
    """Return the stop strings: every element is for every prompt."""
    if "stop" in parameters:
        return [_parameter(TensorSpec("stop", "BYTES", (-1,)), given.get("stop"), parameters["stop"])]
    return texts(given["stop"]) if "stop" in given else []


def _lora(text: str) -> tuple[LoraUse, ...]:
    """Parse `bold:0.8,thin`: bold at 0.8, thin at 1."""
    if (number := text.count(",") + 1) > MAX_LORAS:
        raise InvalidRequest(f"lora: {number} adapters, at most {MAX_LORAS} are allowed", "lora")
    return tuple(_use(part, "lora") for part in (text.split(",") if text.strip() else ()))


def _image_prompts(text: str | None, image: Any) -> list[dict[str, Any]]:
    """Return the IP-Adapter that `look:0.8` names, with its image (height, width, 3); none for an empty text."""
    if (text is None and image is None) or text == "":
        return []
    if text is None or image is None:
        lacking, given = ("ip_adapter", "ip_adapter_image") if text is None else ("ip_adapter_image", "ip_adapter")
        raise InvalidRequest(f"{lacking}: missing beside {given}; an IP-Adapter's name goes with its image", lacking)
    use = _use(text, "ip_adapter")
    return [{"name": use.name, "scale": use.scale, "image": image}]


def _use(text: str, field: str) -> LoraUse:
    """Parse `bold:0.8`: bold at 0.8, or at 1 without a number."""
    name, _, scale = text.strip().partition(":")
    try:
        return as_record(LoraUse, {"name": name, "scale": float(scale or 1)})
    except (ValueError, InvalidRequest):
        raise InvalidRequest(
            f"{field}: expected name:scale with scales from -10 to 10, got {shown(text)}", field
        ) from None


_MAX_TIMEOUT_US: Final = 2**63 - 1
_SEQUENCE: Final = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The priority and time limit of a request, of Triton's schedule policy.

    `priority` 1 is the most urgent, 0 the model's default. `timeout_s` bounds the whole request.
    """

    priority: int = 0
    timeout_s: float | None = None

    def fields_of(self, model: str) -> dict[str, Any]:
        """Return the fields of a request's record."""
        return {"model": model, "priority": self.priority, "timeout_s": self.timeout_s}


def schedule_of(parameters: Parameters) -> Schedule:
    """Return the schedule. Unknown parameters are ignored, as the protocol says.

    Raises InvalidRequest, also for the parameters of sequences, which are not supported.
    """
    for name in _SEQUENCE:
        if parameters.get(name, 0) not in (0, "", "0"):
            raise InvalidRequest(f"{name}: no model here keeps a state between requests; leave it out", name)
    timeout_us = _whole("timeout", parameters, _MAX_TIMEOUT_US, " microseconds")
    priority = _whole("priority", parameters, MAX_PRIORITY_LEVELS)
    return Schedule(priority, timeout_us / 1e6 if timeout_us else None)


def _whole(name: str, parameters: Parameters, most: int, unit: str = "") -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidRequest(f"{name}: expected a whole number from 0 to {most}{unit}, got {shown(value)}", name)
    return value
