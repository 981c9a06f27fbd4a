"""The part of `atelier bench switch` on a simulated accelerator: bytes over its link, and what they take at its speed.

In a process of its own, because simulating a device patches torch. Four ways to change the pipeline on a device: upload
the whole new one and drop the old one; move the old one back and the new one in with `Module.to`; diffusers'
`enable_model_cpu_offload`, which moves each component in and out for each image; and our arena, which has room for the
larger of the two and moves the tensors that are not there. Bytes are counted, seconds are bytes / bandwidth.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table

LINKS_GBPS: Final = (25, 64)  # PCIe 4 and 5, 16 lanes
FLUX, TUNED, SDXL = "digits-flux", "digits-flux-inverted", "digits-sdxl"
SWITCHES: Final = {
    "flux -> sdxl": (FLUX, SDXL),
    "sdxl -> flux": (SDXL, FLUX),
    "flux -> sibling": (FLUX, TUNED),
    "sdxl -> sibling": (SDXL, TUNED),
}
WAYS: Final = {
    "whole": "whole pipeline",
    "module_to": "Module.to, out and in",
    "offload": "cpu_offload, an image",
    "atelier": "Atelier",
}
NUM_CALLS: Final = 2000


def measure_simulated(stock: Path) -> dict[str, Any]:
    """Measure in another process; returns a JSON-able object. `stock` is the folder of the demo's models."""
    command = [sys.executable, "-m", "infra.bench.command.switch_simulated", str(stock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def simulated_tables(found: dict[str, Any]) -> list[Table]:
    """Return the tables of what `measure_simulated` gave."""
    links = [f"{gbps} GB/s" for gbps in LINKS_GBPS]
    title = "Demo models on a simulated device: bytes over the link, and milliseconds"
    switches = Table("switch", "way", "bytes", *links, title=title, title_justify="left")
    for name, ways in found["switches"].items():
        for way, text in WAYS.items():
            times = [f"{ways[way] / gbps / 1e6:.3f}" for gbps in LINKS_GBPS]
            switches.add_row(name, text, f"{ways[way]:,}", *times, end_section=way == list(WAYS)[-1])
    overhead = Table("", "host, us", "simulated, us", title="The cost of simulating", title_justify="left")
    for name, times in found["op_us"].items():
        overhead.add_row(name, f"{times['cpu']:.1f}", f"{times['sim']:.1f}")
    return [switches, overhead]


def _measure(stock: Path) -> dict[str, Any]:
    from configs.simulated import SimulatedConfig
    from infra.sim import simulate

    sim = simulate(SimulatedConfig(memory_bytes=2**30))
    link = sim.memory_of()

    def moved_bytes(work: Callable[[], Any]) -> int:
        link.reset_link()
        kept = work()
        del kept
        return int(link.uploaded_bytes + link.downloaded_bytes)

    with tempfile.TemporaryDirectory(prefix="bench-simulated-") as folder:
        pipelines = _Pipelines(stock, Path(folder))
        switches = {
            name: {
                "whole": moved_bytes(partial(pipelines.upload, new)),
                "module_to": pipelines.move(old, new, moved_bytes),
                "offload": moved_bytes(partial(pipelines.offload, new)),
                "atelier": pipelines.switch(old, new, moved_bytes),
            }
            for name, (old, new) in SWITCHES.items()
        }
        sizes = pipelines.sizes()
    return {"switches": switches, "bytes": sizes, "op_us": _op_us()}


class _Pipelines:
    """The demo's pipelines, as diffusers loads them and as a store has them."""

    def __init__(self, stock: Path, folder: Path) -> None:
        from weights.loading.loader import load_model
        from weights.loading.provider import LocalExtents
        from weights.operations.externalize import externalize
        from weights.storage.store import WeightStore

        store = WeightStore(folder / "store")
        self._stock = stock
        self._manifests = {
            name: externalize(store, name, stock / name, dtype="float32") for name in (FLUX, TUNED, SDXL)
        }
        provider = LocalExtents(store.packs)
        self._views = {name: load_model(manifest, provider) for name, manifest in self._manifests.items()}

    def sizes(self) -> dict[str, int]:
        return {name: manifest.nbytes for name, manifest in self._manifests.items()}

    def upload(self, name: str) -> Any:
        return self._load(name).to("sim")

    def move(self, old: str, new: str, moved_bytes: Callable[[Callable[[], Any]], int]) -> int:
        before, after = self._load(old).to("sim"), self._load(new)
        return moved_bytes(lambda: (before.to("cpu"), after.to("sim")))

    def offload(self, name: str) -> Any:
        pipeline = self._load(name)
        pipeline.enable_model_cpu_offload(device="sim")
        generator = torch.Generator("cpu").manual_seed(0)
        pipeline("a handwritten two", height=32, width=32, num_inference_steps=1, generator=generator)
        pipeline.maybe_free_model_hooks()
        return pipeline

    def switch(self, old: str, new: str, moved_bytes: Callable[[Callable[[], Any]], int]) -> int:
        """Use `old`, then count what `new` takes, in room for the larger of the two."""
        from weights.memory.device_arena import DeviceArena

        arena: DeviceArena | None = None

        def use(name: str) -> None:
            assert arena
            arena.hold(
                [ref.sha256 for own in self._manifests[name].components.values() for ref in own.tensors.values()], name
            )
            for component, own in self._manifests[name].components.items():
                arena.acquire(own.tensors, self._views[name][component], name)
            arena.end_holder(name)

        budget = max(self._allocated(name) for name in (old, new))
        arena = DeviceArena("sim:0", budget)
        use(old)
        return moved_bytes(lambda: use(new))

    def _allocated(self, name: str) -> int:
        from weights.memory.devices import allocated_bytes

        sizes = {
            ref.sha256: ref.nbytes for own in self._manifests[name].components.values() for ref in own.tensors.values()
        }
        return sum(allocated_bytes(torch.device("sim", 0), nbytes) for nbytes in sizes.values())

    def _load(self, name: str) -> Any:
        import diffusers

        pipeline = diffusers.DiffusionPipeline.from_pretrained(str(self._stock / name), torch_dtype=torch.float32)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def _op_us() -> dict[str, dict[str, float]]:
    """Return the microseconds of small calls on both devices: nearly all of it is the call itself."""
    ops: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "view": lambda x: x.view(-1),
        "add": lambda x: x + x,
        "matmul 16x16": lambda x: x @ x,
        "softmax": lambda x: x.softmax(-1),
        "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    }
    times: dict[str, dict[str, float]] = {name: {} for name in ops}
    for where in ("cpu", "sim"):
        x = torch.rand(16, 16, device=where)
        with torch.no_grad():
            for name, op in ops.items():
                samples = []
                for _ in range(5):
                    start = time.perf_counter()
                    for _ in range(NUM_CALLS // 5):
                        op(x)
                    samples.append((time.perf_counter() - start) / (NUM_CALLS // 5) * 1e6)
                times[name][where] = min(samples)
    return times


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(_measure(Path(sys.argv[1]))) + "\n")
