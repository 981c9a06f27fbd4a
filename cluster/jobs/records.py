"""Records of jobs, as they travel between the ingresses and their owner."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Status = Literal["queued", "running", "done", "failed", "cancelled"]
Order = Literal["asc", "desc"]
Headers = tuple[tuple[str, str], ...]
BATCHES: Final = "/v1/batches"  # the endpoint of jobs whose lines are requests


@dataclass(frozen=True, slots=True)
class Webhook:
    """The address to be told of a job's end, and the secret that signs what is sent there."""

    url: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class NewJob:
    """A request to keep. `key` is the name of its API key, "" without keys; its answers repeat the `facts`.

    A second one of a key with the same `idempotency_key` is the first; so is one with the same `number`, which is added
    again because the answer was lost.
    """

    key: str
    endpoint: str
    body: bytes = field(repr=False)
    headers: Headers = ()
    priority: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    idempotency_key: str | None = None
    prefix: str = "job"
    webhook: Webhook | None = None
    number: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def id(self) -> str:
        return f"{self.prefix}_{self.number}"


@dataclass(frozen=True, slots=True)
class JobError:
    """The reason why a job has no answer."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """The head of an endpoint's answer; its body is the result file. `error` is that of a failed one."""

    status: int
    headers: Headers = ()
    error: JobError | None = None

    @property
    def is_good(self) -> bool:
        """Return whether the endpoint succeeded."""
        return self.status < 400


@dataclass(frozen=True, slots=True)
class Job:
    """A job. `num_starts` counts its starts, `progress` is in percent, None if it is not known. Later ones have higher
    numbers.
    """

    id: str
    key: str
    endpoint: str
    status: Status
    created_s: float
    started_s: float | None
    ended_s: float | None
    expires_s: float | None
    num_starts: int
    num_bytes: int
    facts: Mapping[str, Any]
    error: JobError | None = None
    answer: JobAnswer | None = None
    progress: int | None = None
    number: int = 0

    @property
    def has_ended(self) -> bool:
        """Return whether the job is in a final state."""
        return self.ended_s is not None


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job for an ingress to run. `start` tells this start from abandoned ones."""

    id: str
    start: int
    key: str
    endpoint: str
    headers: Headers
    body: bytes = field(repr=False)
    created_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobFilter:
    """The filter of a key's listed jobs; None is for all."""

    status: Status | None = None
    endpoint: str | None = None
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job that a watcher has seen, and waits for a change of."""

    status: Status
    progress: int | None
    num_starts: int


@dataclass(frozen=True, slots=True)
class ClientFile:
    """A file of a key. `ended_s` is None while it is written; its reader finds it afterwards."""

    id: str
    key: str
    name: str
    purpose: str
    num_bytes: int
    created_s: float
    expires_s: float | None
    ended_s: float | None


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of a line of a batch, as a line of its file: that of outputs if it is good, else that of errors."""

    number: int
    content: bytes = field(repr=False)
    is_good: bool


@dataclass(frozen=True, slots=True)
class DueHook:
    """A job that has ended, whose webhook is to be told; `num_tries` counts this try."""

    job: Job
    webhook: Webhook
    num_tries: int
