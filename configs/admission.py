"""The settings of `cluster/control`: requests that wait, whose turn it is, and which model is on which worker."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from configs.batching import MAX_PRIORITY_LEVELS
from configs.model import ModelId, StrictModel

DEFAULT_TENANT: Final = "default"
TenantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}$")]


class TenantConfig(StrictModel):
    """One tenant. Tenants with work share the replicas by their weights; who has none leaves its part to the others."""

    weight: float = Field(1.0, ge=0.001, le=1000, allow_inf_nan=False)


class AdmissionConfig(StrictModel):
    """The admission queue of the cluster, in front of all replicas. Requests beyond its bounds get 429 at once."""

    max_waiting: int = Field(4096, ge=1, le=1_000_000, description="requests that may wait, for all models together")
    max_waiting_per_model: int = Field(1024, ge=1, le=1_000_000, description="requests that may wait for one model")
    default_timeout_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="deadline of requests that give themselves none; default: http.request_timeout_s, which also "
        "bounds what they may give themselves",
    )
    priority_levels: int = Field(3, ge=1, le=MAX_PRIORITY_LEVELS, description="1 is the most urgent")
    default_priority: int = Field(2, ge=1, description="of requests that say none")
    max_overtakes: int = Field(
        64, ge=0, le=1_000_000, description="requests that may go before the oldest one although they came later"
    )
    tenants: dict[TenantName, TenantConfig] = Field(
        {}, max_length=1000, description=f"by name; requests that name no tenant count as {DEFAULT_TENANT!r}"
    )
    unknown_tenants: Literal["refuse", "default"] = Field(
        "refuse", description=f"requests of tenants that are not listed: 400, or they count as {DEFAULT_TENANT!r}"
    )
    max_running_pipelines: int = Field(64, ge=1, le=100_000, description="pipeline requests under way at once")

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
    """A class of service: the latency that its requests should keep, and how much a second of their waiting weighs."""

    target_s: float = Field(60.0, gt=0, le=86_400, allow_inf_nan=False)
    weight: float = Field(1.0, ge=0.001, le=1000, allow_inf_nan=False)


_SLO_CLASSES: Final = {
    "interactive": SloClassConfig(target_s=15.0, weight=4.0),
    "standard": SloClassConfig(),
    "batch": SloClassConfig(target_s=600.0, weight=0.25),
}
_STANDARD: Final = "standard"


class ScalingConfig(StrictModel):
    """Workers that come and go with the load."""

    min_workers: int = Field(1, ge=0, le=10_000, description="0: none while nobody asks for anything")
    max_workers: int = Field(ge=1, le=10_000)
    target_utilization: float = Field(
        0.7, gt=0, le=1, allow_inf_nan=False, description="the part of their time that workers should be busy"
    )
    drain_s: float = Field(
        10.0, gt=0, le=3600, allow_inf_nan=False, description="what waits should be served within so long"
    )
    downscale_delay_s: float = Field(
        60.0, ge=0, le=86_400, allow_inf_nan=False, description="fewer workers must have sufficed for so long"
    )
    to_zero_delay_s: float = Field(
        300.0, ge=0, le=86_400, allow_inf_nan=False, description="the last worker goes after so long without a request"
    )

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers is {self.min_workers}, more than max_workers, {self.max_workers}")
        return self


class ControllerConfig(StrictModel):
    """The controller, which decides which model is on which worker."""

    enabled: bool = Field(True, description="without it, every worker switches to what it is asked for")
    policy: Literal["latency-first", "throughput-first"] = Field(
        "latency-first", description="throughput-first switches only for work of several times the switch's duration"
    )
    tick_s: float = Field(0.25, ge=0.02, le=1.0, allow_inf_nan=False, description="the longest between two decisions")
    scaling: ScalingConfig | None = Field(
        None, description="workers come and go; without it there are always worker.num_replicas"
    )
    slo_classes: dict[str, SloClassConfig] = Field(
        {}, max_length=100, description=f"by name, beside or in place of {', '.join(_SLO_CLASSES)}"
    )
    models: dict[ModelId, str] = Field(
        {}, max_length=100_000, description=f"the class of service of a model; {_STANDARD!r} where none is given"
    )

    @model_validator(mode="after")
    def _who_scales_is_there(self) -> Self:
        if self.scaling is not None and not self.enabled:
            raise ValueError("scaling needs the controller; it is off (`enabled: false`)")
        return self

    @model_validator(mode="after")
    def _classes_are_known(self) -> Self:
        known = _SLO_CLASSES.keys() | self.slo_classes.keys()
        for model, name in self.models.items():
            if name not in known:
                raise ValueError(f"models.{model}: no class of service {name!r} (known: {', '.join(sorted(known))})")
        return self

    def slo_of(self, model: str) -> tuple[str, SloClassConfig]:
        """Return the name of a model's class of service, and the class."""
        name = self.models.get(model, _STANDARD)
        return name, self.slo_classes.get(name) or _SLO_CLASSES[name]
