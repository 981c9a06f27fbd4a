"""The settings of jobs: requests that outlive their connection, and their results."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from configs.model import Bytes, StrictModel

_MOST_S = 366 * 86_400.0
MAX_FILE_BYTES = 2**28


WebhookHost = Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?$")]


class WebhooksConfig(StrictModel):
    """Webhooks: what is told to a client's own server when its job ends."""

    hosts: tuple[WebhookHost, ...] = Field((), description="hosts, or host:port, that may be told; no other is called")
    may_be_inner: bool = Field(False, description="whether these hosts may be at inner addresses")


class JobsConfig(StrictModel):
    """Jobs of /v1/jobs, /v1/videos, /v1/batches and `background: true`, and files of /v1/files, kept in the folder
    `jobs` of the store."""

    keep_s: float = Field(
        86_400.0, gt=0, le=_MOST_S, allow_inf_nan=False, description="seconds that a result is kept after its job ended"
    )
    max_bytes: Bytes = Field(
        2**32,
        ge=2**20,
        validate_default=True,
        description="maximum size of all results, and of the bodies of unfinished jobs; the oldest results are removed",
    )
    max_jobs: int = Field(10_000, ge=1, le=1_000_000, description="maximum jobs kept; the oldest ended are removed")
    max_unfinished: int = Field(
        64, ge=1, le=1_000_000, description="maximum unfinished jobs of one key; further ones are refused"
    )
    max_running: int = Field(
        64,
        ge=1,
        le=16_384,
        description="maximum jobs that one ingress has in progress, those in the admission queue included; one key has "
        "at most half of them",
    )
    max_result_bytes: Bytes = Field(
        2**28, ge=2**10, le=2**30, validate_default=True, description="maximum size of one result"
    )
    timeout_s: float = Field(
        3600.0,
        gt=0,
        le=_MOST_S,
        allow_inf_nan=False,
        description="maximum duration of a job from its start, its wait in the admission queue included",
    )
    max_starts: int = Field(
        20, ge=1, le=10_000, description="maximum starts of a job whose ingress died; then it has failed"
    )

    max_file_bytes: Bytes = Field(
        MAX_FILE_BYTES, ge=2**10, validate_default=True, description="maximum size of one file of a client"
    )
    max_files_bytes: Bytes = Field(
        2**34,
        ge=2**20,
        validate_default=True,
        description="maximum size of all files of clients and batches; where there are keys, one has at most half",
    )
    max_models_bytes: Bytes = Field(
        2**36,
        ge=0,
        validate_default=True,
        description="maximum size of all uploaded models and LoRAs; 0: none can be uploaded",
    )
    keep_files_s: float = Field(
        30 * 86_400.0,
        gt=0,
        le=_MOST_S,
        allow_inf_nan=False,
        description="seconds that a client's file is kept; batches' files are kept for keep_s",
    )

    webhooks: WebhooksConfig = WebhooksConfig()

    @model_validator(mode="after")
    def _results_fit(self) -> Self:
        if self.max_result_bytes > self.max_bytes:
            raise ValueError(f"max_result_bytes is {self.max_result_bytes}, more than max_bytes, {self.max_bytes}")
        return self
