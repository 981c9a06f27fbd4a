"""The fallback encoder: text is encoded in this process, slower and in its own memory, while the service is down."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Final

from deployments.modules.cache import ModuleCache
from deployments.modules.encoders import is_part_of_text
from deployments.modules.loading import is_denoise_component
from deployments.replicas.step_loop import DeviceThread
from deployments.text.cache import Encoding, EncodingCache
from deployments.text.encode import CachedEncoders, TextJob, encode_batch_or_raise
from deployments.text.requests import Conditioning, ConditioningRequest
from weights.records.manifest import Component

CACHE_BYTES: Final = 16 * 2**20
WARNING: Final = "the worker encoded the text itself: the text encoder service does not answer"


class FallbackEncoder:
    """Text encoding in a module cache's own budget, where encoders are evicted as any module. Lives on one event loop.

    `warnings` go with every answer.
    """

    def __init__(self, module_cache: ModuleCache, device: DeviceThread, warnings: tuple[str, ...] = (WARNING,)) -> None:
        self._module_cache = module_cache
        self._device = device
        self._warnings = warnings
        self._encoders = CachedEncoders(EncodingCache(CACHE_BYTES), self._run_batch)
        self.num_requests = 0

    async def condition(self, request: ConditioningRequest) -> Conditioning:
        """Return the conditioning of a prompt. Raises EngineError.

        HAZARD: nothing of the model may be leased meanwhile: encoders and denoiser need not fit side by side.
        """
        self.num_requests += 1
        conditioning = await self._encoders.condition(self._module_cache, request, _is_part_of_text)
        return replace(conditioning, warnings=conditioning.warnings + self._warnings)

    def _run_batch(self, jobs: Sequence[TextJob], priority: int, timeout_s: float | None) -> Awaitable[list[Encoding]]:
        return self._device.run_work(encode_batch_or_raise, jobs)


def _is_part_of_text(component: Component) -> bool:
    return is_part_of_text(component) and (component.library == "peft" or not is_denoise_component(component))
