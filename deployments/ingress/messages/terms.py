"""The terms of a request, and its admission by them: its ticket in the queue, its places, and its refusal.

Terms are its priority, its tenant and its time, from headers, metadata or records. They accompany the
request in a context variable: its calls of other models have the same terms.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

from cluster.admission.dispatcher import Dispatcher, NotAdmitted
from cluster.admission.fair_slots import release_read_slot
from cluster.admission.records import Demand, Refusal
from configs.admission import DEFAULT_TENANT, AdmissionConfig
from configs.cluster import ClusterConfig, ModelReplicaConfig
from deployments.ingress.access.callers import current_max_priority
from deployments.records import (
    ChatRequest,
    ClipRequest,
    CompletionRequest,
    EmbeddingRequest,
    HeadRequest,
    ImageRequest,
    ProgramRequest,
    ScoringRequest,
)
from deployments.records.errors import DeadlineExceeded, InvalidRequest, ModelUnavailable, QueueFull, ServiceError

TIMEOUT: Final = "x-request-timeout-seconds"
PRIORITY: Final = "x-priority"
TENANT: Final = "x-tenant"
_MAX_SHOWN: Final = 64
WORKER: Final = "worker"
ENCODER: Final = "text_encoder"
PIPELINES: Final = "pipelines"
_OF_ENCODER: Final = frozenset({"embedding", "reranker", "classifier", "head", "program"})
_CHARS_PER_TOKEN: Final = 4
_TOKENS_PER_TEXT: Final = 8  # the fixed cost of a text, in tokens
_MANY_TOKENS: Final = 256  # of an answer without a limit in its request
_PROMPT_TOKENS: Final = 8  # of a language model's prompt, which take as long as one of an answer
_HEADS_AT_ONCE: Final = 64
Request = (
    ImageRequest
    | ClipRequest
    | ChatRequest
    | CompletionRequest
    | EmbeddingRequest
    | ScoringRequest
    | HeadRequest
    | ProgramRequest
)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a request: `priority` 0 is the default one, `tenant` "" none.

    `is_inner`: it is a part of a request that was admitted. `is_trusted`: the tenant is that of an API key, and need
    not be listed in the config. `waited_s`: how long the request waited to be read; its time began before.
    `max_timeout_s`: the longest time that it may have, in place of other requests'; a job's.
    """

    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    is_inner: bool = False
    is_trusted: bool = False
    waited_s: float = 0.0
    max_timeout_s: float | None = None

    def within_rights(self, config: AdmissionConfig) -> Terms:
        """Return the terms, with a too urgent priority lowered to the most urgent one of the caller's key."""
        most = min(current_max_priority.get() or config.default_priority, config.priority_levels)
        return self if (self.priority or config.default_priority) >= most else replace(self, priority=most)

    def checked(self, config: AdmissionConfig) -> Terms:
        """Return the terms with a priority and a tenant of `config`. Raises InvalidRequest."""
        if self.priority > config.priority_levels:
            raise InvalidRequest(
                f"priority {self.priority} is not served (known: 1, most urgent, to {config.priority_levels})",
                "priority",
            )
        tenant = self.tenant or DEFAULT_TENANT
        if tenant not in config.tenants and not self.is_trusted and tenant != DEFAULT_TENANT:
            if config.unknown_tenants == "refuse":
                known = ", ".join(sorted({DEFAULT_TENANT, *config.tenants})[:20])
                raise InvalidRequest(f"{TENANT}: no tenant {_shown(tenant)} (known: {known})", TENANT)
            tenant = DEFAULT_TENANT
        return replace(self, priority=self.priority or config.default_priority, tenant=tenant)


current_terms: ContextVar[Terms] = ContextVar("current_terms", default=Terms())  # noqa: B039  # it is frozen


