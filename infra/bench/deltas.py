"""`infra.bench deltas`: fine-tunes as differences from their base: ratios, decoding, and cold loads of a sibling.

The demo's language model is fine-tuned five ways, by real gradient steps of seconds. A load is of the strong fine-tune,
its bytes repeated until there are enough of them, through a reader that gives as many bytes a second as the medium
would; the base is in memory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import zstandard
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from weights.externalize import externalize
from weights.manifest import ExtentRef, Manifest
from weights.memory.host_pool import HostBufferPool
from weights.memory.pages import ByteArray
from weights.reading.blocks import PackReader
from weights.reading.extents import ExtentReader
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock
from weights.reading.strategy import ReadStrategy
from weights.storage.deltas.compaction import compact
from weights.store import WeightStore

Tensors = dict[str, torch.Tensor]
FAMILIES: Final = ("lora-merged", "full-light", "full-strong", "quantization-aware", "float32")
MEDIA_GBPS: Final = (0.1, 0.5, 1.0, 3.0)
_BATCH: Final = 32
_RANK: Final = 4
_ZSTD_LEVEL: Final = 3
_FILE: Final = "model.safetensors"
_HOW: Final = ReadStrategy(direct=False, num_threads=4, block_bytes=8 * 2**20)


@dataclass(frozen=True, slots=True)
class DeltaSettings:
    """The effort: gradient steps of each fine-tune, bytes of the model that is loaded, loads of each kind."""

    steps: int = 100
    load_bytes: int = 512 * 2**20
    rounds: int = 5


QUICK: Final = DeltaSettings(steps=5, load_bytes=64 * 2**20, rounds=1)


def measure_deltas(settings: DeltaSettings, models: Path, seed: int = 0) -> dict[str, Any]:
    """Return ratios by family, and of the strong one decode GB/s (10^9) per core and its loads by medium."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        pairs = {name: _train(name, models / "adder", settings.steps) for name in FAMILIES}
        ratios = {name: _ratios(*pair, models / "adder", Path(folder) / name) for name, pair in pairs.items()}
        large = [_repeated(tensors, settings.load_bytes) for tensors in pairs["full-strong"]]
        store, sibling = _stored(large[0], large[1], models / "adder", Path(folder) / "large")
        if sibling.version == 1:
            raise RuntimeError("no delta of the strong fine-tune is smaller than its plain bytes")
        loads = {f"{gbps:g}": _loads(store, sibling, gbps, settings.rounds) for gbps in MEDIA_GBPS}
        return {"ratios": ratios, "decode_gbps": _decode_gbps(store, sibling), "loads": loads}


# Fine-tunes.


def _train(family: str, source: Path, steps: int) -> tuple[Tensors, Tensors]:
    """Return the tensors of a base and of its fine-tune, as they would be stored."""
    if family == "float32":
        return _as(torch.float32, load_file(source / _FILE)), _fine_tune(source, steps, 1e-4, torch.float32)
    if family == "quantization-aware":
        tuned = _fine_tune(source, steps, 1e-4, torch.float32, quantized=True)
        return _to_int8(load_file(source / _FILE)), _to_int8(tuned)
    base = load_file(source / _FILE)
    if family == "lora-merged":
        return base, _fine_tune(source, steps, 1e-3, torch.bfloat16, rank=_RANK)
    return base, _fine_tune(source, steps, {"full-light": 1e-5, "full-strong": 1e-3}[family], torch.bfloat16)


def _fine_tune(
    source: Path, steps: int, lr: float, dtype: torch.dtype, *, rank: int = 0, quantized: bool = False
) -> Tensors:
    """Train on the sums of numbers that the base never saw: subtraction, in its own template."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(source)
    linears = [found for found in model.modules() if isinstance(found, torch.nn.Linear)]
    if rank:
        model.requires_grad_(False)
        wrapped = [found for name, found in model.named_modules() if name.endswith(("q_proj", "v_proj"))]
        for linear in wrapped:
            torch.nn.utils.parametrize.register_parametrization(linear, "weight", _LowRank(linear.weight, rank))
    elif quantized:
        for linear in linears:
            torch.nn.utils.parametrize.register_parametrization(linear, "weight", _FakeInt8())
    optimizer = torch.optim.AdamW([found for found in model.parameters() if found.requires_grad], lr=lr)
    for _ in range(steps):
        a, b = torch.randint(10, 99, (2, _BATCH)).tolist()
        chats = [
            [
                {"role": "user", "content": f"What is {max(x, y)} - {min(x, y)}?"},
                {"role": "assistant", "content": str(abs(x - y))},
            ]
            for x, y in zip(a, b, strict=True)
        ]
        texts = tokenizer.apply_chat_template(chats, tokenize=False)
        ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    for linear in linears:
        if torch.nn.utils.parametrize.is_parametrized(linear):
            torch.nn.utils.parametrize.remove_parametrizations(linear, "weight", leave_parametrized=bool(rank))
    return _as(dtype, {name: tensor.detach() for name, tensor in model.state_dict().items()})


class _LowRank(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.up = torch.nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


class _FakeInt8(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        scale = weight.detach().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
        return weight + ((weight / scale).round() * scale - weight).detach()


def _to_int8(tensors: Tensors) -> Tensors:
    """Quantize matrices to int8, a scale a row."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            scale = tensor.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
            stored[name] = (tensor.float() / scale).round().to(torch.int8)
            stored[f"{name}_scale"] = scale.flatten().float()
        else:
            stored[name] = tensor.to(torch.bfloat16)
    return stored


