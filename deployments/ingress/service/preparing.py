"""Requests get their defaults and the versions of their models, and are checked against the limits."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Literal

from cluster.registry.directory import ModelRecord
from configs.cluster import ClusterConfig
from deployments.engines.stock.known import is_stock_class
from deployments.ingress.messages.terms import Terms
from deployments.ingress.service.catalog import Catalog, Endpoint, endpoint_of
from deployments.ingress.service.demands import Demands
from deployments.records import ChatRequest, ClipRequest, CompletionRequest, ImageRequest
from deployments.records.errors import InvalidRequest
from deployments.requests.defaults import (
    as_upscale,
    merges_lora,
    prompts_of,
    text_rules,
    with_clip_defaults,
    with_image_defaults,
    with_learned_words,
    with_text_defaults,
)
from deployments.requests.fitted_images import with_fitting_images
from deployments.requests.limits import check_clip, check_image, check_text, check_upscale


class Preparing:
    """Completes requests for the replicas. Its methods raise the ServiceErrors of `deployments.records.errors`."""

    def __init__(self, config: ClusterConfig, catalog: Catalog, demands: Demands) -> None:
        self._limits = config.ingress.limits
        self._checkpoint_interval_s = config.worker.checkpoint_interval_s
        self._catalog = catalog
        self._demands = demands

    async def image(self, request: ImageRequest) -> tuple[ImageRequest, Terms, tuple[str, ...]]:
        """Return the completed request, its terms, and warnings."""
        record = await self._catalog.find_usable(request.model, "diffusion", "upscaler")
        if record.kind == "upscaler":
            return self._upscale(request, record)
        await self._check_makes(record, "images")
        asked, request = request, with_image_defaults(request, record.defaults, record.class_name, record.variant)
        check_image(request, self._limits, asked)
        warnings: tuple[str, ...] = ()
        if request.init_image is not None or request.control:
            fit = partial(with_fitting_images, asked, request, record.class_name, record.variant)
            request, warnings = await asyncio.to_thread(fit)
        words = await self._catalog.learned_words(prompts_of(request), request.model)
        request = with_learned_words(request, words)
        find = self._catalog.find_adapter
        adapters = {use.name: await find(use.name, request.model, "adapter") for use in request.lora}
        adapters |= {use.name: await find(use.name, request.model, "controlnet") for use in request.control}
        adapters |= {use.name: await find(use.name, request.model, "ip_adapter") for use in request.ip_adapter}
        versions = {name: adapter.fingerprint for name, adapter in adapters.items()}
        terms = self._demands.terms(request)
        update = {"model_version": record.fingerprint, "adapter_versions": versions, **text_rules(record)}
        update["merges_lora"] = merges_lora(request, adapters)
        update["checkpoint_interval_s"] = 0.0 if request.checkpoint_steps else self._checkpoint_interval_s
        return request.model_copy(update=update | {"priority": terms.priority}), terms, warnings

    def _upscale(self, request: ImageRequest, record: ModelRecord) -> tuple[ImageRequest, Terms, tuple[str, ...]]:
        request, warnings = as_upscale(request)
        check_upscale(request, self._limits, int(record.variant.get("scale", 1)))
        terms = self._demands.terms(request)
        update = {"model_version": record.fingerprint, "priority": terms.priority}
        return request.model_copy(update=update), terms, warnings

    async def clip(self, request: ClipRequest, makes: Literal["video", "audio"]) -> ClipRequest:
        """Return the request as a worker takes it."""
        record = await self._catalog.find_usable(request.model, "diffusion")
        await self._check_makes(record, makes)
        request = with_clip_defaults(request, record.defaults, record.class_name)
        check_clip(request, self._limits, makes)
        find, terms = self._catalog.find_adapter, self._demands.terms(request)
        versions = {use.name: (await find(use.name, request.model, "adapter")).fingerprint for use in request.lora}
        update = {"model_version": record.fingerprint, "priority": terms.priority, "tenant": terms.tenant}
        return request.model_copy(update=update | {"adapter_versions": versions})

    async def text(self, request: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
        """Return the request as a worker takes it."""
        check_text(request, self._limits)
        record = await self._catalog.find_usable(request.model, "llm")
        if has_images(request):
            await self._catalog.check_sees(record)
        find = self._catalog.find_adapter
        versions = {use.name: (await find(use.name, request.model, "adapter")).fingerprint for use in request.lora}
        update = {"model_version": record.fingerprint, "adapter_versions": versions}
        request = request.model_copy(update=update)
        return with_text_defaults(request, record.defaults)

    async def _check_makes(self, record: ModelRecord, makes: Endpoint) -> None:
        """Raise InvalidRequest for a pipeline with outputs of another kind."""
        found = await asyncio.to_thread(endpoint_of, record) if is_stock_class(record.class_name) else "images"
        if found != makes:
            raise InvalidRequest(
                f"model {record.id!r}, a {record.class_name}, makes {found or 'nothing'}, and no {makes}", "model"
            )


def has_images(request: ChatRequest | CompletionRequest) -> bool:
    """Return whether a chat has images."""
    return isinstance(request, ChatRequest) and any(message.images for message in request.messages)
