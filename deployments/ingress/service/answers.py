"""Answers under /admin, and of the probes: one class each, which the OpenAPI page shows and which writes the JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from cluster.ray_seam.template_records import TemplateStats
from configs.batching import BatchingConfig
from deployments.ingress.messages.responses import Answer
from deployments.ingress.service.catalog import Endpoint
from deployments.ingress.service.queues import AdmissionAnswer

Tier = Literal["host", "device"]


class BuiltModel(TypedDict):
    """The modules of a model in one replica. A module that models share counts for each of them."""

    replica: str
    bytes: int
    leases: int
    pinned: bool


class ModelStatus(Answer):
    """A model: its card, where it is resident by node, which replicas have built it, and its last switch."""

    id: str
    kind: str | None
    state: str
    nbytes: int
    base: tuple[str, ...]
    description: str
    error: str
    defaults: dict[str, Any]
    fingerprint: str
    labels: tuple[str, ...]
    endpoint: Endpoint | None
    encodes_itself: bool
    sees: bool
    resident: dict[str, Any]
    built: list[BuiltModel]
    last_switch: dict[str, Any] | None


class Unreachable(Answer):
    """The reason of a missing answer."""

    unreachable: str


class TemplatesAnswer(Answer):
    """The templates of this node, and the reasons of processes that imported everything themselves, each once."""

    templates: list[TemplateStats]
    problems: list[str]


class ClusterAnswer(Answer):
    """The cluster at a glance: a page of its models and nodes, and all replicas; each may be `unreachable` instead.

    `registry` is there only when it did not answer, `templates` only if Ray's processes start as copies of templates.
    `node_problems` are sentences about joined nodes that lack something, all of them on every page.
    """

    cluster: str
    registry: Unreachable | None = None
    num_models: int
    num_nodes: int
    models: list[ModelStatus]
    nodes: list[dict[str, Any]]
    node_problems: list[str] = Field(default_factory=list)
    workers: list[dict[str, Any]]
    text_encoders: list[dict[str, Any]]
    admission: AdmissionAnswer | None = None
    templates: TemplatesAnswer | None = None


class ImportAnswer(Answer):
    """The progress of a model that enters the store: bytes read, of a download or of its files."""

    id: str
    done_bytes: int
    total_bytes: int


class ImportsAnswer(Answer):
    """The running imports, without models that wait for their turn."""

    imports: list[ImportAnswer]


class UnregisteredAnswer(Answer):
    """The removed model. `orphans` are adapters that have lost a base."""

    id: str
    deleted: Literal[True]
    orphans: tuple[str, ...]


class PrefetchAnswer(Answer):
    """The problems by node and, for the tier `device`, by replica; "" for nothing."""

    model: str
    tier: Tier
    nodes: dict[str, str]
    workers: list[str] | None = None
    text_encoders: list[str] | None = None


class PinAnswer(Answer):
    """The problems by node and by replica; "" for nothing."""

    model: str
    pinned: bool
    nodes: dict[str, str]
    workers: list[str]
    text_encoders: list[str]


class RetunedAnswer(Answer):
    """The batch policy from now on, and the problems by replica; "" for nothing."""

    batching: BatchingConfig
    text_encoders: list[str]


class BatchingAnswer(Answer):
    """The batch policy, and by replica its own `config` and `stats`, or `unreachable`."""

    batching: BatchingConfig
    text_encoders: list[dict[str, Any]]


class HealthAnswer(Answer):
    """The state of the service. `models_ready` of `models` can be used.

    `starting`: none yet. `loading`: others are still entering the store, or wait for their first replica. `degraded`:
    others cannot be used.
    """

    status: Literal["starting", "loading", "ok", "degraded"]
    models_ready: int
    models: int
