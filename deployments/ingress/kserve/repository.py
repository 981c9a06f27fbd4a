"""Triton's model repository and statistics extensions over the models of the cluster.

The repository lists models, brings them near and unloads them. It differs from Triton, which loads and unloads on an
operator's call only:

- Every model of the directory can be used at any time; a request brings its weights. `load` does that beforehand
  and returns when the model is usable.
- `unload` takes the weights out of replicas and nodes and makes the model UNAVAILABLE, "unloaded", for readiness and
  index alike, in the whole cluster. Requests are not refused: the next one, or `load`, brings it back, and it is
  READY again. Components that running requests or pins hold stay, and the unload fails with a Conflict that says so.
- An adapter is no entry of its own, and a pipeline has no weights of its own.

Statistics of each model follow Triton's statistics extension. They are
counted where requests pass, so the figures are those of one ingress replica since it started: with several, add them
up, or read Prometheus instead. Triton's durations here, from the phase times of results:

    queue           waiting for a turn and for a place in a replica (`queue`)
    compute_input   bringing the model's weights to the device (`switch`)
    compute_infer   every other phase: encode, denoise, prefill, generate, decode, stages of a pipeline
    compute_output  the rest of the whole: making protocol tensors of results, and transport

Phases that run side by side count in full each, so the parts may add up to more than the whole. One request is one
execution: which requests shared a forward is known to the replicas only. `cache_hit` and `cache_miss` count text
encodings; how long a look-up took is not measured, so their nanoseconds are 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Literal

from deployments.ingress.kserve.tensors import VERSION, Parameters
from deployments.ingress.service.catalog import ModelCard
from deployments.ingress.service.service import Service
from deployments.records.errors import InvalidRequest, ModelUnavailable, UnknownModel
from weights.residency.recent import Recent

State = Literal["READY", "LOADING", "UNAVAILABLE"]
_STATES: Final[dict[str, State]] = {"ready": "READY", "updating": "READY", "registering": "LOADING"}
_UNLOAD_PARAMETERS: Final = frozenset({"unload_dependents"})
_MAX_MODELS: Final = 1024
_MAX_EXACT_BATCH_SIZE: Final = 32
_SWITCH, _QUEUE, _TOTAL = "switch", "queue", "total"


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """An entry of the index. `reason` explains the state, if need be."""

    name: str
    version: str
    state: State
    reason: str = ""


class Repository:
    """The model repository of the cluster. All methods raise the ServiceErrors of `deployments.records.errors`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def index(self, *, ready: bool = False, repository: str = "") -> list[ModelIndex]:
        """Return all models and pipelines, or those that are READY."""
        _check_repository(repository)
        models = [_entry(card) for card in await self._service.listing.models() if not card.base]
        return [entry for entry in models if entry.state == "READY" or not ready]

    async def names(self, model: str = "", version: str = "") -> list[str]:
        """Return the names of all models and pipelines, or only `model`, checked.

        Raises UnknownModel with the known names, also for a version that is not served.
        """
        if version not in ("", VERSION):
            raise UnknownModel(f"model {model!r} has no version {version!r} (known: {VERSION})", "model_version")
        if not model:
            return [entry.name for entry in await self.index()]
        if model not in self._service.pipelines.names():
            _check_is_model(await self._service.listing.model(model))
        return [model]

    async def load(self, model: str, parameters: Parameters | None = None, repository: str = "") -> None:
        """Bring the model to the replicas that run it, and return when it is usable. Waits for its registration.

        Raises ModelUnavailable with the reason when no replica can have it.
        """
        _check_repository(repository)
        _check_parameters("load", parameters or {}, frozenset())
        if model in self._service.pipelines.names():
            return
        card = await self._service.listing.model(model)
        _check_is_model(card)
        if card.kind is None:
            raise ModelUnavailable(f"model {model!r} is unavailable: {card.error or 'still being registered'}", "model")
        answer = await self._service.operations.prefetch_model(model, "device")
        for replicas in (answer.workers, answer.text_encoders):
            if replicas and all(replicas):
                raise ModelUnavailable(f"model {model!r} was not loaded: {replicas[0]}", "model")

    async def unload(self, model: str, parameters: Parameters | None = None, repository: str = "") -> None:
        """Take the model out of memory. Raises Conflict when running requests or pins hold it.

        `unload_dependents` changes nothing: no model is unloaded together with another here.
        """
        _check_repository(repository)
        _check_parameters("unload", parameters or {}, _UNLOAD_PARAMETERS)
        if model in self._service.pipelines.names():
            raise InvalidRequest(
                f"pipeline {model!r} has no weights of its own: unload the models that it uses", "model"
            )
        _check_is_model(await self._service.listing.model(model))
        await self._service.operations.evict_model(model)


