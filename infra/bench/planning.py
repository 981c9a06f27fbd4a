"""`infra.bench plan`: what a forward is predicted to take, and what its plan of memory makes of that.

Nothing is allocated: modules have fake tensors. The peer is ggml's allocator, best fit in time, over the same buffers.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.footprints import PipelineTwin
from deployments.engines.diffusion.rows import DEFAULT_BOUNDS
from deployments.engines.graph.recording import Recording
from infra.bench.best_fit import best_fit_bytes
from infra.offline.splitting import split_recording
from weights.memory.lifetimes import place

MODELS: Final = Path(__file__).parents[1] / "demo/models"
HOST: Final = torch.device("cpu")
# Of each model: the side of an image, tokens of its prompt, rows of a forward, and an operation that a device may lack.
_DEMO: Final = (("digits-flux", 64, 16, 8, "native_layer_norm"), ("digits-sdxl", 64, 77, 8, "native_group_norm"))
_FLUX_DEV: Final = (1024, 512)


def measure_plans() -> Iterator[dict[str, Any]]:
    """Yield a row for each forward: bytes as it runs, alive at once and planned, the peer's, and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        for name, side, tokens, rows, lacks in _DEMO:
            twin = _demo_twin(name)
            twin.record_decode(side // 2, side // 2, 1)  # what torch imports for the first one
            footprint_s = _footprint_s(twin, side, tokens)
            denoise = partial(twin.record_denoise, side, side, tokens, rows)
            yield _row(f"{name}, {rows} rows of {side} px", denoise, lacks) | {"footprint_s": footprint_s}
            yield _row(f"{name}'s VAE, {side} px", partial(twin.record_decode, side, side, 1), "native_group_norm")
        twin = _flux_dev(Path(folder))
        side, tokens = _FLUX_DEV
        footprint_s = _footprint_s(twin, side, tokens)
        for rows in (1, 4):
            denoise = partial(twin.record_denoise, side, side, tokens, rows)
            found = _row(f"FLUX.1-dev's shape, {rows} rows of {side} px, bfloat16", denoise, "native_layer_norm")
            yield found | {"footprint_s": footprint_s}
        yield _row(f"its VAE, {side} px", partial(twin.record_decode, side, side, 1), "native_group_norm")


def _footprint_s(twin: PipelineTwin, side: int, tokens: int) -> float:
    """Return the CPU seconds of learning what images of that size take, all numbers of rows and the decode."""
    begin_s = time.thread_time()
    twin.footprints(side, side, tokens, DEFAULT_BOUNDS)
    return time.thread_time() - begin_s


def _row(name: str, record: Callable[[], Recording], lacks: str) -> dict[str, Any]:
    begin_s = time.thread_time()
    recording = record()
    recorded_s = time.thread_time()
    lifetimes = recording.lifetimes()
    plan = place(lifetimes)
    placed_s = time.thread_time()
    splits, copied_bytes = split_recording(recording, [lacks])
    split_s = time.thread_time()
    return {
        "forward": name,
        "nodes": len(recording.nodes),
        "eager_bytes": recording.eager_peak(),
        "live_bytes": plan.live_bytes,
        "plan_bytes": plan.nbytes,
        "best_fit_bytes": best_fit_bytes(lifetimes),
        "record_s": recorded_s - begin_s,
        "place_s": placed_s - recorded_s,
        "lacks": lacks,
        "splits": len(splits.splits),
        "copied_bytes": copied_bytes,
        "split_s": split_s - placed_s,
    }


def _demo_twin(name: str) -> PipelineTwin:
    folder = MODELS / name
    index = json.loads((folder / "model_index.json").read_text())
    family = family_of(index["_class_name"])
    modules = {part: _blank(index[part][1], folder / part) for part in (family.denoiser_name, "vae")}
    return PipelineTwin(family, folder, modules, HOST)


def _blank(class_name: str, folder: Path) -> nn.Module:
    stock: Any = getattr(diffusers, class_name)
    with torch.device("meta"):
        module: nn.Module = stock.from_config(stock.load_config(folder))
    return module.eval()


def _flux_dev(folder: Path) -> PipelineTwin:
    """Return the twin of FLUX.1-dev: the defaults of diffusers' class, with guidance, and the VAE of its size."""
    family = family_of("FluxPipeline")
    with torch.device("meta"):
        transformer = diffusers.FluxTransformer2DModel(guidance_embeds=True)
        vae = diffusers.AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            latent_channels=16,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.1159,
            scaling_factor=0.3611,
        )
    diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "FluxPipeline", "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]})
    )
    modules = {"transformer": transformer.to(torch.bfloat16).eval(), "vae": vae.to(torch.bfloat16).eval()}
    return PipelineTwin(family, folder, modules, HOST)


def print_plans(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    names = ("forward", "nodes", "as it runs MB", "alive MB", "planned / alive", "/ as it runs", "/ best fit", "CPU s")
    table = Table(*names)
    for row in rows:
        planned = row["plan_bytes"]
        table.add_row(
            row["forward"],
            str(row["nodes"]),
            f"{row['eager_bytes'] / 1e6:.2f}",
            f"{row['live_bytes'] / 1e6:.2f}",
            *(f"{planned / row[name]:.3f}" for name in ("live_bytes", "eager_bytes", "best_fit_bytes")),
            f"{row['record_s']:.2f} + {row['place_s']:.2f}",
        )
    console = Console(width=150)
    console.print(table)
    for row in rows:
        copied = f"{row['copied_bytes'] / 1e6:.2f} MB copied, {row['split_s'] * 1e3:.1f} ms to say so"
        if "footprint_s" in row:
            console.print(f"{row['forward']}: {row['footprint_s']:.2f} CPU s for the footprint of that size")
        console.print(f"{row['forward']} without {row['lacks']}: {row['splits']} splits, {copied}")
