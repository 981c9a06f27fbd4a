"""Operations on a running cluster: register and remove models, prefetch and pin them, describe all of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from ray.exceptions import RayActorError

from cluster.admission.dispatcher import Dispatcher
from cluster.placement.serving.link import QueuesAway
from cluster.records.errors import (
    ClusterError,
    ModelTooLarge,
    ModelUnknown,
    NotKept,
    RegistrationConflict,
    RegistrationRefused,
    WeightsUnavailable,
)
from cluster.registry.actor import Method, WeightRegistry
from cluster.registry.directory import Entry, ModelRecord
from cluster.registry.importing import ImportProgress
from cluster.registry.snapshot import RegistrySnapshot
from cluster.start.process_starts import template_stats
from configs.admission import AdmissionConfig
from configs.batching import BatchingConfig
from configs.cluster import ClusterConfig
from configs.workflow import WorkflowConfig
from deployments.ingress.service.answers import (
    BatchingAnswer,
    BuiltModel,
    ClusterAnswer,
    ModelStatus,
    PinAnswer,
    PrefetchAnswer,
    RetunedAnswer,
    TemplatesAnswer,
    Tier,
    Unreachable,
)
from deployments.ingress.service.catalog import Catalog, ModelCard, card_of
from deployments.ingress.service.queues import AdmissionAnswer, Queues, describe_admission
from deployments.records.errors import (
    Conflict,
    InvalidRequest,
    ModelUnavailable,
    ServiceError,
    UnknownModel,
    Unprocessable,
)
from weights.records.errors import WeightsError

MAX_MODELS: Final = 1000
MAX_NODES: Final = 100
_DESCRIBE_TIMEOUT_S: Final = 10.0
_PREFETCH_TIMEOUT_S: Final = 120.0
_DEFAULT_BATCHING: Final = BatchingConfig()
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered model. `is_new`: no model of that id was there before.

    `card.state` is `registering` or `updating` if the caller did not wait for it.
    """

    card: ModelCard
    is_new: bool


@dataclass(frozen=True, slots=True)
class Page:
    """A page of models, in the order in which they came, and of nodes, by id."""

    model_offset: int = 0
    max_models: int = MAX_MODELS
    node_offset: int = 0
    max_nodes: int = MAX_NODES


