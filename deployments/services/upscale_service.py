"""UpscaleService: images enlarged by a network, tile by tile. A part of the image service, on whose device it runs."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from configs.cluster import WorkerConfig
from deployments.engines.records.protocol import EngineError
from deployments.engines.upscaling import (
    Tile,
    Upscaler,
    core_of,
    enlarge_tile,
    margin_of,
    padded,
    pixel_bytes,
    plan_tiles,
)
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import is_denoise_component
from deployments.records import CacheUse, ImageProgress, ImageRequest, ImageResult
from deployments.replicas.step_loop import DeviceThread, StepTime
from deployments.services.image_requests import OnProgress
from weights.formats.upscaler import UpscalerNet
from weights.records.manifest import Manifest

_COMPONENT: Final = "model"


class UpscaleService:
    """Enlarges images in turns of a tile each, which alternate with the steps of engines. Of one event loop."""

    def __init__(self, module_cache: ModuleCache, settings: WorkerConfig, device: DeviceThread) -> None:
        self._module_cache = module_cache
        self._settings = settings
        self._device = device
        self._pixel_bytes: dict[tuple[UpscalerNet, torch.dtype], float] = {}
        self.num_running = 0

    async def enlarge(self, request: ImageRequest, manifest: Manifest, on_progress: OnProgress) -> ImageResult:
        """Return the image of a request, enlarged. `on_progress` gets each tile if the request asks for steps.

        A cancelled caller ends it after the running tile. Raises EngineError and the errors of a lease.
        """
        start = time.perf_counter()
        if request.init_image is None:
            raise EngineError("init_image: an upscaler enlarges an image, and the request has none")
        tell = on_progress if request.reports_steps else None
        async with self._module_cache.lease(request.model, is_denoise_component, version=manifest.fingerprint) as lease:
            module: Upscaler = lease.modules[_COMPONENT]
            begun = time.perf_counter()
            self.num_running += 1
            try:
                image = await self._run_tiles(module, request.init_image, tell)
            finally:
                self.num_running -= 1
            end = time.perf_counter()
            timings = {"switch": lease.report.switch_ms, "upscale": (end - begun) * 1e3, "total": (end - start) * 1e3}
            return ImageResult(
                model=request.model,
                images=[image],
                seed=None,
                num_inference_steps=None,
                timings_ms=timings,
                switch=lease.report,
                cache=CacheUse(0, 0),
            )

    async def _run_tiles(
        self, module: Upscaler, image: npt.NDArray[np.uint8], on_progress: OnProgress | None
    ) -> npt.NDArray[np.uint8]:
        net, steps = module.net, StepTime()
        is_cpu = torch.device(self._settings.torch_device).type == "cpu"
        if (key := (net, next(module.parameters()).dtype)) not in self._pixel_bytes:
            self._pixel_bytes[key] = await self._device.run_work(pixel_bytes, module)
        most_pixels = self._settings.max_vae_bytes / max(1.0, self._pixel_bytes[key])
        core = core_of(net, most_pixels, is_cpu=is_cpu)
        whole = padded(image, net.shrink)
        height, width = image.shape[:2]
        result = np.empty((height * net.scale, width * net.scale, 3), np.uint8)

        def run_tile(tile: Tile) -> None:
            begun_s = self._device.clock()
            enlarge_tile(module, whole, tile, result)
            steps.note_step(self._device.clock() - begun_s)

        tiles = plan_tiles(whole.shape[0], whole.shape[1], core, margin_of(net))
        with self._device.working(steps):
            for number, tile in enumerate(tiles, 1):
                await self._device.run_work(run_tile, tile)
                if on_progress is not None:
                    on_progress(ImageProgress(number, len(tiles)))
        return result