def _entry(card: ModelCard) -> ModelIndex:
    reason = card.error or ("unloaded" if card.state == "unloaded" else "")
    return ModelIndex(card.id, VERSION, _STATES.get(card.state, "UNAVAILABLE"), reason)


def _check_is_model(card: ModelCard) -> None:
    if card.base:
        raise InvalidRequest(f"{card.id!r} is an adapter: it is loaded for the requests that name it", "model")


def _check_repository(name: str) -> None:
    if name:
        raise InvalidRequest(
            f"repository_name: there is one repository without a name, got {name!r}", "repository_name"
        )


def _check_parameters(action: str, parameters: Parameters, known: frozenset[str]) -> None:
    unknown = sorted(parameters.keys() - known)
    if unknown:
        raise InvalidRequest(
            f"{action} takes {', '.join(known) or 'no parameters'}, got {', '.join(unknown)}; "
            "models are registered with POST /admin/models",
            unknown[0],
        )


@dataclass(slots=True)
class Duration:
    """Events and their total time in nanoseconds."""

    count: int = 0
    ns: int = 0

    def add_duration(self, ms: float, count: int = 1) -> None:
        """Count `count` events of `ms` in all. Negative times, differences of parallel phases, count as 0."""
        self.count += count
        self.ns += max(0, round(ms * 1e6))


@dataclass(slots=True)
class InferStatistics:
    """Durations of the parts of a request, defined at the top of this file."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class BatchStatistics:
    """Durations of requests with `batch_size` items; above _MAX_EXACT_BATCH_SIZE, of up to that many (powers of 2)."""

    batch_size: int
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ModelStatistics:
    """Statistics of one model. Fields are those of the protocol.

    `last_inference` is in milliseconds since the epoch, 0 for never.
    """

    name: str
    version: str = VERSION
    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    inference_stats: InferStatistics = field(default_factory=InferStatistics)
    batch_stats: list[BatchStatistics] = field(default_factory=list)


class Statistics:
    """Statistics of at most `max_models` models; the least recently used are forgotten. Lives on one event loop."""

    def __init__(self, clock_s: Callable[[], float] = time.time, max_models: int = _MAX_MODELS) -> None:
        self._clock_s = clock_s
        self._models: Recent[str, ModelStatistics] = Recent(max_models)

    def succeeded(
        self,
        model: str,
        *,
        timings_ms: Mapping[str, float],
        batch_size: int = 1,
        cache_hits: int = 0,
        cache_misses: int = 0,
    ) -> None:
        """Count an answered request of `batch_size` items. `timings_ms` are by phase, the whole under "total"."""
        found = self._touched(model)
        found.inference_count += batch_size
        found.execution_count += 1
        queue_ms, input_ms = timings_ms.get(_QUEUE, 0.0), timings_ms.get(_SWITCH, 0.0)
        infer_ms = sum(ms for phase, ms in timings_ms.items() if phase not in (_QUEUE, _SWITCH, _TOTAL))
        known_ms = queue_ms + input_ms + infer_ms
        total_ms = timings_ms.get(_TOTAL, known_ms)
        stats, batch = found.inference_stats, _of_size(found.batch_stats, _rounded(batch_size))
        stats.success.add_duration(total_ms)
        stats.queue.add_duration(queue_ms)
        stats.cache_hit.add_duration(0.0, cache_hits)
        stats.cache_miss.add_duration(0.0, cache_misses)
        for durations in (stats, batch):
            durations.compute_input.add_duration(input_ms)
            durations.compute_infer.add_duration(infer_ms)
            durations.compute_output.add_duration(total_ms - known_ms)

    def failed(self, model: str, total_ms: float) -> None:
        """Count a request that was not answered."""
        self._touched(model).inference_stats.fail.add_duration(total_ms)

    def of_model(self, model: str) -> ModelStatistics:
        """Return the statistics of `model`, all zero before its first use here."""
        return self._models.get(model) or ModelStatistics(model)

    def _touched(self, model: str) -> ModelStatistics:
        found = self._models.used(model, lambda: ModelStatistics(model))
        found.last_inference = int(self._clock_s() * 1e3)
        return found


async def statistics_of(
    repository: Repository, statistics: Statistics, model: str = "", version: str = ""
) -> list[ModelStatistics]:
    """Return the statistics of `model`, or of all models and pipelines, used or not. Raises UnknownModel."""
    return [statistics.of_model(name) for name in await repository.names(model, version)]


def _of_size(batches: list[BatchStatistics], batch_size: int) -> BatchStatistics:
    """Return the entry for that size, inserted in order of size when it is new."""
    for batch in batches:
        if batch.batch_size == batch_size:
            return batch
    batches.append(batch := BatchStatistics(batch_size))
    batches.sort(key=attrgetter("batch_size"))
    return batch


def _rounded(batch_size: int) -> int:
    return batch_size if batch_size <= _MAX_EXACT_BATCH_SIZE else 1 << (batch_size - 1).bit_length()
