"""A request in the admission queue: what it needs there, its ticket, its places, and why it was refused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Iterator
from typing import Final

from cluster.admission.dispatcher import Dispatcher, NotAdmitted
from cluster.admission.fair_slots import release_read_slot
from cluster.admission.records import Demand, Refusal
from configs.cluster import ClusterConfig, ModelReplicaConfig
from deployments.errors import DeadlineExceeded, ModelUnavailable, QueueFull, ServiceError
from deployments.ingress.terms import Terms
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

WORKER: Final = "worker"
ENCODER: Final = "text_encoder"
PIPELINES: Final = "pipelines"
_OF_ENCODER: Final = frozenset({"embedding", "reranker", "classifier", "head", "program"})
_CHARS_PER_TOKEN: Final = 4
_TOKENS_PER_TEXT: Final = 8  # what a text costs beside its tokens, in tokens
_MANY_TOKENS: Final = 256  # of an answer whose request does not say
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


def demand_of(
    request: Request, terms: Terms, timeout_s: float, config: ClusterConfig, *, is_stock: bool = False
) -> Demand:
    """Return what a request asks for. `terms` are checked, and `request` has its defaults.

    `is_stock`: diffusers' code runs its pipeline. Many of those requests leave the size to the class, which nobody
    knows here, so its work is counted in steps, whatever their size.
    """
    settings: ModelReplicaConfig = config.worker
    if isinstance(request, ImageRequest | ClipRequest):
        pool, count = WORKER, request.n if isinstance(request, ImageRequest) else 1
        pixels = 1 if is_stock else (request.width or 1) * (request.height or 1)
        work = float(pixels * count * (request.num_inference_steps or 1))
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
    share = min(1.0, max(share, 1 / settings.max_ongoing_requests))  # a replica refuses what Serve does not let in
    version = request.model_version or ""
    return Demand(pool, request.model, work, share, terms.priority, terms.tenant, timeout_s, terms.is_inner, version)


def pools_of(kind: str | None) -> frozenset[str]:
    """Return the pools without which no model of that kind can be asked; a pipeline may have models of any."""
    if kind == "pipeline":
        return frozenset((WORKER, ENCODER))
    return frozenset((ENCODER if kind in _OF_ENCODER else WORKER,))


def _num_tokens(text: str | tuple[int | str, ...]) -> float:
    """Return about how many tokens a text has, a pair of texts, or what is tokens already."""
    if isinstance(text, str):
        return len(text) / _CHARS_PER_TOKEN
    return sum(1 if isinstance(part, int) else len(part) / _CHARS_PER_TOKEN for part in text)


def demand_of_pipeline(name: str, terms: Terms, timeout_s: float, max_running: int) -> Demand:
    """Return what a pipeline asks for: its place among the pipelines. Its stages ask for themselves."""
    return Demand(PIPELINES, name, 1.0, 1 / max_running, terms.priority, terms.tenant, timeout_s, terms.is_inner)


class AdmissionSlot:
    """The ticket of one request, and what became of it: the queue learns from that."""

    def __init__(self, queue: Dispatcher, ticket: int) -> None:
        self.is_answered = False
        self.switch_s = 0.0
        self._queue = queue
        self._ticket = ticket
        self._had_replica = False
        self._is_unable = False

    def is_elsewhere(self) -> bool:
        """Take in that the replica could not load the model. Return whether another one may be asked."""
        self._is_unable = self._queue.note_unable(self._ticket)
        return self._is_unable

    def replica(self) -> Awaitable[str]:
        """Return the replica to wait for, "" for whichever Serve chooses. Asked again, another one."""
        if self._had_replica:
            is_lost, self._is_unable = not self._is_unable, False
            return self._queue.reassign(self._ticket, is_lost=is_lost)
        self._had_replica = True
        return self._queue.slot(self._ticket)


@contextlib.contextmanager
def admitted(queue: Dispatcher, demand: Demand) -> Iterator[AdmissionSlot]:
    """Let a request in for as long as the context lasts, however it ends.

    Raises QueueFull, DeadlineExceeded or ModelUnavailable when it is refused, at once or while it waits for its place.
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
    """Return a refusal as the error that clients get. `left_s` is what was left of the request's time when it came."""
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