class Operations:
    """The operations. `encoder` and `worker` are deployment handles.

    `batching` is the batch policy that the config gives the text encoders, `queue` the admission queue, and `queues`
    those of several ingresses together.
    """

    def __init__(
        self,
        name: str,
        snapshot: RegistrySnapshot,
        encoder: Any,
        worker: Any,
        batching: BatchingConfig = _DEFAULT_BATCHING,
        queue: Dispatcher | None = None,
        queues: Queues | None = None,
    ) -> None:
        self._queue = queue
        self._queues = queues or queue
        self._name = name
        self._snapshot = snapshot
        self._catalog = Catalog(snapshot)
        self._encoder = encoder
        self._worker = worker
        self._batching = batching

    async def register_model(self, entry: Entry, *, wait: bool) -> Registered:
        """Register a model or adapter, or a new version of one.

        A new unusable model leaves nothing behind; an unusable update leaves the old version.

        Raises InvalidRequest, Conflict, or Unprocessable for an unusable checkpoint that was waited for.
        """
        is_new = entry.id not in {record.id for record in await self._catalog.all_records()}
        record = await self._call_registry(WeightRegistry.register, entry, wait)
        if wait and record.error:
            if is_new:
                await self._remove_model(entry.id)
            raise Unprocessable(f"{entry.id}: {record.error}", "path")

        def is_known() -> bool:
            known = self._snapshot.find_model(entry.id)
            return known is not None and known.entry == record.entry and known.fingerprint == record.fingerprint

        if wait:
            await self._snapshot.catch_up(is_known)
        return Registered(card_of(record), is_new)

    async def register_workflow(self, workflow: WorkflowConfig) -> Registered:
        """Serve a checked workflow, or another version of one. Raises Conflict, ModelUnavailable."""
        before = self._snapshot.find_model(workflow.id)
        record = await self._call_registry(WeightRegistry.register_workflow, workflow)

        def is_known() -> bool:
            known = self._snapshot.find_model(workflow.id)
            return known is not None and known.workflow == record.workflow

        await self._snapshot.catch_up(is_known)
        return Registered(card_of(record), before is None)

    async def imports(self) -> list[ImportProgress]:
        """Return the progress of running imports. Raises ModelUnavailable while the registry is away."""
        return await self._call_registry(WeightRegistry.import_progress)

    async def unregister_model(self, model: str, *, purge: bool) -> tuple[str, ...]:
        """Remove a model and return the adapters that have no base left.

        Raises UnknownModel, or Conflict for a model of the cluster config.
        """
        orphans = await self._remove_model(model, purge)
        await self._in_replicas("unpin", model, _DESCRIBE_TIMEOUT_S)
        return orphans

    async def _remove_model(self, model: str, purge: bool = False) -> tuple[str, ...]:
        """Remove the model; answer once the directory's local copy agrees, also for a model that does not exist."""

        def is_gone() -> bool:
            return self._snapshot.find_model(model) is None

        try:
            orphans = await self._call_registry(WeightRegistry.unregister, model, purge)
        except UnknownModel:
            await self._snapshot.catch_up(is_gone)
            raise
        await self._snapshot.catch_up(is_gone)
        return orphans

    async def prefetch_model(self, model: str, tier: Tier) -> PrefetchAnswer:
        """Bring the model nearer, into room that nothing needs. Return problems by node and replica."""
        nodes = await self._call_registry(WeightRegistry.prefetch, model)
        await self._call_registry(WeightRegistry.want, model)
        await self._await_state(model, "ready")
        if tier == "host":
            return PrefetchAnswer(model=model, tier=tier, nodes=nodes)
        replicas = await self._in_replicas("prefetch", model, _PREFETCH_TIMEOUT_S)
        return PrefetchAnswer(model=model, tier=tier, nodes=nodes, **replicas)

    async def pin_model(self, model: str, *, pinned: bool) -> PinAnswer:
        """Keep the model where it is resident, on nodes and in replicas, or stop keeping it."""
        nodes = await self._call_registry(WeightRegistry.pin, model, pinned)
        replicas = await self._in_replicas("pin" if pinned else "unpin", model, _DESCRIBE_TIMEOUT_S)
        return PinAnswer(model=model, pinned=pinned, nodes=nodes, **replicas)

    async def evict_model(self, model: str) -> None:
        """Take the model out of replicas and nodes; the next request brings it back.

        Raises Conflict when running requests or pins hold parts of it; its other parts are gone then, too.
        """
        await self._catalog.find_record(model)
        workers, encoders = await asyncio.gather(
            _call_all(self._worker, "evict", model), _call_all(self._encoder, "evict", model)
        )
        stays = sorted({name for answer in (*workers, *encoders) if isinstance(answer, list) for name in answer})
        if stays:
            raise Conflict(f"model {model!r}: running requests or pins hold {', '.join(stays)}", "model")
        if holders := await self._call_registry(WeightRegistry.evict, model):
            raise Conflict(f"model {model!r}: its weights are held by {', '.join(holders)}", "model")
        await self._await_state(model, "unloaded")

    async def batching(self) -> BatchingConfig:
        """Return the batch policy of the text encoders: the config's, unless it was changed since."""
        try:
            changed = await self._snapshot.call_registry(WeightRegistry.encoder_batching)
        except RayActorError:  # with the registry the change is forgotten, too
            return self._batching
        return changed or self._batching

    async def retune(self, batching: BatchingConfig) -> RetunedAnswer:
        """Set the batch policy of all text encoders from now on.

        Later ones start with it as well, as long as the registry lives; after that with the config's.
        """
        await self._call_registry(WeightRegistry.set_encoder_batching, batching)
        problems = _problems(await _call_all(self._encoder, "retune", batching))
        return RetunedAnswer(batching=_with_defaults_set(batching), text_encoders=problems)

    async def retune_admission(self, admission: AdmissionConfig) -> AdmissionAnswer:
        """Set the bounds and weights of the admission queue from now on; the registry remembers them as it does
        the batch policy.
        """
        assert self._queues is not None
        await self._call_registry(WeightRegistry.set_admission, admission)
        await self._queues.retune(admission)
        return await describe_admission(self._queues)

    async def follow(self, before: ClusterConfig, after: ClusterConfig) -> list[str]:
        """Use the limits of another config from now on, and let replicas evict models that it no longer has.

        The registry has it already. Return the problems.
        """
        problems = []
        if after.admission != before.admission:
            await self.retune_admission(after.admission)
        if after.text_encoder.batching != before.text_encoder.batching:
            retuned = await self.retune(after.text_encoder.batching)
            problems += [f"a text encoder: {problem}" for problem in retuned.text_encoders if problem]
        for model in before.entries.keys() - after.entries.keys():
            await self._in_replicas("unpin", model, _DESCRIBE_TIMEOUT_S)
        return problems

    async def restore_admission(self) -> None:
        """Give the queue of this process the settings that the registry remembers."""
        assert self._queue is not None
        with contextlib.suppress(RayActorError):  # with the registry the change is forgotten, too
            if changed := await self._snapshot.call_registry(WeightRegistry.admission):
                await self._queue.retune(changed)

    async def describe_batching(self) -> BatchingAnswer:
        """Return the batch policy, and that of each text encoder with its figures since it began."""
        batching, encoders = await asyncio.gather(self.batching(), _call_all(self._encoder, "describe"))
        replicas = [
            replica
            if "unreachable" in replica
            else {"config": replica["batching_config"], "stats": replica["batching"]}
            for replica in _shown(encoders)
        ]
        return BatchingAnswer(batching=_with_defaults_set(batching), text_encoders=replicas)

    async def _await_state(self, model: str, state: str) -> None:
        """Wait until the directory's local copy has the change."""

        def is_known() -> bool:
            record = self._snapshot.find_model(model)
            return record is None or record.state == state or record.state not in ("ready", "unloaded")

        await self._snapshot.catch_up(is_known)

    async def describe_cluster(self, page: Page) -> ClusterAnswer:
        """Describe the cluster at a glance; parts that do not answer are shown as unreachable."""
        records = await self._catalog.all_records()
        shown = records[page.model_offset : page.model_offset + page.max_models]
        residency, workers, encoders = await asyncio.gather(
            self._residency([record.id for record in shown], page),
            _call_all(self._worker, "describe"),
            _call_all(self._encoder, "describe"),
        )
        replicas = {"workers": _shown(workers), "text_encoders": _shown(encoders)}
        answer = ClusterAnswer(
            cluster=self._name,
            num_models=len(records),
            num_nodes=residency["num_nodes"],
            models=_model_statuses(shown, residency, replicas),
            nodes=residency["nodes"],
            node_problems=residency.get("node_problems", []),
            **replicas,
        )
        if self._queues is not None:
            with contextlib.suppress(QueuesAway):
                answer.admission = await describe_admission(self._queues)
        if "registry" in residency:
            answer.registry = residency["registry"]
        if (found := template_stats()) is not None:
            answer.templates = TemplatesAnswer(templates=found[0], problems=found[1])
        return answer

    async def _in_replicas(self, method: str, model: str, timeout_s: float) -> dict[str, list[str]]:
        """Call `method` of all replicas. Return the problems by kind: one text per replica, "" for none."""
        workers, encoders = await asyncio.gather(
            _call_all(self._worker, method, model, timeout_s=timeout_s),
            _call_all(self._encoder, method, model, timeout_s=timeout_s),
        )
        return {"workers": _problems(workers), "text_encoders": _problems(encoders)}

    async def _residency(self, models: list[str], page: Page) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
                return await self._snapshot.call_registry(
                    WeightRegistry.residency, models, page.node_offset, page.max_nodes
                )
        except (RayActorError, TimeoutError) as error:
            return {"registry": Unreachable(unreachable=_text(error)), "num_nodes": 0, "nodes": [], "models": {}}

    async def _call_registry(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `method` of the registry. Its errors become the service's own."""
        try:
            return await self._snapshot.call_registry(method, *args, **kwargs)
        except ModelUnknown as error:
            raise UnknownModel(str(error), "model") from None
        except RegistrationConflict as error:
            raise Conflict(str(error)) from None
        except NotKept as error:
            raise ModelUnavailable(str(error)) from None
        except RegistrationRefused as error:
            raise InvalidRequest(str(error), error.field) from None
        except ModelTooLarge as error:
            raise InvalidRequest(str(error), "model") from None
        except (WeightsUnavailable, WeightsError) as error:
            raise ModelUnavailable(str(error), "model") from None
        except RayActorError as error:
            raise ModelUnavailable("the directory of models is restarting; try again") from error


async def _call_all(handle: Any, method: str, *arguments: Any, timeout_s: float = _DESCRIBE_TIMEOUT_S) -> list[Any]:
    """Call `method` of all replicas. Return their answers, an exception for one that does not answer."""
    try:
        response = handle.broadcast(method, *arguments)
        answers: list[Any] = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
    except Exception as error:  # of Serve, when it cannot even call
        return [error]
    return answers


def _with_defaults_set(batching: BatchingConfig) -> BatchingConfig:
    """Return the same values, all marked as set: an answer shows all of them."""
    return BatchingConfig(**batching.model_dump())


def _fields(card: ModelCard) -> dict[str, Any]:
    # Programs are shown under /v2, and facts of language models by /api/show.
    return {name: getattr(card, name) for name in card.__slots__ if name not in ("program", "facts")}


def _shown(answers: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"unreachable": _text(answer)} if isinstance(answer, BaseException) else answer for answer in answers]


