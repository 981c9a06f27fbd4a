"""The base of all requests: strict fields, the terms that the ingress serves a request by, and the names of fields.

And what results of all kinds carry: times, switches, use of the cache, warnings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticKnownError

from configs.batching import MAX_PRIORITY_LEVELS
from configs.cluster import MAX_LORAS
from deployments.records.errors import InvalidRequest

TimingsMs = dict[str, float]  # milliseconds by phase: queue, encode, switch, denoise, prefill, generate, decode, total

MAX_SEED = 2**63 - 1  # accepted; drawn seeds are below 2**32
SEED_RULE = "0 to 2^63 - 1, as a whole number; a drawn one is below 2^32, which every JSON reader keeps exactly"
RequestT = TypeVar("RequestT", bound="RequestModel")
Finite = Field(allow_inf_nan=False)
# Bounds of what a request can mean. What one may ask of a cluster is in its config (`LimitsConfig`); see `limits.py`.
MAX_INT32 = 2**31 - 1
Name = Annotated[str, Field(max_length=256)]  # of a model, an adapter or a version
UserName = Annotated[str, Field(max_length=1024)]  # OpenAI's `user`, which nobody here looks at
Count = Annotated[int, Field(ge=1, le=MAX_INT32)]
TenantName = Annotated[str, Field(max_length=128)]  # "" for none; the config knows them
Priority = Annotated[int, Field(ge=0, le=MAX_PRIORITY_LEVELS)]
_MAX_ERRORS: Final = 100  # that are looked at, of those that a request has
_SEQUENCES: Final = frozenset({"list", "tuple", "set", "frozenset"})


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


def warnings_by_item(warnings: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the warnings of a request's items, each with the number of its item unless there is only one."""
    if len(warnings) == 1:
        return tuple(warnings[0])
    return tuple(f"item {number}: {text}" for number, texts in enumerate(warnings) for text in texts)


def failing_fast(schema: CoreSchema) -> CoreSchema:
    """Return a schema whose sequences end at their first error, and whose collections are counted before all else."""
    found: CoreSchema = _failing_fast(schema)
    return found


def _failing_fast(part: Any) -> Any:
    if isinstance(part, list):
        return [_failing_fast(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    found = {name: _failing_fast(inner) for name, inner in part.items()}
    kind, most = found.get("type"), found.get("max_length")
    is_sequence = isinstance(kind, str) and kind in _SEQUENCES
    if is_sequence:
        found["fail_fast"] = True
    if (is_sequence or kind == "dict") and isinstance(most, int):
        name = "Dictionary" if kind == "dict" else str(kind).capitalize()
        count = {"type": "no-info", "function": partial(_checked_length, name, most)}
        return {"type": "function-before", "function": count, "schema": found}
    return found


def _checked_length(name: str, most: int, value: Any) -> Any:
    """Return a collection that is not too long. Raises PydanticKnownError for one that is."""
    if isinstance(value, Mapping | list | tuple) and len(value) > most:
        raise PydanticKnownError("too_long", {"field_type": name, "max_length": most, "actual_length": len(value)})
    return value


class RequestModel(BaseModel, frozen=True, extra="forbid", protected_namespaces=()):
    """The base of requests: unknown fields are refused, and nothing changes a request once it is made.

    A list is validated up to its first wrong item, and a list or mapping that is too long not at all: a megabyte of
    wrong items would make millions of errors, of which one is shown, and right ones as many objects for nothing.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return failing_fast(handler(source))


def as_record(class_: type[RequestT], request: RequestT | Mapping[str, Any]) -> RequestT:
    """Return the request itself, or one made of a mapping of its fields. Raises InvalidRequest naming the field."""
    if isinstance(request, class_):
        return request
    try:
        return class_.model_validate(request)
    except ValidationError as error:
        raise _refusal(class_, request, error) from None


def _refusal(class_: type[RequestModel], fields: Any, error: ValidationError) -> InvalidRequest:
    worst = most_telling(error.errors(include_url=False))
    where = field_path(fields, worst["loc"], missing=worst["type"] == "missing")
    if worst["type"] == "extra_forbidden":
        text = f"unknown field (fields: {', '.join(class_.model_fields)})"
    else:
        text = worst["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{where or class_.__name__}: {text}", where or None)


def most_telling(errors: Sequence[Any], start: int = 0) -> Any:
    """Return the one of pydantic's errors that helps most. Field names are at place `start` of its locations.

    A misspelt field shows as unknown, and often as a missing one too: the first says more. A value that may have
    several forms is wrong in each: what says more is the error in the form that fits it best, and the longest. No more
    than `_MAX_ERRORS` are looked at.
    """
    errors = errors[:_MAX_ERRORS]
    for error in errors:
        if error["type"] == "extra_forbidden":
            return error

    field = errors[0]["loc"][: start + 1]
    same = [error for error in errors if error["loc"][: start + 1] == field]
    num_around = Counter(error["loc"][:-1] for error in same)

    def misfit(error: Any) -> tuple[bool, int, list[int], int]:
        is_other_form = str(error["type"]).endswith(("_type", "_parsing", "missing"))
        items = [-part for part in error["loc"] if isinstance(part, int)]  # those before fit
        return is_other_form, -len(error["loc"]), items, num_around[error["loc"][:-1]]

    return min(same, key=misfit)


def field_path(body: Any, location: tuple[str | int, ...], *, missing: bool) -> str:
    """Return the path of a field without the members of unions, which pydantic names by type in the location."""
    path = []
    for part in location:
        if isinstance(body, Mapping) and (part in body or (missing and part == location[-1])):
            body = body.get(part)
        elif isinstance(body, list | tuple) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        path.append(str(part))
    return ".".join(path)


class ServedRequest(RequestModel):
    """The model of a request, and the terms that it is served by.

    `priority` 1 is the most urgent, 0 the default one. `timeout_s` is the time that the request has in all, and
    `tenant` whose share of the cluster it takes. The ingress sets `model_version`, the fingerprint of the version that
    is current then, so that every replica on the way uses the same one.
    """

    def __init__(self, /, **fields: Any) -> None:
        """Check the fields. Raises InvalidRequest naming one, where pydantic would list all in its own words."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _refusal(type(self), fields, error) from None

    model: Name
    priority: Priority = 0
    tenant: TenantName = ""
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    model_version: str | None = None


class LoraUse(RequestModel):
    """One adapter of a request and its strength."""

    name: Name
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)
    text_scale: float | None = Field(
        None, ge=-10, le=10, allow_inf_nan=False, description="of what it changes in text encoders, if another"
    )


Loras = Annotated[tuple[LoraUse, ...], Field(max_length=MAX_LORAS)]
