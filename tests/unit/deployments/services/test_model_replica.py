"""A replica before its first request."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from configs.model import ModelConfig
from deployments.services.model_replica import prepare_models
from weights.records.manifest import Component


class Host:
    """Remembers what is leased."""

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds = kinds
        self.leased: list[str] = []
        self.forwards = self
        self.learned: list[str] = []  # the kinds of models whose forwards were planned
        self.manifests = self

    async def find_version(self, model: str) -> Any:
        part = Component(name="model", library="transformers", class_name=None, folder=".", tensors={})
        return SimpleNamespace(kind=self._kinds[model], components={"model": part})

    def skeleton(self, manifest: Any) -> Path:
        return Path()

    def learn_defaults(self, manifest: Any, wanted: Any) -> None:
        self.learned.append(manifest.kind)

    async def has_room_for(self, manifest: Any, wanted: Any) -> bool:
        return True

    @contextlib.asynccontextmanager
    async def lease(self, model: str, wanted: Any) -> AsyncIterator[None]:
        self.leased.append(model)
        yield


async def test_a_replica_preloads_only_what_its_service_runs() -> None:
    host: Any = Host({"llm": "llm", "minilm": "embedding", "flux": "diffusion"})
    models = [ModelConfig(id=id_, path=Path("/m"), preload=True) for id_ in ("llm", "minilm", "flux")]
    kinds = ("diffusion", "embedding")
    await prepare_models(host, models, kinds, lambda component: True, lambda component, skeleton: None)
    assert host.leased == ["minilm", "flux"]
    assert host.learned == ["embedding", "diffusion"]