def _problems(answers: Iterable[Any]) -> list[str]:
    """Return one text per replica, "" for no problem."""
    return [_text(answer) if isinstance(answer, BaseException) else "" for answer in answers]


def _text(error: BaseException) -> str:
    cause = getattr(error, "cause", None)
    known = cause if isinstance(cause, ServiceError | ClusterError | WeightsError) else error
    return str(known).partition("\n")[0] or type(known).__name__


def _model_statuses(
    shown: Sequence[ModelRecord], residency: Mapping[str, Any], replicas: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[ModelStatus]:
    """Return the state of each model on the nodes and replicas."""
    named = [
        (f"{role}-{replica['name']}", replica)  # the name in the keeper's books
        for role, kind in (("worker", "workers"), ("encoder", "text_encoders"))
        for replica in replicas[kind]
        if "unreachable" not in replica
    ]
    built, switches = _built_models(named), _last_switches(named)
    return [
        ModelStatus(
            **_fields(card_of(record)),
            resident=residency["models"].get(record.id, {}),
            built=built.get(record.id, []),
            last_switch=switches.get(record.id),
        )
        for record in shown
    ]


def _built_models(replicas: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, list[BuiltModel]]:
    """Return by model what each replica (by name, with its description) has built of it.

    Replicas that did not answer have no modules.
    """
    found: dict[str, list[BuiltModel]] = {}
    for name, replica in replicas:
        mine: dict[str, BuiltModel] = {}
        for module in replica.get("modules", []):
            for model in module["models"]:
                part = mine.setdefault(model, {"replica": name, "bytes": 0, "leases": 0, "pinned": False})
                part["bytes"] += module["bytes"]
                part["leases"] += module["leases"]
                part["pinned"] |= module["pinned"]
        for model, part in mine.items():
            found.setdefault(model, []).append(part)
    return found


def _last_switches(replicas: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return by model the report of the first replica that has switched to it."""
    found: dict[str, dict[str, Any]] = {}
    for name, replica in replicas:
        for model, report in replica.get("last_switches", {}).items():
            found.setdefault(model, {"replica": name, **report})
    return found
