"""The models as the ingress sees them: a local copy of the directory, and the registry for what that does not know."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayActorError

from cluster.errors import ModelUnknown
from cluster.registry.actor import WeightRegistry
from cluster.registry.directory import ModelRecord, listed
from cluster.registry.snapshot import RegistrySnapshot
from deployments.errors import InvalidRequest, ModelUnavailable, UnknownModel
from deployments.records import ModelCard

_WANTED = {"diffusion": "images", "llm": "text", "embedding": "embeddings", "head": "scores of features"}


class Catalog:
    """No call leaves this process for a model that the copy knows."""

    def __init__(self, snapshot: RegistrySnapshot) -> None:
        self._snapshot = snapshot

    async def records(self) -> list[ModelRecord]:
        await self._snapshot.ready()
        return list(self._snapshot)

    async def record(self, id_: str) -> ModelRecord:
        """Waits for a model that is just being registered. Raises UnknownModel with the known names."""
        await self._snapshot.ready()
        found = self._snapshot.find_model(id_)
        if found is not None and found.state != "registering":
            return found
        try:
            asked = await self._snapshot.call_registry(WeightRegistry.status, id_)
        except ModelUnknown as error:
            raise UnknownModel(str(error), "model") from None
        except RayActorError:
            raise ModelUnavailable(
                f"model {id_!r}: the directory of models is restarting; try again", "model"
            ) from None
        return asked

    async def usable(self, id_: str, kind: str) -> ModelRecord:
        """Raises UnknownModel, ModelUnavailable, or InvalidRequest for a model that makes something else."""
        record = await self.record(id_)
        if not record.serves:
            raise ModelUnavailable(f"model {id_!r} is unavailable: {record.error}", "model")
        if record.kind != kind:
            fitting = listed(other.id for other in await self.records() if other.kind == kind)
            raise InvalidRequest(
                f"model {id_!r} ({record.kind}) does not make {_WANTED[kind]}; models that do: {fitting}", "model"
            )
        if record.state == "unloaded":
            self._snapshot.notify_registry(WeightRegistry.want, id_)
        return record

    async def adapter(self, id_: str, model: str) -> ModelRecord:
        """Raises UnknownModel with the adapters that fit `model`, or ModelUnavailable."""
        try:
            record = await self.record(id_)
        except UnknownModel:
            record = None
        if record is None or model not in record.base:
            fitting = listed(other.id for other in await self.records() if model in other.base)
            raise UnknownModel(f"no adapter {id_!r} for {model!r} (known: {fitting})", "lora")
        if not record.serves:
            raise ModelUnavailable(f"adapter {id_!r} is unavailable: {record.error}", "lora")
        return record


def card_of(record: ModelRecord) -> ModelCard:
    return ModelCard(
        id=record.id,
        kind=record.kind,
        state=record.state,
        nbytes=record.nbytes,
        base=record.base,
        description=record.description,
        error=record.error,
        defaults=record.defaults.model_dump(exclude_none=True),
        fingerprint=record.fingerprint,
        labels=record.features.labels,
    )


def plain(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
