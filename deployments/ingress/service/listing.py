"""The models served now, as clients list them: a card of each model, and the health for probes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from cluster.admission.dispatcher import Dispatcher
from cluster.registry.snapshot import RegistrySnapshot
from deployments.ingress.service.catalog import Catalog, Health, ModelCard, PipelineModels, card_of
from deployments.pipelines.pipelines import Pipelines
from weights.formats.language_models import LanguageModelDetails


class Listing:
    """Lists models, adapters and pipelines. `configured` are the models of the config, `woken` pools that are started
    by a request.
    """

    def __init__(
        self,
        snapshot: RegistrySnapshot,
        queue: Dispatcher,
        pipelines: Pipelines,
        pipeline_models: PipelineModels,
        configured: Collection[str],
        woken: Collection[str],
    ) -> None:
        self._snapshot = snapshot
        self._catalog = Catalog(snapshot)
        self._queue = queue
        self._pipelines = pipelines
        self._pipeline_models = pipeline_models
        self._configured = frozenset(configured)
        self._woken = frozenset(woken)
        self._health: tuple[object, Health] | None = None  # with the key that it was counted for

    async def models(self) -> list[ModelCard]:
        """Return every model, adapter and pipeline: the configured ones in the order of the config, then those
        registered since, then the pipelines.
        """
        records = await self._catalog.all_records()
        models = [record for record in records if record.workflow is None]
        cards = await asyncio.to_thread(lambda: [card_of(record) for record in models])
        return cards + [self._pipeline_card(name) for name in self._pipelines.names()]

    async def model(self, id_: str) -> ModelCard:
        """Return one model, adapter or pipeline. Raises UnknownModel with the known names."""
        if await self.is_pipeline(id_):
            return self._pipeline_card(id_)
        return await asyncio.to_thread(card_of, await self._catalog.find_record(id_))

    async def details(self, card: ModelCard) -> LanguageModelDetails:
        """Return the facts in a language model's files; none for other models. Raises ModelUnavailable."""
        if card.kind not in ("llm", "embedding") or card.state == "unavailable":
            return LanguageModelDetails()
        return await self._catalog.details(card.id)

    async def solver_config(self, id_: str) -> Mapping[str, Any]:
        """Return the config of a model's solver, empty for one without. Raises UnknownModel, ModelUnavailable."""
        return {} if await self.is_pipeline(id_) else await self._catalog.solver_config(id_)

    async def health(self) -> Health:
        """Return the health for probes, counted once for each revision of the directory, however often they ask.

        A pool that ever had a replica counts: requests wait for the successor of a dead one.
        """
        await self._snapshot.ready()
        pools = self._queue.met_pools | self._woken
        counted_of = self._snapshot.revision, pools
        if self._health is None or self._health[0] != counted_of:
            entering = {record.id for record in self._snapshot if record.state == "registering"}
            cards = [self._pipeline_card(name) for name in self._pipelines.names()]
            models = [(card.kind, card.state) for card in cards]
            models += [(record.kind, record.state) for record in self._snapshot if record.workflow is None]
            is_entering = not entering.isdisjoint(self._configured)
            self._health = counted_of, Health.of(models, pools, is_entering=is_entering)
        return self._health[1]

    def _pipeline_card(self, name: str) -> ModelCard:
        problem = self._pipelines.problem(name)
        return ModelCard(
            id=name,
            kind="pipeline",
            state="unavailable" if problem else "ready",
            description=self._pipelines.description(name),
            error=problem or "",
            endpoint=None if problem else self._pipeline_models.endpoint_of(name),
        )

    def is_known(self, model: str) -> bool:
        """Return whether there is such a model or pipeline now."""
        return model in self._pipelines or self._snapshot.find_model(model) is not None

    async def is_pipeline(self, model: str) -> bool:
        """Return whether `model` is a pipeline. Waits for the directory: a pipeline's signature depends on it."""
        if model in self._pipelines:
            await self._snapshot.ready()
        return model in self._pipelines
