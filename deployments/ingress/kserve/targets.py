"""The models and pipelines of the cluster, as the Open Inference Protocol sees them. All raise ServiceErrors."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from deployments.errors import InvalidRequest, ModelUnavailable, UnknownModel
from deployments.ingress.kserve.answers import Backend
from deployments.ingress.kserve.records import VERSION
from deployments.ingress.kserve.signatures import SIGNATURES
from deployments.pipelines.records import Signature

PIPELINE: Final = "pipeline"
_KINDS: Final = (*SIGNATURES, PIPELINE)
PROBE_TIMEOUT_S: Final = 2.0
_READY_STATES: Final = ("ready", "updating")


@dataclass(frozen=True, slots=True)
class Target:
    """A model or pipeline that can be asked. `kind` is the model's, or PIPELINE; `labels` name a head's outputs."""

    name: str
    kind: str
    signature: Signature
    description: str = ""
    fingerprint: str = ""
    labels: tuple[str, ...] = ()


async def find_target(service: Backend, model: str, version: str) -> Target:
    """Waits for a model that is just being registered."""
    _check_version(model, version)
    card = await service.model(model)
    if card.kind == PIPELINE:
        return Target(model, PIPELINE, service.pipelines.signature(model), card.description)
    if card.kind is None:
        raise ModelUnavailable(f"model {model!r} is unavailable: {card.error}", "model")
    if card.kind not in SIGNATURES:
        raise InvalidRequest(
            f"model {model!r} ({card.kind}) answers no requests of its own; kinds that do: {', '.join(_KINDS)}", "model"
        )
    return Target(model, card.kind, SIGNATURES[card.kind], card.description, card.fingerprint, card.labels)


async def is_ready(service: Backend, model: str, version: str) -> bool:
    """Does not wait for a model that is being registered. One that was unloaded is not ready, as in Triton."""
    _check_version(model, version)
    cards = {card.id: card for card in await service.models()}
    card = cards.get(model) or await service.model(model)
    return card.state in _READY_STATES and card.kind in _KINDS


async def is_any_answering(service: Backend) -> bool:
    """Nothing that is configured is still on its way, and something can be asked: what was unloaded comes back.

    False when the models are not known within `PROBE_TIMEOUT_S`: probes do not wait until they are.
    """
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            states = [card.state for card in await service.models() if card.kind in _KINDS]
            return not await service.entering() and any(state in (*_READY_STATES, "unloaded") for state in states)
    except TimeoutError:
        return False


def _check_version(model: str, version: str) -> None:
    if version not in ("", VERSION):
        raise UnknownModel(f"model {model!r} has no version {version!r} (known: {VERSION})", "model")