def read_terms(headers: Mapping[str, str], key_tenant: str = "") -> Terms:
    """Return the terms of headers or gRPC metadata. The tenant of an API key goes before the header's.

    Raises InvalidRequest naming the header.
    """
    priority = headers.get(PRIORITY, "").strip()
    if priority and not (priority.isascii() and priority.isdigit() and 1 <= len(priority) <= 9 and int(priority)):
        raise InvalidRequest(
            f"{PRIORITY}: expected a whole number from 1, most urgent, got {_shown(priority)}", PRIORITY
        )
    timeout_s = None
    if text := headers.get(TIMEOUT, "").strip():
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not 0 < timeout_s < math.inf:
            raise InvalidRequest(f"{TIMEOUT}: expected a number of seconds above 0, got {_shown(text)}", TIMEOUT)
    tenant = key_tenant or headers.get(TENANT, "").strip()
    return Terms(int(priority or 0), tenant, timeout_s, is_trusted=bool(key_tenant))


def with_fields(terms: Terms, request: Any) -> Terms:
    """Return the terms with the record's own fields."""
    timeouts = [given for given in (terms.timeout_s, getattr(request, "timeout_s", None)) if given is not None]
    return replace(
        terms,
        priority=getattr(request, "priority", 0) or terms.priority,
        tenant=terms.tenant or getattr(request, "tenant", ""),
        timeout_s=min(timeouts, default=None),
    )


@asynccontextmanager
async def within_request_time(what: str) -> AsyncIterator[None]:
    """Bound a wait without the request's read slot: it counts as a part of the request's time.

    The slot is released first: others are read meanwhile. Raises DeadlineExceeded: the time ended before `what`.
    """
    release_read_slot()
    loop, terms = asyncio.get_running_loop(), current_terms.get()
    start = loop.time()
    try:
        async with asyncio.timeout(None if terms.timeout_s is None else terms.timeout_s - terms.waited_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"the request timed out before {what}", "timeout") from None
    current_terms.set(replace(terms, waited_s=terms.waited_s + loop.time() - start))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")


def demand_of(
    request: Request, terms: Terms, timeout_s: float, config: ClusterConfig, *, is_stock: bool = False
) -> Demand:
    """Return the demand of a request on admission. `terms` are checked, and `request` has its defaults.

    `is_stock`: diffusers' code runs its pipeline. Many of those requests leave the size to the class, which is not
    known here, so their work is counted in steps, whatever their size.
    """
    settings: ModelReplicaConfig = config.worker
    if isinstance(request, ImageRequest | ClipRequest):
        pool, count = WORKER, request.n if isinstance(request, ImageRequest) else 1
        pixels = 1 if is_stock else (request.width or 1) * (request.height or 1)
        work = float(pixels * count * _num_forwards(request))
        share = count / config.worker.max_running_images
    elif isinstance(request, ChatRequest | CompletionRequest):
        pool, num_tokens = WORKER, _MANY_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
        work, share = float(num_tokens) * request.num_texts, request.num_texts / config.worker.max_num_seqs
    elif isinstance(request, EmbeddingRequest | ScoringRequest):
        pool, settings = ENCODER, config.text_encoder
        work = sum(_TOKENS_PER_TEXT + _num_tokens(text) for text in request.input)
        share = len(request.input) / config.text_encoder.max_running
        if isinstance(request, EmbeddingRequest) and request.by_language_model:
            pool, settings, work = WORKER, config.worker, work / _PROMPT_TOKENS
            share = len(request.input) / config.worker.max_num_seqs
    elif isinstance(request, ProgramRequest):
        pool, settings = ENCODER, config.text_encoder
        sizes = [array.shape for array in request.inputs.values() if array.ndim]
        work = float(max((math.prod(shape[:2]) for shape in sizes), default=1))  # rows and tokens of most programs
        share = max((shape[0] for shape in sizes), default=1) / config.text_encoder.max_running
    else:
        pool, settings = ENCODER, config.text_encoder
        work, share = float(len(request.features)), 1 / _HEADS_AT_ONCE
    share = min(1.0, max(share, 1 / settings.max_ongoing_requests))  # Serve refuses more requests of a replica
    version = request.model_version or ""
    return Demand(pool, request.model, work, share, terms.priority, terms.tenant, timeout_s, terms.is_inner, version)


