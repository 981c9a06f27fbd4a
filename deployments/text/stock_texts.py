"""The texts of stock pipelines: each call of `encode_prompt` is computed once, by the class's own code.

The encoders are leased for computations only, not for cache hits.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deployments.engines.libraries.config_files import read_config
from deployments.engines.stock.texts import CalledEncoders, TextCall
from deployments.modules.cache import Lease, ModuleCache
from deployments.modules.stock_parts import is_stock_text
from deployments.records import CacheUse
from deployments.text.cache import Encoding, EncodingCache, EncodingKey
from deployments.text.requests import Conditioning, ConditioningRequest, pack
from weights.records.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class StockTextJob:
    """One call for the encoders of one pipeline: a batch of its own, for it runs by the class's code."""

    keyed: CalledEncoders
    arguments: Mapping[str, Any]
    num_tokens: int = 1

    def encode(self) -> Encoding:
        """Run the call and return its result. Blocks. Raises EngineError, ComputationFailed."""
        return self.keyed.encode(self.arguments)


RunJobs = Callable[[Sequence[StockTextJob], int, float | None], Awaitable[Sequence[Encoding]]]


class StockTexts:
    """Calls of `encode_prompt` through a cache. Lives on one event loop."""

    def __init__(self, cache: EncodingCache, run_jobs: RunJobs) -> None:
        self._cache = cache
        self._run_jobs = run_jobs

    async def condition(
        self, module_cache: ModuleCache, request: ConditioningRequest, arguments: Mapping[str, Any]
    ) -> Conditioning:
        """Return the call's result, for `from_tensors`. Raises the errors of `ModuleCache.lease` and the call."""
        start = time.perf_counter()
        manifest = await module_cache.manifests.find_version(request.model, request.model_version)
        key = _key(manifest, module_cache, arguments)
        compute = partial(self._compute, module_cache, manifest, request, arguments)
        found = (await self._cache.get_all([key], compute))[key]
        is_hit = found.source != "computed"
        encode_ms = (time.perf_counter() - start) * 1e3
        return Conditioning(pack(found.encoding), encode_ms, CacheUse(int(is_hit), int(not is_hit)), ())

    async def _compute(
        self,
        module_cache: ModuleCache,
        manifest: Manifest,
        request: ConditioningRequest,
        arguments: Mapping[str, Any],
        keys: Sequence[EncodingKey],
    ) -> Sequence[Encoding]:
        # Of the cache's own task: the encoders are leased until the computation has ended, whoever leaves meanwhile.
        async with module_cache.lease(request.model, is_stock_text, version=manifest.fingerprint) as lease:
            encoders = lease.bound(lambda: _encoders(lease), f"texts of {manifest.fingerprint}")
            return await self._run_jobs([StockTextJob(encoders, arguments)], request.priority, request.timeout_s)


def _encoders(lease: Lease) -> CalledEncoders:
    manifest, modules = lease.manifest, lease.modules
    device = next((one.device for module in modules.values() for one in module.parameters()), torch.device("cpu"))
    return CalledEncoders(manifest.class_name or "", lease.skeleton, modules, manifest.components, device)


def _key(manifest: Manifest, module_cache: ModuleCache, arguments: Mapping[str, Any]) -> EncodingKey:
    """Return the identity of a call: the encoders with their tokenizers, the options of the pipeline, the arguments.

    Other parts may decide the result's type, and count by their structure.
    """
    parts = manifest.components
    texts = sorted(part.module_key for part in parts.values() if is_stock_text(part))
    others = sorted(f"{name} {part.structure_key}" for name, part in parts.items() if not is_stock_text(part))
    index = read_config(module_cache.skeleton(manifest) / "model_index.json")
    options = {name: value for name, value in index.items() if not (name.startswith("_") or isinstance(value, list))}
    facts = json.dumps([manifest.class_name, texts, others, options], sort_keys=True)
    return EncodingKey(hashlib.sha256(facts.encode()).hexdigest(), "", TextCall(arguments).key, ())
