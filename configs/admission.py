"""Admission: how many requests may wait, for how long, and whose turn it is. The settings of `cluster/control`."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from configs.batching import MAX_PRIORITY_LEVELS
from configs.model import StrictModel

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
