"""`infra.bench dedup`: bytes stored of the demo pipelines and one more fine-tune, against bytes given."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from weights.operations.externalize import externalize
from weights.operations.maintenance import totals
from weights.records.manifest import Layout
from weights.storage.store import WeightStore

PIPELINES = ("digits-flux", "digits-flux-inverted", "digits-sdxl")
FINE_TUNE = "digits-flux-tuned"
LAYOUTS: tuple[Layout, ...] = ("inline", "separate", "combined")


def measure_dedup(models: Path, seed: int = 0) -> dict[str, Any]:
    """Return bytes given and stored by layout. `models` holds the demo pipelines' folders."""
    with tempfile.TemporaryDirectory() as folder:
        tuned = _fine_tune(models / PIPELINES[0], Path(folder) / FINE_TUNE, seed)
        sources = [models / name for name in PIPELINES] + [tuned]
        return {layout: _stored(sources, layout, Path(folder) / layout) for layout in LAYOUTS}


def _stored(sources: list[Path], layout: Layout, path: Path) -> dict[str, Any]:
    store = WeightStore(path)
    for source in sources:
        externalize(store, source.name, source, layout=layout)
    found = asdict(totals(store))
    on_disk = sum(file.stat().st_blocks * 512 for file in store.packs.rglob("*") if file.is_file())
    return found | {"disk_bytes": on_disk, "stored_per_given": found["stored_bytes"] / found["given_bytes"]}


def _fine_tune(base: Path, target: Path, seed: int) -> Path:
    """Copy a pipeline and move its attention weights a little, as a fine-tune of attention layers leaves them."""
    shutil.copytree(base, target)
    file = target / "transformer/diffusion_pytorch_model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".attn." in name:
            noise = torch.randn(tensor.shape, generator=generator) * 0.01
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, file, {"format": "pt"})
    return target


def print_dedup_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print a table of layouts, or one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table("layout", "given", "stored", "on disk", "stored / given")
    for layout, found in figures.items():
        sizes = [f"{found[name] / 1e6:.2f} MB" for name in ("given_bytes", "stored_bytes", "disk_bytes")]
        table.add_row(layout, *sizes, f"{found['stored_per_given']:.3f}")
    Console().print(table)
