"""The part of `infra.bench denoise` on a device with room for the denoiser and two rows: planned, and fixed bounds.

In a process of its own, because simulating a device patches torch. Seconds are the thread's CPU time: the host computes
for the device. A bound that is too large is found by failing, and halved.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from deployments.engines.costs.memory_limits import MemoryLimits
from infra.bench.denoise_offload import lease_parts, measure_apart

FIXED_ROWS: Final = (1, 2, 3, 4, 6, 8)
ROOM_ROWS: Final = 2
_SIDE_PX: Final = 64
_REQUESTS: Final = 8


class CountingLimits(MemoryLimits):
    """Counts the calls that found no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num_failed = 0

    def ran_out(self, kind: Hashable, size: int) -> None:
        self.num_failed += 1
        super().ran_out(kind, size)


def measure_room(num_steps: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Measure in another process, for about so long; returns a row for the planned bound and each of FIXED_ROWS."""
    return measure_apart("infra.bench.denoise_room", num_steps, seconds, seed)


async def _measure(num_steps: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    from deployments.engines.building.skeletons import blank_module
    from deployments.engines.diffusion.footprints import make_twin
    from deployments.engines.diffusion.pipeline import create_pipeline
    from deployments.engines.diffusion.rows import BatchBounds, decode_kind
    from deployments.engines.graph.workspace import UNBOUNDED, Workspace
    from infra.bench.denoise_models import NUM_TOKENS, make_model
    from infra.sim import simulate
    from weights.operations.externalize import externalize
    from weights.storage.store import WeightStore

    memory = simulate().memory_of()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-room-")))
        model = stack.enter_context(make_model(seed))
        store = WeightStore(folder / "store")
        manifest = externalize(store, "bench", model.folder, dtype="float32")
        twin = make_twin(manifest, store.models / manifest.skeleton, torch.device("sim:0"))
        wide = BatchBounds(max_rows=max(FIXED_ROWS))
        footprints = twin.footprints(_SIDE_PX, _SIDE_PX, NUM_TOKENS, wide)
        del footprints[decode_kind(_SIDE_PX, _SIDE_PX)]
        (denoise,) = footprints.values()
        room_bytes, more_bytes = denoise.bytes_of(ROOM_ROWS), denoise.bytes_of(ROOM_ROWS + 1)
        weights_bytes = sum(-(-ref.nbytes // 512) * 512 for ref in manifest.components["transformer"].tensors.values())
        # Latents and texts of requests are there too: they get half of what a third row would take.
        left_bytes = weights_bytes + (room_bytes + more_bytes) // 2
        ballast = torch.empty(memory.total_bytes - left_bytes, dtype=torch.uint8, device="sim:0")
        cache, lease = await lease_parts(stack, store, manifest, weights_bytes + room_bytes, {"transformer"})
        ways = {f"at most {rows}": (BatchBounds(max_rows=rows), UNBOUNDED) for rows in FIXED_ROWS}
        ways["planned"] = wide, Workspace(cache.forwards.memory, footprints)
        vae = {"vae": blank_module(manifest.components["vae"], lease.skeleton / "vae")}
        parts, class_name = {**lease.modules, **vae}, manifest.class_name or ""
        pipelines = {
            way: create_pipeline(class_name, lease.skeleton, parts, device="sim:0", bounds=bounds, workspace=workspace)
            for way, (bounds, workspace) in ways.items()
        }
        requests = [model.request(num_steps, seed=number, side_px=_SIDE_PX) for number in range(_REQUESTS)]
        found = _compare(pipelines, requests, seconds, random.Random(seed))
        del ballast
    return found


def _compare(
    pipelines: Mapping[str, Any], requests: Sequence[Any], seconds: float, order: random.Random
) -> list[dict[str, Any]]:
    """Return for each way the calls that found no memory, and the steps of a request that a CPU second makes.

    In each round every way runs all steps of all requests, in another order; the first, in which bounds that are too
    large are found, does not count. `to_planned` is the median of what a round took by the planned bound, by this one.
    """
    limits: dict[str, CountingLimits] = {way: CountingLimits() for way in pipelines}
    for way, pipeline in pipelines.items():
        pipeline._memory = limits[way]
    spent_s: dict[str, list[float]] = {way: [] for way in pipelines}
    num_steps = len(requests) * requests[0].request.num_inference_steps
    end_s = time.perf_counter() + seconds
    while len(spent_s["planned"]) < 3 or time.perf_counter() < end_s:
        for way in order.sample(list(pipelines), len(pipelines)):  # there is no room for the requests of several
            spent_s[way].append(_run(pipelines[way], requests))
    return [
        {
            "bound": way,
            "halvings": limits[way].num_failed,
            "rounds": len(rounds) - 1,
            "steps_per_cpu_s": num_steps / statistics.median(rounds[1:]),
            "to_planned": statistics.median(
                planned / own for planned, own in zip(spent_s["planned"][1:], rounds[1:], strict=True)
            ),
        }
        for way, rounds in spent_s.items()
    ]


def _run(pipeline: Any, requests: Sequence[Any]) -> float:
    """Return the CPU seconds of this thread that all steps of these requests take together."""
    states = [pipeline.start_request(one.request, one.conditioning) for one in requests]
    gc.collect()
    begin_s = time.thread_time()
    while not states[0].done:
        pipeline.step(states)
    return time.thread_time() - begin_s


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]))
    rows = asyncio.run(_measure(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
    sys.stdout.write(json.dumps(rows) + "\n")
