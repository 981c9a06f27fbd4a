"""Triton's model repository extension over the models of the cluster: what is there, bring it near, let it go.

Where it differs from Triton, which loads and unloads on an operator's word only:

- Every model of the directory can be asked at any time; a request brings what it needs. `load` does that beforehand
  and returns when the model is usable.
- `unload` takes the weights out of replicas and nodes and makes the model UNAVAILABLE, "unloaded", for readiness and
  index alike, in the whole cluster. Requests are not refused: the next one, or `load`, brings it back, and it is
  READY again. What running requests or pins hold stays, and the unload fails with a Conflict that says so.
- An adapter is no entry of its own, and a pipeline has no weights of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from deployments.errors import InvalidRequest, ModelUnavailable, UnknownModel
from deployments.ingress.catalog import ModelCard
from deployments.ingress.kserve.records import VERSION, Parameters
from deployments.ingress.service import Service

State = Literal["READY", "LOADING", "UNAVAILABLE"]
_STATES: Final[dict[str, State]] = {"ready": "READY", "updating": "READY", "registering": "LOADING"}
_UNLOAD_PARAMETERS: Final = frozenset({"unload_dependents"})


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """An entry of the index. `reason` says why the state is what it is, where there is something to say."""

    name: str
    version: str
    state: State
    reason: str = ""


class Repository:
    """The model repository of the cluster. All methods raise the ServiceErrors of `deployments.errors`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def index(self, *, ready: bool = False, repository: str = "") -> list[ModelIndex]:
        """Return all models and pipelines, or those that are READY."""
        _check_repository(repository)
        models = [_entry(card) for card in await self._service.models() if not card.base]
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
            _check_is_model(await self._service.model(model))
        return [model]

    async def load(self, model: str, parameters: Parameters | None = None, repository: str = "") -> None:
        """Bring the model to the replicas that run it, and return when it is usable. Waits while it is registered.

        Raises ModelUnavailable with the reason when no replica can have it.
        """
        _check_repository(repository)
        _check_parameters("load", parameters or {}, frozenset())
        if model in self._service.pipelines.names():
            return
        card = await self._service.model(model)
        _check_is_model(card)
        if card.kind is None:
            raise ModelUnavailable(f"model {model!r} is unavailable: {card.error or 'still being registered'}", "model")
        answer = await self._service.operations.prefetch_model(model, "device")
        for replicas in (answer.workers, answer.text_encoders):
            if replicas and all(replicas):
                raise ModelUnavailable(f"model {model!r} was not loaded: {replicas[0]}", "model")

    async def unload(self, model: str, parameters: Parameters | None = None, repository: str = "") -> None:
        """Take the model out of memory. Raises Conflict when running requests or pins hold it.

        `unload_dependents` changes nothing: no model here is unloaded by another's unloading.
        """
        _check_repository(repository)
        _check_parameters("unload", parameters or {}, _UNLOAD_PARAMETERS)
        if model in self._service.pipelines.names():
            raise InvalidRequest(
                f"pipeline {model!r} has no weights of its own: unload the models that it uses", "model"
            )
        _check_is_model(await self._service.model(model))
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