def pools_of(kind: str | None) -> frozenset[str]:
    """Return the pools that models of that kind need; a pipeline may have models of any."""
    if kind == "pipeline":
        return frozenset((WORKER, ENCODER))
    return frozenset((ENCODER if kind in _OF_ENCODER else WORKER,))


def _num_forwards(request: ImageRequest | ClipRequest) -> int:
    """Return the number of computed steps of a request. Others may be extrapolated."""
    steps = request.num_inference_steps or 1
    rule = request.acceleration if isinstance(request, ImageRequest) else None
    return rule.num_computed(steps) if rule else steps


def _num_tokens(text: str | tuple[int | str, ...]) -> float:
    """Return the approximate number of tokens of a text, a pair of texts, or tokens."""
    if isinstance(text, str):
        return len(text) / _CHARS_PER_TOKEN
    return sum(1 if isinstance(part, int) else len(part) / _CHARS_PER_TOKEN for part in text)


def demand_of_pipeline(name: str, terms: Terms, timeout_s: float, max_running: int) -> Demand:
    """Return the demand of a pipeline: a place among the pipelines. Its stages have demands of their own."""
    return Demand(PIPELINES, name, 1.0, 1 / max_running, terms.priority, terms.tenant, timeout_s, terms.is_inner)


class AdmissionSlot:
    """The ticket of one request, and its outcome, from which the queue learns."""

    def __init__(self, queue: Dispatcher, ticket: int) -> None:
        self.is_answered = False
        self.switch_s = 0.0
        self._queue = queue
        self._ticket = ticket
        self._had_replica = False
        self._is_unable = False

    def note_unable(self) -> bool:
        """Note that the replica could not load the model. Return whether another one may be tried."""
        self._is_unable = self._queue.note_unable(self._ticket)
        return self._is_unable

    def replica(self) -> Awaitable[str]:
        """Return an awaitable of the replica, "" for Serve's choice. A further call is for another one."""
        if self._had_replica:
            is_lost, self._is_unable = not self._is_unable, False
            return self._queue.reassign(self._ticket, is_lost=is_lost)
        self._had_replica = True
        return self._queue.slot(self._ticket)


@contextlib.contextmanager
def admitted(queue: Dispatcher, demand: Demand) -> Iterator[AdmissionSlot]:
    """Let a request in for as long as the context lasts, however it ends.

    Raises QueueFull, DeadlineExceeded or ModelUnavailable for a refusal, at once or while it waits for its place.
    """
    ticket = queue.submit(demand)
    release_read_slot()
    slot = AdmissionSlot(queue, ticket)
    try:
        yield slot
    except NotAdmitted as error:
        raise refusal_error(error.refusal, demand.deadline_s, demand.model) from None
    finally:
        queue.leave(ticket, is_answered=slot.is_answered, switch_s=slot.switch_s)


def refusal_error(refusal: Refusal, left_s: float, model: str = "") -> ServiceError:
    """Return a refusal as an error for clients. `left_s` is the time that the request had left when it came."""
    after_s = refusal.retry_after_s
    match refusal.reason:
        case "expired" if left_s <= 0:
            return DeadlineExceeded("the request timed out before it could be read", "timeout")
        case "expired":
            return DeadlineExceeded(f"the request exceeded its timeout of {left_s:g} s", "timeout")
        case "hopeless":
            needs = f"the request takes about {refusal.needs_s:.3g} s"
            return DeadlineExceeded(f"{needs}, more than its timeout of {left_s:g} s leaves", "timeout")
        case "unservable":
            return ModelUnavailable(f"model {model!r}: {refusal.text}", "model")
        case "unread":
            text = "server overloaded: the request would spend most of its timeout queued"
        case "late":
            text = f"server overloaded: the request would take about {refusal.needs_s:.3g} s, longer than its timeout"
        case "crowded":
            text = "queue full: more requests of this length would not be done in time"
        case "model_full":
            text = f"queue full: {refusal.limit} requests wait for model {model!r}, the maximum"
        case "queue_full":
            text = f"queue full: {refusal.limit} requests wait, the maximum"
    return QueueFull(text + (f"; try again in {after_s:.3g} s" if after_s is not None else ""), retry_after_s=after_s)
