"""What operators do to a running cluster: register and remove models, prefetch and pin them, look at all of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, ParamSpec, TypeVar

from ray.exceptions import RayActorError

from cluster.errors import ClusterError, ModelUnknown, RegistrationConflict, RegistrationRefused
from cluster.errors import ModelUnavailable as NotInStore
from cluster.registry.actor import Method, WeightRegistry
from cluster.registry.directory import Entry
from cluster.registry.snapshot import RegistrySnapshot
from configs.batching import BatchingConfig
from deployments.errors import (
    Conflict,
    InvalidRequest,
    ModelUnavailable,
    ServiceError,
    UnknownModel,
    Unprocessable,
)
from deployments.ingress.admin.replica_report import built_models, last_switches
from deployments.ingress.catalog import Catalog, card_of, plain
from deployments.records import ModelCard
from weights.errors import WeightsError

Tier = Literal["host", "device"]
MAX_MODELS: Final = 1000
MAX_NODES: Final = 100
DESCRIBE_TIMEOUT_S: Final = 10.0
PREFETCH_TIMEOUT_S: Final = 120.0
HEAR_S: Final = 2.0
HEAR_PAUSE_S: Final = 0.005
DEFAULT_BATCHING: Final = BatchingConfig()

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Registered:
    """`is_new`: no model of that id was there before. `card.state` is `registering` or `updating` if not waited for."""

    card: ModelCard
    is_new: bool


@dataclass(frozen=True, slots=True)
class Page:
    """The models, in the order in which they came, and the nodes, by id, that are asked about."""

    model_offset: int = 0
    max_models: int = MAX_MODELS
    node_offset: int = 0
    max_nodes: int = MAX_NODES


class Operations:
    """`encoder` and `worker` are deployment handles. `batching` is the config's, of the text encoders."""

    def __init__(
        self,
        name: str,
        snapshot: RegistrySnapshot,
        encoder: Any,
        worker: Any,
        batching: BatchingConfig = DEFAULT_BATCHING,
    ) -> None:
        self._name = name
        self._snapshot = snapshot
        self._catalog = Catalog(snapshot)
        self._encoder = encoder
        self._worker = worker
        self._batching = batching

    async def register(self, entry: Entry, *, wait: bool) -> Registered:
        """Raises InvalidRequest, Conflict, or Unprocessable when it was waited for and the checkpoint is unusable.

        A new model that is unusable leaves nothing behind; an update that is leaves the version before.
        """
        is_new = entry.id not in {record.id for record in await self._catalog.records()}
        record = await self._call_registry(WeightRegistry.register, entry, wait)
        if wait and record.error:
            if is_new:
                await self._call_registry(WeightRegistry.unregister, entry.id)
            raise Unprocessable(f"{entry.id}: {record.error}", "path")
        return Registered(card_of(record), is_new)

    async def unregister(self, model: str, *, purge: bool) -> tuple[str, ...]:
        """The adapters that have no base left. Raises UnknownModel, or Conflict for a model of the cluster config."""
        orphans = await self._call_registry(WeightRegistry.unregister, model, purge)
        await self._in_replicas("unpin", model, DESCRIBE_TIMEOUT_S)
        return orphans

    async def prefetch(self, model: str, tier: Tier) -> dict[str, Any]:
        """Bring the model nearer, into room that nothing needs. What went wrong by node, and by replica."""
        nodes = await self._call_registry(WeightRegistry.prefetch, model)
        await self._call_registry(WeightRegistry.want, model)
        await self._heard(model, "ready")
        answer = {"model": model, "tier": tier, "nodes": nodes}
        return answer if tier == "host" else answer | await self._in_replicas("prefetch", model, PREFETCH_TIMEOUT_S)

    async def pin(self, model: str, *, pinned: bool) -> dict[str, Any]:
        """Keep the model where it is resident, on nodes and in replicas, or no longer."""
        nodes = await self._call_registry(WeightRegistry.pin, model, pinned)
        replicas = await self._in_replicas("pin" if pinned else "unpin", model, DESCRIBE_TIMEOUT_S)
        return {"model": model, "pinned": pinned, "nodes": nodes, **replicas}

    async def evict(self, model: str) -> dict[str, Any]:
        """Take the model out of replicas and nodes; the next request brings it back. Raises Conflict when running
        requests or pins hold some of it: what nothing holds is gone then, too.
        """
        await self._catalog.record(model)
        workers, encoders = await asyncio.gather(
            _of_all(self._worker, "evict", model), _of_all(self._encoder, "evict", model)
        )
        stays = sorted({name for answer in (*workers, *encoders) if isinstance(answer, list) for name in answer})
        if stays:
            raise Conflict(f"model {model!r}: running requests or pins hold {', '.join(stays)}", "model")
        if holders := await self._call_registry(WeightRegistry.evict, model):
            raise Conflict(f"model {model!r}: its weights are held by {', '.join(holders)}", "model")
        await self._heard(model, "unloaded")
        return {"model": model, "workers": _problems(workers), "text_encoders": _problems(encoders)}

    async def batching(self) -> BatchingConfig:
        """Return how text encoders batch requests: by the config, unless it was changed since."""
        try:
            changed = await self._snapshot.call_registry(WeightRegistry.encoder_batching)
        except RayActorError:  # with the registry the change is forgotten, too
            return self._batching
        return changed or self._batching

    async def retune(self, batching: BatchingConfig) -> dict[str, Any]:
        """From now on, in all text encoders. What went wrong by replica, "" for nothing.

        Those that start later begin with it as well, for as long as the registry lives; then with the config's.
        """
        await self._call_registry(WeightRegistry.set_encoder_batching, batching)
        problems = _problems(await _of_all(self._encoder, "retune", batching))
        return {"batching": batching.model_dump(mode="json"), "text_encoders": problems}

    async def describe_batching(self) -> dict[str, Any]:
        """What is asked for, and what each text encoder has: its `config`, and its figures since it began."""
        batching, encoders = await asyncio.gather(self.batching(), _of_all(self._encoder, "describe"))
        replicas = [
            replica
            if "unreachable" in replica
            else {"config": replica["batching_config"], "stats": replica["batching"]}
            for replica in _shown(encoders)
        ]
        return {"batching": batching.model_dump(mode="json"), "text_encoders": replicas}

    async def _heard(self, model: str, state: str) -> None:
        """The copy of the directory here follows in milliseconds; whoever asks next should not see the old state."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAR_S):
                while (record := self._snapshot.find_model(model)) and record.state in ("ready", "unloaded"):
                    if record.state == state:
                        return
                    await asyncio.sleep(HEAR_PAUSE_S)

    async def describe(self, page: Page) -> dict[str, Any]:
        """The cluster at a glance as JSON-able values; what does not answer is shown as unreachable."""
        records = await self._catalog.records()
        shown = records[page.model_offset : page.model_offset + page.max_models]
        residency, workers, encoders = await asyncio.gather(
            self._residency([record.id for record in shown], page),
            _of_all(self._worker, "describe"),
            _of_all(self._encoder, "describe"),
        )
        replicas = {"workers": _shown(workers), "text_encoders": _shown(encoders)}
        named = [
            (f"{role} {number}", replica)
            for role, found in (("worker", replicas["workers"]), ("text encoder", replicas["text_encoders"]))
            for number, replica in enumerate(found)
        ]
        built, switches = built_models(named), last_switches(named)
        models = [
            plain(card_of(record))
            | {
                "resident": residency["models"].get(record.id, {}),
                "built": built.get(record.id, []),
                "last_switch": switches.get(record.id),
            }
            for record in shown
        ]
        problem = {"registry": residency["registry"]} if "registry" in residency else {}
        totals = {"num_models": len(records), "num_nodes": residency["num_nodes"]}
        return {"cluster": self._name, **problem, **totals, "models": models, "nodes": residency["nodes"], **replicas}

    async def _in_replicas(self, method: str, model: str, timeout_s: float) -> dict[str, list[str]]:
        """What went wrong, by kind of replica: one text per replica, "" for nothing."""
        workers, encoders = await asyncio.gather(
            _of_all(self._worker, method, model, timeout_s=timeout_s),
            _of_all(self._encoder, method, model, timeout_s=timeout_s),
        )
        return {"workers": _problems(workers), "text_encoders": _problems(encoders)}

    async def _residency(self, models: list[str], page: Page) -> dict[str, Any]:
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                return await self._snapshot.call_registry(
                    WeightRegistry.residency, models, page.node_offset, page.max_nodes
                )
        except (RayActorError, TimeoutError) as error:
            return {"registry": {"unreachable": _text(error)}, "num_nodes": 0, "nodes": [], "models": {}}

    async def _call_registry(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the registry, and raise its errors in the service's own terms."""
        try:
            return await self._snapshot.call_registry(method, *args, **kwargs)
        except ModelUnknown as error:
            raise UnknownModel(str(error), "model") from None
        except RegistrationConflict as error:
            raise Conflict(str(error)) from None
        except RegistrationRefused as error:
            raise InvalidRequest(str(error), _field(str(error))) from None
        except (NotInStore, WeightsError) as error:
            raise ModelUnavailable(str(error), "model") from None
        except RayActorError as error:
            raise ModelUnavailable("the directory of models is restarting; try again") from error


async def _of_all(handle: Any, method: str, *arguments: Any, timeout_s: float = DESCRIBE_TIMEOUT_S) -> list[Any]:
    """What each replica answers, an exception for one that does not."""
    try:
        response = handle.broadcast(method, *arguments)
        answers: list[Any] = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
    except Exception as error:  # of Serve, when it cannot even ask
        return [error]
    return answers


def _shown(answers: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"unreachable": _text(answer)} if isinstance(answer, BaseException) else answer for answer in answers]


def _problems(answers: Iterable[Any]) -> list[str]:
    """One per replica, "" for none."""
    return [_text(answer) if isinstance(answer, BaseException) else "" for answer in answers]


def _text(error: BaseException) -> str:
    cause = getattr(error, "cause", None)
    known = cause if isinstance(cause, ServiceError | ClusterError | WeightsError) else error
    return str(known).partition("\n")[0] or type(known).__name__


def _field(message: str) -> str | None:
    """Refusals begin with the field that they are about."""
    name, colon, _ = message.partition(": ")
    return name if colon and name.isidentifier() else None
