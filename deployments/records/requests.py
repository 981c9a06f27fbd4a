"""The base of all requests: strict fields, the terms that the ingress serves a request by, and the names of fields."""

from __future__ import annotations

from collections.abc import Mapping
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
        # A misspelt field shows as unknown, and often as a missing one too: the first says more.
        first = min(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
        where = ".".join(str(part) for part in first["loc"])
        text = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
        known = ", ".join(class_.model_fields)
        raise InvalidRequest(f"{where or class_.__name__}: {text} (fields: {known})", where or None) from None


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
