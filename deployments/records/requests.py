"""The base of all requests: strict fields, the terms that the ingress serves a request by, and the names of fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.batching import MAX_PRIORITY_LEVELS
from deployments.errors import InvalidRequest

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
        worst = most_telling(error.errors())
        where = field_path(request, worst["loc"], missing=worst["type"] == "missing")
        if worst["type"] == "extra_forbidden":
            text = f"unknown field (fields: {', '.join(class_.model_fields)})"
        else:
            text = worst["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{where or class_.__name__}: {text}", where or None) from None


def most_telling(errors: Sequence[Any], start: int = 0) -> Any:
    """Return the one of pydantic's errors that helps most. Field names are at place `start` of its locations.

    A misspelt field shows as unknown, and often as a missing one too: the first says more. A value that may have
    several forms is wrong in each: what says more is the error in the form that fits it best.
    """
    for error in errors:
        if error["type"] == "extra_forbidden":
            return error

    field = errors[0]["loc"][: start + 1]
    same = [error for error in errors if error["loc"][: start + 1] == field]

    def misfit(error: Any) -> tuple[bool, int, int]:
        is_other_form = str(error["type"]).endswith(("_type", "_parsing", "missing"))
        depth, around = len(error["loc"]), error["loc"][:-1]
        return is_other_form, -depth, sum(other["loc"][:-1] == around for other in same)

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

    model: Name
    priority: Priority = 0
    tenant: TenantName = ""
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    model_version: str | None = None


class LoraUse(RequestModel):
    """One adapter of a request and its strength."""

    name: Name
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)
