"""`infra.bench peers`: what the work between two switches costs here and in the engines that others would take.

Times are processor time of one thread, sides in turn, medians, so that other work on the machine changes little; over
HTTP they are the clock's. The weights are the same on all sides, random where it does not matter, and results are
compared. A peer that is not installed has no row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from infra.bench.peers.decoders import DecoderFiles, measure_bfloat16, measure_int8, measure_prefix, measure_streams
from infra.bench.peers.denoisers import measure_steps, measure_unet
from infra.bench.peers.drafts import measure_draft
from infra.bench.peers.encoders import measure_embedding, measure_half
from infra.bench.peers.lookups import measure_lookup
from infra.bench.peers.pipelines import measure_image
from infra.bench.peers.served import measure_served
from infra.bench.peers.settings import PeersSettings

Rows = list[dict[str, Any]]

PARTS: Final = {
    "embedding": "texts of MiniLM's shape, float32: a forward",
    "half": "the same in bfloat16, and how far results are off those of float32",
    "bfloat16": "a decoder of TinyLlama's shape in bfloat16: a prompt, and a token",
    "int8": "the same with int8 weights",
    "prefix": "prompts at once that begin alike, int8 weights: until all have a token",
    "streams": "prompts at once, int8 weights: until all have their tokens",
    "lookup": "SmolLM2-135M: answers with tokens proposed from the text so far",
    "draft": "SmolLM2-135M as a draft model, of itself with 60 random layers more",
    "unet": "Stable Diffusion 1.5's UNet in bfloat16: a step",
    "image": "a whole image of Stable Diffusion 1.5 in bfloat16",
    "steps": "the demo's Flux: images with extrapolated steps",
    "served": "streams at once over HTTP",
}


def measure_peers(
    settings: PeersSettings, seed: int, parts: Collection[str] = tuple(PARTS)
) -> Iterator[tuple[str, Rows]]:
    """Measure part after part, and yield the rows of each. Raises RuntimeError where two sides give other results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-peers-") as name:
            measures = _measures(settings, Path(name), seed)
            for part in (known for known in PARTS if known in parts):
                torch.manual_seed(seed)
                yield part, measures[part]()
    finally:
        torch.set_num_threads(threads)


def _measures(settings: PeersSettings, folder: Path, seed: int) -> Mapping[str, Callable[[], Rows]]:
    files = DecoderFiles(folder, settings, seed)
    return {
        "embedding": partial(measure_embedding, settings),
        "half": partial(measure_half, settings),
        "bfloat16": partial(measure_bfloat16, settings, files),
        "int8": partial(measure_int8, settings, files),
        "prefix": partial(measure_prefix, settings, files),
        "streams": partial(measure_streams, settings, files),
        "lookup": partial(measure_lookup, settings, folder / "smollm2"),
        "draft": partial(measure_draft, settings, folder / "deeper"),
        "unet": partial(measure_unet, settings, folder / "unet"),
        "image": partial(measure_image, settings, folder / "image"),
        "steps": partial(measure_steps, settings),
        "served": partial(measure_served, settings, files),
    }


def print_part(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of a part."""
    if name == "served":
        table = Table("streams", "side", "tokens/s", "first token, p50 and p95 ms", "CPU s", title=PARTS[name])
        for row in rows:
            first = f"{row['first_p50_ms']:.0f}, {row['first_p95_ms']:.0f}"
            table.add_row(str(row["streams"]), row["side"], f"{row['tokens_per_s']:.1f}", first, f"{row['cpu_s']:.1f}")
    else:
        table = Table("case", "side", "CPU ms", "ms", "peer's / ours", "beside", title=PARTS[name])
        for row in rows:
            figures = f"{row['cpu_ms']:.2f}", f"{row['wall_ms']:.2f}", f"{row['ratio']:.2f}"
            table.add_row(row["case"], row["side"], *figures, row["beside"])
    Console(width=130).print(table)