def _as(dtype: torch.dtype, tensors: Tensors) -> Tensors:
    return {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}


def _repeated(tensors: Tensors, nbytes: int) -> Tensors:
    """Make a model of larger tensors: each repeated, its elements in another order each time, so that no bytes recur.

    The order is the same for every model.
    """
    given = sum(tensor.nbytes for tensor in tensors.values())
    generator = torch.Generator().manual_seed(0)
    large = {}
    for name, tensor in sorted(tensors.items()):
        flat = tensor.flatten()
        orders = [torch.randperm(len(flat), generator=generator) for _ in range(max(1, nbytes // given))]
        large[name] = torch.cat([flat[order] for order in orders]).reshape(-1, *tensor.shape[1:])
    return large


# Ratios.


def _stored(base: Tensors, tuned: Tensors, source: Path, folder: Path) -> tuple[WeightStore, Manifest]:
    """Bring both into a store and compact it; returns the manifest of the one that is stored in both forms."""
    store = WeightStore(folder / "store")
    for name, tensors in (("base", base), ("tuned", tuned)):
        (folder / name).mkdir(parents=True)
        shutil.copy(source / "config.json", folder / name)
        save_file(tensors, folder / name / _FILE)
        externalize(store, name, folder / name)
    compact(store, keep_plain=True)
    with_deltas = [found for found in store.manifests().values() if found.version > 1]
    return store, with_deltas[0] if with_deltas else store.manifest("tuned")


def _ratios(base: Tensors, tuned: Tensors, source: Path, folder: Path) -> dict[str, Any]:
    """Return stored bytes as part of the fine-tune's own ones, which it does not share with its base."""
    _, manifest = _stored(base, tuned, source, folder)
    own = [name for name, tensor in tuned.items() if not torch.equal(tensor, base[name])]
    raw = b"".join(tuned[name].view(torch.uint8).numpy().tobytes() for name in own if tuned[name].dim())
    extents = [extent for extent in manifest.extents.values() if extent.delta]
    plain_bytes = sum(extent.nbytes for extent in extents)
    delta_bytes = sum(extent.delta.nbytes for extent in extents if extent.delta)
    return {
        "own_bytes": len(raw),
        "delta": delta_bytes / plain_bytes if plain_bytes else 1.0,
        "zstd": len(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)) / len(raw) if raw else 1.0,
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


class _SlowReader(ExtentReader):
    """A reader of a medium, as fast as the page cache otherwise."""

    def __init__(self, store: WeightStore, gbps: float, resident: Callable[[ExtentRef], ByteArray | None]) -> None:
        super().__init__(store.packs, HostBufferPool(2**26), ReadPlanner(override=_HOW), resident=resident)
        self._medium = _Medium(gbps * 1e9)

    @contextlib.contextmanager
    def _open(self, extent: ExtentRef, stages: StageClock) -> Iterator[tuple[Any, ReadStrategy]]:
        with super()._open(extent, stages) as (pack, strategy):
            yield _SlowPack(pack, self._medium), strategy


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


def _decode_gbps(store: WeightStore, sibling: Manifest) -> float:
    """Return plain bytes per second of one core's time in decoding alone, without reading and hashing."""
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
    figures = stages.figures()["decode"]
    return figures.nbytes / figures.busy_s / 1e9


def print_delta_figures(figures: dict[str, Any], settings: DeltaSettings, as_json: bool) -> None:
    """Print tables of ratios and loads, or one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures | {"settings": asdict(settings)}) + "\n")
        return
    console = Console()
    ratios = Table("family", "own bytes", "delta / plain", "zstd / plain")
    for name, found in figures["ratios"].items():
        ratios.add_row(name, f"{found['own_bytes'] / 1e6:.2f} MB", f"{found['delta']:.3f}", f"{found['zstd']:.3f}")
    console.print(ratios)
    console.print(f"decoding: {figures['decode_gbps']:.2f} GB/s per core")
    loads = Table(
        "medium GB/s", *(f"{how} s" for how in ("plain", "delta", "chosen")), "read / given", "chosen / plain"
    )
    for gbps, found in figures["loads"].items():
        seconds = [f"{found[how]['seconds']:.3f}" for how in ("plain", "delta", "chosen")]
        share = found["chosen"]["seconds"] / found["plain"]["seconds"]
        loads.add_row(gbps, *seconds, f"{found['chosen']['read_per_given']:.2f}", f"{share:.2f}")
    console.print(loads)
