"""The peer of `infra.bench schedule --real`: our worker, whose models come and go as `serve.multiplexed` says.

Requests reach it through an ingress, as ours do: a call that goes through one more process takes some milliseconds
longer, which is no matter of who chooses the worker.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final

from ray import serve

from deployments.modules.loading import is_denoise_component
from deployments.records import ImageRequest, ImageResult
from deployments.services.worker import Worker

NUM_MODELS: Final = 1  # that a worker has room for


class _Loaded:
    """A model that a lease keeps. Serve calls `__del__` when it lets the model go, and Python once more."""

    def __init__(self, lease: AsyncExitStack) -> None:
        self._lease: AsyncExitStack | None = lease
        self._loop = asyncio.get_running_loop()

    def __del__(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            asyncio.run_coroutine_threadsafe(lease.aclose(), self._loop)


class MultiplexedWorker(Worker):
    """A worker under Serve's own router and model cache. Requests name their model as `multiplexed_model_id`."""

    @serve.multiplexed(max_num_models_per_replica=NUM_MODELS)
    async def get_model(self, model: str) -> _Loaded:
        """Load a model; Serve lets the least recently used one go first."""
        lease = AsyncExitStack()
        await lease.enter_async_context(self._module_cache.lease(model, is_denoise_component))
        return _Loaded(lease)

    async def generate(self, request: ImageRequest) -> ImageResult:
        """Return images, once Serve has the model here."""
        await self.get_model(serve.get_multiplexed_model_id())
        async with aclosing(self.stream_images(request)) as pieces:
            async for piece in pieces:
                result = piece
        assert isinstance(result, ImageResult)  # it is the last
        return result


class MultiplexedIngress:
    """An ingress that passes requests on: Serve's router chooses the worker by the model."""

    def __init__(self, workers: Any) -> None:
        self._workers = workers

    async def generate(self, request: ImageRequest) -> ImageResult:
        """Return the answer of a worker."""
        result: ImageResult = await self._workers.options(multiplexed_model_id=request.model).generate.remote(request)
        return result
