"""The part of `infra.bench denoise` on a simulated device that is smaller than the pipeline: what its steps take.

In a process of its own, because simulating a device patches torch. The host computes for the device, and its cores also
copy what goes over the link, so that steps slow down by more than where a card does both beside its kernels. The bytes
are what they are anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, Final

import torch

SHARES: Final = (1.0, 0.6, 0.3)  # of the denoiser and the VAE
_MAX_ROUNDS: Final = 40


def measure_offload(num_steps: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Measure in another process, for about so long; returns a row for each of SHARES."""
    return measure_apart("infra.bench.denoise_offload", num_steps, seconds, seed)


def measure_apart(module: str, num_steps: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Return the rows that `module` prints last, run as a program: a simulated device patches torch for its process."""
    options = [str(num_steps), str(seconds), str(seed), str(torch.get_num_threads())]
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


async def _measure(num_steps: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    from configs.simulated import SimulatedConfig
    from deployments.modules.loading import is_denoise_component
    from infra.bench.denoise_models import make_model
    from infra.sim import simulate
    from weights.operations.externalize import externalize
    from weights.storage.store import WeightStore

    link = simulate(SimulatedConfig(memory_bytes=2**30)).memory_of()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-offload-")))
        model = stack.enter_context(make_model(seed))
        store = WeightStore(folder / "store")
        manifest = externalize(store, "bench", model.folder, dtype="float32")
        parts = [part for part in manifest.components.values() if is_denoise_component(part)]
        total_bytes = sum(-(-ref.nbytes // 512) * 512 for part in parts for ref in part.tensors.values())
        ways = [await _open(stack, store, manifest, int(total_bytes * share)) for share in SHARES]
        latents: dict[int, torch.Tensor] = {}
        times: list[list[float]] = [[] for _ in ways]
        moved: list[list[int]] = [[] for _ in ways]
        end_s, round_ = time.perf_counter() + seconds, 0
        while round_ < 2 or (time.perf_counter() < end_s and round_ < _MAX_ROUNDS):
            for way, pipeline in enumerate(ways):
                request = model.request(num_steps, seed=round_)
                state = pipeline.start_request(request.request, request.conditioning)
                while not state.done:
                    link.reset_link()
                    begin_s = time.perf_counter()
                    pipeline.step([state])
                    times[way].append(time.perf_counter() - begin_s)
                    moved[way].append(link.uploaded_bytes)
                if not torch.equal(latents.setdefault(round_, state.latents.cpu()), state.latents.cpu()):
                    raise RuntimeError(f"a device of {SHARES[way]:.0%} of the pipeline makes other latents")
            round_ += 1
        return [
            {
                "share": share,
                "budget_bytes": int(total_bytes * share),
                "steps_per_s": 1 / statistics.median(own),
                "uploaded_bytes_per_step": statistics.median(bytes_),
            }
            for share, own, bytes_ in zip(SHARES, times, moved, strict=True)
        ]


async def _open(stack: contextlib.AsyncExitStack, store: Any, manifest: Any, budget_bytes: int) -> Any:
    """Return a pipeline on a device of so many bytes; its VAE is there if both have room."""
    from deployments.engines.building.skeletons import blank_module
    from deployments.engines.diffusion.pipeline import create_pipeline

    _, lease = await lease_parts(stack, store, manifest, budget_bytes, {"transformer", "vae"})
    vae = {} if "vae" in lease.modules else {"vae": blank_module(manifest.components["vae"], lease.skeleton / "vae")}
    return create_pipeline(manifest.class_name or "", lease.skeleton, {**lease.modules, **vae}, device="sim:0")


async def lease_parts(
    stack: contextlib.AsyncExitStack, store: Any, manifest: Any, budget_bytes: int, names: Set[str]
) -> tuple[Any, Any]:
    """Return a module cache on a device of so many bytes and a lease of these parts; the denoiser alone if need be."""
    from configs.cluster import WorkerConfig
    from deployments.modules.budget import ModuleBudget
    from deployments.modules.cache import ModuleCache
    from deployments.modules.loading import ComponentBuilder, is_denoise_component
    from deployments.modules.parts import Fitting
    from weights.loading.provider import LocalExtents

    class Extents(LocalExtents):
        def release(self, extents: Sequence[Any]) -> None: ...
        def prefetch(self, extents: Sequence[Any]) -> None: ...

    async def fetch_manifest(model: str, version: str | None) -> Any:
        return manifest

    cache = ModuleCache(
        fetch_manifest,
        Extents(store.packs),
        store.models,
        ModuleBudget(budget_bytes, "sim:0"),
        ComponentBuilder(WorkerConfig(device="sim:0")),
    )
    wanted = names if cache.can_hold(manifest, is_denoise_component, {}) else {"transformer"}
    leasing = cache.lease("bench", lambda part: part.name in wanted, fitting=Fitting(streams=True))
    lease = await stack.enter_async_context(leasing)
    return cache, lease


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]))
    rows = asyncio.run(_measure(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
    sys.stdout.write(json.dumps(rows) + "\n")
