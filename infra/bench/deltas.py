"""`infra.bench deltas`: fine-tunes as differences from their base: ratios, decoding, and cold loads of a sibling.

The demo's language model is fine-tuned five ways, by real gradient steps of seconds. A load is of the strong fine-tune,
its bytes repeated until there are enough of them, through a reader that gives as many bytes a second as the medium
would; the base is in memory. The store of 40 has four models of one structure, three of which were trained from
nothing, and nine checkpoints of each: three of a light, a strong and a LoRA's training.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import zstandard
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from infra.bench.delta_families import (
    FAMILIES,
    FILE,
    RECIPES,
    Tensors,
    checkpoints,
    repeated,
    train,
    train_from_nothing,
)
from weights.memory.host_pool import ByteArray, HostBufferPool
from weights.operations.compaction import compact
from weights.operations.externalize import externalize
from weights.reading.blocks import PackReader
from weights.reading.delta_codec import Segment, chunk_sizes, encode_chunk
from weights.reading.delta_extents import DeltaReader
from weights.reading.extents import ExtentReader
from weights.reading.plain_extents import PlainReader
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock
from weights.reading.strategy import ReadStrategy
from weights.records.manifest import ExtentRef, Manifest
from weights.storage.store import WeightStore

MEDIA_GBPS: Final = (0.1, 0.5, 1.0, 3.0)
ZIPNN: Final = Path(".judges/zipnn")  # `make judge-zipnn`
_ZSTD_LEVEL: Final = 3
_NUM_BASES: Final = 4
_CHECKPOINTS: Final = 3  # of each training
_HOW: Final = ReadStrategy(direct=False, num_threads=4, block_bytes=8 * 2**20)


@dataclass(frozen=True, slots=True)
class DeltaSettings:
    """The effort: gradient steps of each fine-tune, bytes of models that are decoded and loaded, loads of each kind.

    `store_steps` are those of each of the twelve trainings of the store of 40.
    """

    steps: int = 100
    load_bytes: int = 512 * 2**20
    decode_bytes: int = 64 * 2**20
    rounds: int = 5
    store_steps: int = 30


QUICK: Final = DeltaSettings(steps=5, load_bytes=64 * 2**20, decode_bytes=8 * 2**20, rounds=1, store_steps=3)
Tell = Callable[[str], None]


def measure_deltas(
    settings: DeltaSettings, models: Path, seed: int = 0, zipnn: Path = ZIPNN, tell: Tell = lambda line: None
) -> dict[str, Any]:
    """Return ratios and decode GB/s (10^9) per core by family, loads of the strong one by medium, and the store of 40.

    `zipnn` is the folder that it is installed in; without it there are no figures of it. `tell` gets a line as each
    part begins.
    """
    torch.manual_seed(seed)
    adder, how_many = models / "adder", settings.load_bytes
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        tell(f"{len(FAMILIES)} fine-tunes of {settings.steps} steps")
        pairs = {name: train(name, adder, settings.steps) for name in FAMILIES}
        ratios = {name: _ratios(*pair, adder, folder / name, zipnn) for name, pair in pairs.items()}
        tell("decoding")
        for name, pair in pairs.items():
            ratios[name]["decode_gbps"] = _decode_gbps(*_large(pair, settings.decode_bytes, adder, folder / "decoded"))
        tell("loads")
        store, sibling = _large(pairs["full-strong"], how_many, adder, folder / "large")
        if sibling.version == 1:
            raise RuntimeError("no delta of the strong fine-tune is smaller than its plain bytes")
        loads = {f"{gbps:g}": _loads(store, sibling, gbps, settings.rounds) for gbps in MEDIA_GBPS}
        shutil.rmtree(folder / "large")
        tell(f"a store of {_NUM_BASES * (1 + len(RECIPES) * _CHECKPOINTS)} checkpoints")
        kept = _store_of_many(adder, settings.store_steps, folder / "many")
        return {"ratios": ratios, "loads": loads, "store": kept}


def _large(pair: tuple[Tensors, Tensors], nbytes: int, source: Path, folder: Path) -> tuple[WeightStore, Manifest]:
    shutil.rmtree(folder, ignore_errors=True)
    base, tuned = (repeated(tensors, nbytes) for tensors in pair)
    return _stored(base, tuned, source, folder)


# Ratios.


def _stored(base: Tensors, tuned: Tensors, source: Path, folder: Path) -> tuple[WeightStore, Manifest]:
    """Bring both into a store and compact it; returns the manifest of the one that is stored in both forms."""
    store = WeightStore(folder / "store")
    for name, tensors in (("base", base), ("tuned", tuned)):
        _bring_in(store, name, tensors, source, folder)
    compact(store, keep_plain=True)
    with_deltas = [found for found in store.manifests().values() if found.version > 1]
    return store, with_deltas[0] if with_deltas else store.manifest("tuned")


def _bring_in(store: WeightStore, name: str, tensors: Tensors, source: Path, folder: Path) -> None:
    """Add a model; its folder does not stay."""
    given = folder / name
    given.mkdir(parents=True)
    shutil.copy(source / "config.json", given)
    save_file(tensors, given / FILE)
    externalize(store, name, given)
    shutil.rmtree(given)


def _ratios(base: Tensors, tuned: Tensors, source: Path, folder: Path, zipnn: Path) -> dict[str, Any]:
    """Return stored bytes as part of the fine-tune's own ones, which it does not share with its base.

    "best" takes for each tensor whatever is smallest.
    """
    _, manifest = _stored(base, tuned, source, folder)
    own = [name for name, tensor in tuned.items() if tensor.dim() and not torch.equal(tensor, base[name])]
    raw = {name: _bytes_of(tuned[name]) for name in own}
    own_bytes = sum(map(len, raw.values()))
    zstd = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    judged = _zipnn_sizes({name: base[name] for name in own}, {name: tuned[name] for name in own}, folder, zipnn)
    together = judged.pop("", None)
    best_bytes = sum(
        min(len(data), len(zstd.compress(data)), _encoded_bytes(tuned[name], base[name]), *judged.get(name, ()))
        for name, data in raw.items()
    )
    extents = [extent for extent in manifest.extents.values() if extent.delta]
    plain_bytes = sum(extent.nbytes for extent in extents)
    delta_bytes = sum(extent.delta.nbytes for extent in extents if extent.delta)
    return {
        "own_bytes": own_bytes,
        "delta": delta_bytes / plain_bytes if plain_bytes else 1.0,
        "zstd": len(zstd.compress(b"".join(raw.values()))) / own_bytes,
        "zipnn": together[0] / own_bytes if together else None,
        "zipnn_delta": together[1] / own_bytes if together else None,
        "best": best_bytes / own_bytes,
    }


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def _encoded_bytes(tensor: torch.Tensor, base: torch.Tensor) -> int:
    """Return the bytes of one tensor by the codec of deltas, without a header."""
    data, other = (np.frombuffer(_bytes_of(found), np.uint8) for found in (tensor, base))
    sizes = list(chunk_sizes(Segment(data.nbytes, tensor.element_size())))
    places = zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)
    return sum(
        len(encode_chunk(data[start : start + size], tensor.element_size(), other[start : start + size]))
        for start, size in places
    )


def _zipnn_sizes(base: Tensors, tuned: Tensors, folder: Path, zipnn: Path) -> dict[str, tuple[int, int]]:
    """Return the bytes by tensor, alone and as a difference, by zipnn, in its own process; {}: it is not here."""
    if not zipnn.is_dir() or not tuned:
        return {}
    files = [folder / f"{name}.safetensors" for name in ("base", "tuned")]
    for file, tensors in zip(files, (base, tuned), strict=True):
        save_file(tensors, file)
    command = [sys.executable, "-m", "infra.bench.zipnn_sizes", *map(str, files)]
    path = os.pathsep.join([os.getcwd(), str(zipnn.resolve())])
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path})
    return {name: tuple(sizes) for name, sizes in json.loads(done.stdout).items()}


# A store of many.


def _store_of_many(source: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Return the bytes of a store of four families in one structure, before it is compacted and afterwards."""
    store = WeightStore(folder / "store")
    at = [max(1, steps * number // _CHECKPOINTS) for number in range(1, _CHECKPOINTS + 1)]
    for number in range(_NUM_BASES):
        base = source
        if number:
            base = folder / f"trained-{number}"
            _bring_in(store, f"base-{number}", train_from_nothing(source, steps, base), source, folder)
        else:
            _bring_in(store, "base-0", load_file(source / FILE), source, folder)
        for recipe in RECIPES:
            for step, tensors in zip(at, checkpoints(base, recipe, at), strict=True):
                _bring_in(store, f"{recipe}-{number}-{step}", tensors, source, folder)
    report = compact(store)
    return {
        "num_models": len(store.manifests()),
        "num_plain": sum(not found.bases for found in report.models) + len(store.manifests()) - len(report.models),
        "given_bytes": sum(manifest.nbytes for manifest in store.manifests().values()),
        "before_bytes": report.before_bytes,
        "after_bytes": report.after_bytes,
    }


# Loads.


class _Medium:
    """A medium that gives so many bytes a second, whoever asks."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait_for(self, nbytes: int) -> None:
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + nbytes / self._bytes_per_s
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.perf_counter()))


class _SlowPack:
    """A pack on a medium."""

    def __init__(self, pack: PackReader, medium: _Medium) -> None:
        self._pack, self._medium = pack, medium
        self.span, self.is_direct = pack.span, pack.is_direct

    def blocks(self, buffer: ByteArray, block_bytes: int) -> Iterator[memoryview]:
        for block in self._pack.blocks(buffer, block_bytes):
            self._medium.wait_for(block.nbytes)
            yield block


class _SlowPlain(PlainReader):
    """A reader of a medium, as fast as the page cache otherwise."""

    def __init__(self, packs: Path, pool: HostBufferPool, gbps: float) -> None:
        super().__init__(packs, pool, ReadPlanner(override=_HOW))
        self._medium = _Medium(gbps * 1e9)

    @contextlib.contextmanager
    def open(self, extent: ExtentRef, stages: StageClock) -> Iterator[tuple[Any, ReadStrategy]]:
        with super().open(extent, stages) as (pack, strategy):
            yield _SlowPack(pack, self._medium), strategy


class _SlowReader(ExtentReader):
    """A reader of extents, plain and as deltas, from such a medium."""

    def __init__(self, store: WeightStore, gbps: float, resident: Callable[[ExtentRef], ByteArray | None]) -> None:
        pool = HostBufferPool(2**26)
        super().__init__(store.packs, pool, ReadPlanner(override=_HOW), resident=resident)
        self._plain = _SlowPlain(store.packs, pool, gbps)
        self._deltas = DeltaReader(self._plain, pool, resident)


def _loads(store: WeightStore, sibling: Manifest, gbps: float, rounds: int) -> dict[str, Any]:
    """Load the sibling plain, from its deltas, and as the reader chooses, in turn; the best of each."""
    extents = list(sibling.extents.values())
    plain = [extent.plain for extent in extents]
    deltas = [list(extent.forms())[-1] for extent in extents]
    found: dict[str, dict[str, float]] = {}
    held: dict[str, ByteArray] = {}
    reader = _SlowReader(store, gbps, lambda base: held.get(base.id))
    bases = {base.id: base for extent in extents if extent.delta for base in extent.delta.bases}
    held |= reader.read_all(list(bases.values()))[0]
    for _ in range(rounds):
        for how, chosen in (("plain", plain), ("delta", deltas), ("chosen", extents)):
            figures = _load(reader, chosen)
            if how not in found or figures["seconds"] < found[how]["seconds"]:
                found[how] = figures
    return found


def _load(reader: ExtentReader, extents: Sequence[ExtentRef]) -> dict[str, float]:
    _, report = reader.read_all(extents)
    return {"seconds": report.wall_s, "read_per_given": report.stages["read"].nbytes / report.nbytes}


def _decode_gbps(store: WeightStore, sibling: Manifest) -> float | None:
    """Return plain bytes per second of one core's time in decoding, without reading and hashing; None: no delta."""
    extents = [list(extent.forms())[-1] for extent in sibling.extents.values() if extent.delta]
    plain = ExtentReader(store.packs, None, ReadPlanner(override=_HOW))
    bases = {base.id: base for extent in extents if extent.delta for base in extent.delta.bases}
    held = {id_: plain.read(base, StageClock()) for id_, base in bases.items()}
    reader = ExtentReader(
        store.packs, None, ReadPlanner(override=_HOW), verify=False, resident=lambda base: held.get(base.id)
    )
    stages = StageClock(time.thread_time)
    for extent in extents:
        reader.read(extent, stages)
    if (figures := stages.figures().get("decode")) is None:
        return None
    return figures.nbytes / figures.busy_s / 1e9


def print_delta_figures(figures: dict[str, Any], settings: DeltaSettings, as_json: bool) -> None:
    """Print tables of ratios and loads, or one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures | {"settings": asdict(settings)}) + "\n")
        return
    console = Console()
    kinds = ("delta", "zstd", "zipnn", "zipnn_delta", "best")
    ratios = Table("family", "own bytes", *(f"{kind.replace('_', ' ')} / own" for kind in kinds), "decode GB/s")
    for name, found in figures["ratios"].items():
        shares = [f"{found[kind]:.3f}" if found[kind] else "-" for kind in kinds]
        ratios.add_row(name, f"{found['own_bytes'] / 1e6:.2f} MB", *shares, f"{found['decode_gbps'] or 0:.2f}")
    console.print(ratios)
    loads = Table(
        "medium GB/s", *(f"{how} s" for how in ("plain", "delta", "chosen")), "read / given", "chosen / plain"
    )
    for gbps, found in figures["loads"].items():
        seconds = [f"{found[how]['seconds']:.3f}" for how in ("plain", "delta", "chosen")]
        share = found["chosen"]["seconds"] / found["plain"]["seconds"]
        loads.add_row(gbps, *seconds, f"{found['chosen']['read_per_given']:.2f}", f"{share:.2f}")
    console.print(loads)
    kept = figures["store"]
    console.print(
        f"{kept['num_models']} models, {kept['num_plain']} of them plain: {kept['before_bytes'] / 1e6:.1f} MB became "
        f"{kept['after_bytes'] / 1e6:.1f} MB, {kept['after_bytes'] / kept['before_bytes']:.3f}"
    )
