"""The settings of `cluster/admission` and `cluster/placement`: queues, turns, and the placement of models."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from configs.batching import MAX_PRIORITY_LEVELS
from configs.model import ModelId, StrictModel

DEFAULT_TENANT: Final = "default"
TenantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}$")]


class TenantConfig(StrictModel):
    """One tenant. Tenants with work share the replicas by their weights; the part of an idle one goes to the others."""

    weight: float = Field(1.0, ge=0.001, le=1000, allow_inf_nan=False)


class AdmissionConfig(StrictModel):
    """The admission queue of the cluster, in front of all replicas. Requests beyond its bounds get a 429 at once."""

    max_waiting: int = Field(4096, ge=1, le=1_000_000, description="maximum waiting requests, all models together")
    max_waiting_per_model: int = Field(1024, ge=1, le=1_000_000, description="maximum waiting requests per model")
    default_timeout_s: float | None = Field(
        None,
        ge=0.001,
        allow_inf_nan=False,
        description="timeout of requests that name none; default: http.request_timeout_s, which also bounds the "
        "timeouts that requests name",
    )
    priority_levels: int = Field(
        3, ge=1, le=MAX_PRIORITY_LEVELS, description="number of priorities; 1 is the most urgent"
    )
    default_priority: int = Field(2, ge=1, description="priority of requests that name none")
    max_overtakes: int = Field(
        64, ge=0, le=1_000_000, description="maximum later requests that start before the oldest waiting one"
    )
    tenants: dict[TenantName, TenantConfig] = Field(
        {}, max_length=1000, description=f"tenants by name; requests that name none belong to {DEFAULT_TENANT!r}"
    )
    unknown_tenants: Literal["refuse", "default"] = Field(
        "refuse", description=f"requests of unlisted tenants: refused with 400, or treated as {DEFAULT_TENANT!r}"
    )
    max_running_pipelines: int = Field(64, ge=1, le=100_000, description="maximum concurrent pipeline requests")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.default_priority > self.priority_levels:
            raise ValueError(
                f"default_priority {self.default_priority} is beyond priority_levels {self.priority_levels}"
            )
        return self

    def weight_of(self, tenant: str) -> float:
        """Return a tenant's weight; 1 for one that is not listed."""
        listed = self.tenants.get(tenant)
        return listed.weight if listed else 1.0


class SloClassConfig(StrictModel):
    """A service class: the target latency of its requests, and the weight of a second of their waiting."""

    target_s: float = Field(60.0, gt=0, le=86_400, allow_inf_nan=False)
    weight: float = Field(1.0, ge=0.001, le=1000, allow_inf_nan=False)


_SLO_CLASSES: Final = {
    "interactive": SloClassConfig(target_s=15.0, weight=4.0),
    "standard": SloClassConfig(),
    "batch": SloClassConfig(target_s=600.0, weight=0.25),
}
_STANDARD: Final = "standard"


class ScalingConfig(StrictModel):
    """Automatic scaling: the number of workers follows the load; to zero with `min_workers` 0, spare ones and all."""

    min_workers: int = Field(1, ge=0, le=10_000, description="minimum workers; 0: none while there are no requests")
    max_workers: int = Field(ge=1, le=10_000, description="maximum workers")
    target_utilization: float = Field(
        0.7, gt=0, le=1, allow_inf_nan=False, description="share of their time that workers should be busy"
    )
    drain_s: float = Field(
        10.0, gt=0, le=3600, allow_inf_nan=False, description="seconds within which the queue should be served"
    )
    downscale_delay_s: float = Field(
        60.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="seconds that fewer workers must suffice before one stops",
    )
    to_zero_delay_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="seconds without a request before the last worker stops",
    )
    spare_workers: int = Field(
        1,
        ge=0,
        le=100,
        description="idle workers kept in addition to those that work, within max_workers: one takes work at once, "
        "where a new process needs many seconds. Each reserves what a worker reserves; none is kept while no worker is "
        "wanted",
    )

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers is {self.min_workers}, more than max_workers, {self.max_workers}")
        return self


class ControllerConfig(StrictModel):
    """The controller, which places models on workers."""

    enabled: bool = Field(True, description="false: every worker switches to the model of the next request")
    policy: Literal["latency-first", "throughput-first"] = Field(
        "latency-first",
        description="throughput-first switches only for work that takes several times as long as the switch",
    )
    tick_s: float = Field(
        0.25, ge=0.02, le=1.0, allow_inf_nan=False, description="maximum seconds between two decisions"
    )
    scaling: ScalingConfig | None = Field(
        None, description="automatic scaling; without it there are always worker.num_replicas workers"
    )
    slo_classes: dict[str, SloClassConfig] = Field(
        {}, max_length=100, description=f"service classes by name; {', '.join(_SLO_CLASSES)} exist and may be replaced"
    )
    models: dict[ModelId, str] = Field(
        {}, max_length=100_000, description=f"service class of each model; default: {_STANDARD!r}"
    )

    @model_validator(mode="after")
    def _scaling_needs_controller(self) -> Self:
        if self.scaling is not None and not self.enabled:
            raise ValueError("scaling needs the controller; it is off (`enabled: false`)")
        return self

    @model_validator(mode="after")
    def _classes_are_known(self) -> Self:
        known = _SLO_CLASSES.keys() | self.slo_classes.keys()
        for model, name in self.models.items():
            if name not in known:
                raise ValueError(f"models.{model}: no service class {name!r} (known: {', '.join(sorted(known))})")
        return self

    def slo_of(self, model: str) -> tuple[str, SloClassConfig]:
        """Return the name of a model's service class, and the class."""
        name = self.models.get(model, _STANDARD)
        return name, self.slo_classes.get(name) or _SLO_CLASSES[name]
