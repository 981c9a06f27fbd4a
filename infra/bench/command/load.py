"""`atelier bench load`: bytes from storage to ready shared tensors, beside other loaders and the raw disk, in one run.

Ours is the whole way: a node's keeper reads and verifies into Ray's store, this process attaches. A peer loads into
private memory, in a process of its own, with every byte touched. Loaders take turns in an order that is drawn for each
round, and each has a copy of the files of its own: what lies below a virtual disk caches too, in favour of whoever
comes after a reader of the same bytes. Figures are medians of the rounds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from xxhash import xxh3_128

from cluster.keeper.actor import KeeperSettings, keeper_class
from cluster.keeper.ray_extents import RayExtents
from deployments.console.output import Column, print_line, print_table
from infra.bench.command import load_peers
from infra.bench.command.figures import OnProgress, Parts
from infra.bench.command.machine import private_ray, touch_memory
from infra.bench.command.synthetic import write_flux_transformer
from weights.loading.views import attach
from weights.memory.host_pool import ByteArray, allocate_pages
from weights.operations.externalize import externalize
from weights.reading.report import LoadReport
from weights.records.errors import WeightsError
from weights.records.manifest import ExtentRef, Manifest
from weights.storage.store import WeightStore

MODEL = "bench"
MODES = ("cold", "warm")
RAW_READS = ((1, 64), (8, 32), (8, 64), (16, 16))  # threads, MiB per O_DIRECT read: the best of a trial is the raw disk
RAW, OURS, UNVERIFIED = "raw O_DIRECT", "ours", "ours-unverified"
# A virtual disk is slower when its machine does anything else: what a loader that verifies could reach.
RAW_BUSY = "raw O_DIRECT beside a core that hashes"
KEEPERS = {OURS: True, UNVERIFIED: False}  # whether it verifies
PEER_TIMEOUT_S = 300.0
DROP_TIMEOUT_S = 10.0
HASHED_BYTES = 256 * 2**20  # more than any cache holds
Tell = Callable[[str], None]


@dataclass
class _Samples:
    gbps: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    digests: set[str] = field(default_factory=set)

    @property
    def median(self) -> float:
        return statistics.median(self.gbps)


@dataclass(frozen=True)
class _Loaded:
    seconds: float
    nbytes: int
    peak_rss_bytes: int
    digest: str


class _Bench:
    """State of a run: one model, a copy of it for each loader, and everything that loads it."""

    def __init__(self, source: Path, work: Path, peers: Sequence[str]) -> None:
        files = sorted(source.glob("*.safetensors"))
        if not files:
            raise WeightsError(
                f"{source}: no safetensors files; expected a model folder as diffusers or transformers saves it"
            )
        store = WeightStore(work / OURS)
        self.manifest: Manifest = externalize(store, MODEL, source)
        self.extents: tuple[ExtentRef, ...] = self.manifest.extents_of(self.manifest.components)
        shutil.copytree(store.packs, work / UNVERIFIED)
        self._packs = {OURS: store.packs, UNVERIFIED: work / UNVERIFIED}
        self._keepers: dict[str, Any] = {}
        self.peers = peers
        self._sources = {name: _copy_for(name, source, work) for name in peers}
        self._raw_files = _copied(files, work / "raw")
        self._raw_reads = RAW_READS[0]
        self.last_report: LoadReport | None = None

    def try_raw(self) -> None:
        """Find out how this disk is read fastest."""
        trials = {reads: statistics.median(self._raw(reads).seconds for _ in range(3)) for reads in RAW_READS}
        self._raw_reads = min(trials, key=lambda reads: trials[reads])

    @property
    def raw_reads(self) -> str:
        return "{} x {} MiB".format(*self._raw_reads)

    def loaders(self) -> dict[str, Callable[[str], _Loaded]]:
        """Return the loaders by name; each takes the mode."""
        ours = {name: partial(self.load_ours, name) for name in KEEPERS}
        raw = {RAW: lambda mode: self._raw(self._raw_reads), RAW_BUSY: lambda mode: self._raw_busy()}
        return {**raw, **ours, **{name: self._peer(name) for name in self.peers}}

    def start_keepers(self) -> None:
        """Start keepers as on a node that has loaded before: staging exists, and its pages are mapped."""
        for name, verify in KEEPERS.items():
            self._keepers[name] = keeper_class().remote(
                str(self._packs[name]),
                2 * self.manifest.nbytes,
                "bench",
                KeeperSettings(verify=verify, audit_bytes_per_s=0, populate=True),
            )
            self.load_ours(name, "cold")

    def load_ours(self, name: str, mode: str) -> _Loaded:
        """Load through a keeper that holds nothing before and after."""
        actor = self._keepers[name]
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        extents = RayExtents(actor, "bench")
        _set_cache(mode, self.packs_of(name))
        start = time.perf_counter()
        buffers = extents.fetch(self.extents)
        tensors = {
            name: tensor
            for component in self.manifest.components.values()
            for name, tensor in attach(component, buffers).items()
        }
        seconds = time.perf_counter() - start
        digest = load_peers.digest(tensors)
        peak = _peak_private_bytes(pid)
        del tensors, buffers
        self.last_report = extents.last_report
        extents.release(self.extents)
        extents.close()
        self._empty(actor)
        return _Loaded(seconds, self.manifest.nbytes, peak, digest)

    def packs_of(self, name: str) -> list[Path]:
        return sorted({self._packs[name] / extent.pack for extent in self.extents})

    def _empty(self, actor: Any) -> None:
        ids = [extent.id for extent in self.extents]
        deadline_s = time.monotonic() + DROP_TIMEOUT_S
        dropped = 0
        while dropped < len(ids):  # a lease is given back by a call that nobody waits for
            dropped += len(ray.get(actor.drop.remote(ids)))
            if time.monotonic() > deadline_s:
                raise WeightsError(f"the keeper still holds {len(ids) - dropped} of {len(ids)} extents")
            time.sleep(0.05)

    def _raw(self, reads: tuple[int, int]) -> _Loaded:
        load_peers.drop_cache(self._raw_files)
        return _read_raw(self._raw_files, reads[0], reads[1] * 2**20)

    def _raw_busy(self) -> _Loaded:
        buffer, is_done = allocate_pages(HASHED_BYTES), threading.Event()
        buffer.fill(1)

        def hash_on() -> None:
            while not is_done.is_set():
                xxh3_128(buffer.data)

        hashing = threading.Thread(target=hash_on)
        hashing.start()
        try:
            return self._raw(self._raw_reads)
        finally:
            is_done.set()
            hashing.join()

    def _peer(self, name: str) -> Callable[[str], _Loaded]:
        def load(mode: str) -> _Loaded:
            command = [sys.executable, "-m", "infra.bench.command.load_peers", name, str(self._sources[name]), mode]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False)
            if done.returncode:
                raise WeightsError(
                    f"{name} could not load {self._sources[name]}: {done.stderr.strip().splitlines()[-1:]}"
                )
            answer = json.loads(done.stdout.splitlines()[-1])
            return _Loaded(answer["seconds"], answer["bytes"], answer["peak_rss_bytes"], answer["digest"])

        return load


def measure_load(
    source: Path | None,
    shape: str,
    rounds: int,
    with_peers: bool,
    work: Path | None = None,
    seed: int = 0,
    progress: OnProgress | None = None,
    tell: Tell = lambda line: None,
) -> dict[str, Any]:
    """Measure loads of one model; returns a JSON-able object; GB/s are 10^9 bytes per second of tensor bytes.

    `source` None makes a Flux transformer of `shape` with random weights. `work` is where the copies go: the disk
    that is measured. `seed` is that of the orders. `progress` gets the loads that are done, and all;
    `tell` gets a line when the model has been copied, and after each round.
    """
    peers = tuple(load_peers.LOADERS) if with_peers else ()
    with tempfile.TemporaryDirectory(dir=work, prefix="bench-load-") as folder:
        given = source.expanduser() if source else Path(folder) / shape
        if source is None:
            write_flux_transformer(given, shape)
        bench = _Bench(given, Path(folder), peers)
        if source is None:
            shutil.rmtree(given)  # every loader has its own by now
        os.sync()  # what is still being written would slow the reads, and memory for Ray's store is not free before
        tell(f"{bench.manifest.nbytes / 1e9:.2f} GB, copied for {3 + len(peers)} loaders")
        orders = _draw_orders([RAW, RAW_BUSY, *KEEPERS, *peers], rounds, seed)
        bench.try_raw()
        # Last before Ray, which gives up a node that takes 30 s to touch its store: a host takes free memory back soon.
        touch_memory(4 * bench.manifest.nbytes)
        # A model and a half: while one keeper's copy is freed, the next one's is made.
        with private_ray(int(bench.manifest.nbytes * 2.6)):
            bench.start_keepers()
            samples = _take_turns(bench, orders, progress, tell)
            report = _stage_report(bench)
    tensors = [ref for component in bench.manifest.components.values() for ref in component.tensors.values()]
    return {
        **_figures(samples["cold"], peers),
        "warm": _figures(samples["warm"], peers),
        "bytes": bench.manifest.nbytes,
        "num_tensors": len(tensors),
        "rounds": rounds,
        "seed": seed,
        "orders": orders,
        "raw_reads": bench.raw_reads,
        "report": report,
    }


def _draw_orders(names: Sequence[str], rounds: int, seed: int) -> dict[str, list[list[str]]]:
    """Draw the order of the loaders in each round, by mode."""
    rng = random.Random(seed)
    return {mode: [rng.sample(names, len(names)) for _ in range(rounds)] for mode in MODES}


def _take_turns(
    bench: _Bench, orders: dict[str, list[list[str]]], progress: OnProgress | None, tell: Tell
) -> dict[str, dict[str, _Samples]]:
    loaders = bench.loaders()
    parts = Parts(sum(len(order) for rounds in orders.values() for order in rounds), progress)
    samples = {mode: {name: _Samples() for name in loaders} for mode in MODES}
    rounds = len(orders[MODES[0]])
    for number in range(rounds):
        for mode in MODES:
            for name in orders[mode][number]:
                loaded = parts.done(loaders[name](mode))
                found = samples[mode][name]
                found.gbps.append(loaded.nbytes / loaded.seconds / 1e9)
                found.peak_rss_bytes = max(found.peak_rss_bytes, loaded.peak_rss_bytes)
                found.digests.add(loaded.digest)
            gbps = ", ".join(f"{name} {found.gbps[-1]:.2f}" for name, found in samples[mode].items())
            tell(f"round {number + 1} of {rounds}, {mode}, GB/s: {gbps}")
    return samples


def _figures(samples: dict[str, _Samples], peers: Sequence[str]) -> dict[str, Any]:
    ours = samples[OURS]
    raw_gbps = samples[RAW].median
    medians = {name: samples[name].median for name in peers}
    digests = {digest for name, found in samples.items() if name not in (RAW, RAW_BUSY) for digest in found.digests}
    return {
        "ours_gbps": ours.median,
        "raw_gbps": raw_gbps,
        "raw_busy_gbps": samples[RAW_BUSY].median,
        "ratio_raw": ours.median / raw_gbps,
        "peers": medians,
        "ratio_best_peer": ours.median / max(medians.values()) if medians else None,
        "verified": len(digests) == 1,
        "verification_cost": 1 - ours.median / samples[UNVERIFIED].median,
        "peak_rss_bytes": ours.peak_rss_bytes,
        "peers_peak_rss_bytes": {name: samples[name].peak_rss_bytes for name in peers},
        "range_gbps": {name: (min(found.gbps), max(found.gbps)) for name, found in samples.items()},
    }


def _stage_report(bench: _Bench) -> dict[str, Any]:
    """Load once more, cold, and report where the time goes."""
    bench.load_ours(OURS, "cold")
    assert bench.last_report
    return bench.last_report.as_record() | {"what": MODEL}


def _read_raw(files: Sequence[Path], num_threads: int, block_bytes: int) -> _Loaded:
    """Read the disk alone: O_DIRECT, thrown away, into huge pages as ours, which need fewer requests."""
    blocks = iter([(file, at) for file in files for at in range(0, file.stat().st_size, block_bytes)])
    lock, total = threading.Lock(), [0]
    buffers = [allocate_pages(block_bytes) for _ in range(num_threads)]
    for buffer in buffers:
        buffer.fill(1)

    def read(buffer: ByteArray) -> None:
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            descriptor = os.open(block[0], os.O_RDONLY | os.O_DIRECT)
            try:
                count = os.preadv(descriptor, [buffer.data], block[1])
            finally:
                os.close(descriptor)
            with lock:
                total[0] += count

    threads = [threading.Thread(target=read, args=(buffer,)) for buffer in buffers]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _Loaded(time.perf_counter() - start, total[0], 0, "")


def _set_cache(mode: str, files: Sequence[Path]) -> None:
    (load_peers.drop_cache if mode == "cold" else load_peers.fill_cache)(list(files))


def _peak_private_bytes(pid: int) -> int:
    """Return peak RSS of the keeper without the shared memory it filled: staging, interpreter, libraries."""
    return load_peers.peak_rss_bytes(pid) - psutil.Process(pid).memory_info().shared


def _copied(files: Sequence[Path], folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    return [Path(shutil.copy(file, folder)) for file in files]


def _copy_for(name: str, source: Path, work: Path) -> Path:
    """Copy into a folder what this peer reads: the stock files, or the same tensors in its own format."""
    folder = work / name
    folder.mkdir()
    own_format = load_peers.OWN_FORMATS.get(name)
    if own_format is None:
        _copied([file for file in source.iterdir() if file.suffix in (".safetensors", ".json")], folder / "model")
        return folder / "model"
    from safetensors.torch import load_file

    tensors = {
        name: tensor for file in sorted(source.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    if name == "torch-mmap":
        torch.save(tensors, folder / own_format)
    else:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(folder / own_format))
        serializer.write_state_dict(tensors)
        serializer.close()
    return folder


def print_load_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print a table of loaders, or one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    warm = figures["warm"]
    rows = []
    for name, gbps, rss in _load_rows(figures):
        low, high = figures["range_gbps"].get(name, (gbps, gbps))
        raw = {"raw O_DIRECT": warm["raw_gbps"], "raw O_DIRECT beside a core that hashes": warm["raw_busy_gbps"]}
        warm_gbps = {"ours": warm["ours_gbps"], **raw, **warm["peers"]}[name]
        warm_low, warm_high = warm["range_gbps"].get(name, (warm_gbps, warm_gbps))
        cells = [
            f"{gbps:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{warm_gbps:.2f}",
            f"{warm_low:.2f} to {warm_high:.2f}",
            f"{rss / 1e9:.2f}" if rss else "",
        ]
        rows.append([name, *cells])
    headers = ("cold GB/s", "range", "warm GB/s", "range", "peak GB")
    print_table((Column("loader", "text"), *(Column(header, align="right") for header in headers)), rows)
    best = figures["ratio_best_peer"]
    print_line(
        f"{figures['bytes'] / 1e9:.2f} GB in {figures['num_tensors']} tensors, medians of {figures['rounds']} rounds; "
        f"raw reads {figures['raw_reads']}; ours / raw {figures['ratio_raw']:.2f}"
        + (f", ours / best peer {best:.2f}" if best else "")
        + "; "
        f"verification costs {figures['verification_cost']:.1%}; "
        + ("all loaders gave the same bytes" if figures["verified"] else "loaders gave DIFFERENT bytes")
    )


def _load_rows(figures: dict[str, Any]) -> list[tuple[str, float, int]]:
    peers = [(name, gbps, figures["peers_peak_rss_bytes"][name]) for name, gbps in figures["peers"].items()]
    ours = [
        ("raw O_DIRECT", figures["raw_gbps"], 0),
        ("raw O_DIRECT beside a core that hashes", figures["raw_busy_gbps"], 0),
        ("ours", figures["ours_gbps"], figures["peak_rss_bytes"]),
    ]
    return ours + sorted(peers, key=lambda row: -row[1])
