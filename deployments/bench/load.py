"""`atelier bench load`: bytes from storage to ready shared tensors, beside other loaders and the raw disk, in one run.

Ours is the whole way: a node's keeper reads, verifies and puts, this process attaches. A peer loads into private
memory, in a process of its own, with every byte touched. Loaders take turns; figures are medians of the rounds.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

from cluster.keeper import keeper_class
from cluster.ray_extents import RayExtents
from deployments.bench import load_peers
from deployments.bench.machine import private_ray, touch_memory
from deployments.bench.synthetic import write_flux_transformer
from weights.errors import WeightsError
from weights.externalize import externalize
from weights.loader import attach
from weights.manifest import ExtentRef, Manifest
from weights.reading.report import LoadReport
from weights.store import WeightStore

MODEL = "bench"
MODES = ("cold", "warm")
RAW_READS = ((1, 64 * 2**20), (4, 32 * 2**20), (8, 64 * 2**20))  # threads, bytes per O_DIRECT read: the best counts
OURS, UNVERIFIED = "ours", "ours-unverified"
PEER_TIMEOUT_S = 300.0


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
    """One model in a fresh store, and everything that loads it."""

    def __init__(self, source: Path, work: Path, peers: Sequence[str]) -> None:
        self.source = source
        self.files = sorted(source.glob("*.safetensors"))
        if not self.files:
            raise WeightsError(
                f"{source}: no safetensors files; expected a model folder as diffusers or transformers saves it"
            )
        self.store = WeightStore(work / "store")
        self.manifest: Manifest = externalize(self.store, MODEL, source)
        self.extents: tuple[ExtentRef, ...] = self.manifest.extents_of(self.manifest.components)
        self.packs = sorted({self.store.packs / extent.pack for extent in self.extents})
        self.peers = peers
        _write_own_formats(self.files, peers)

    def loaders(self) -> dict[str, Callable[[str], _Loaded]]:
        """By name; each takes the mode."""
        raw = {
            f"raw-{threads}x{block >> 20}MiB": _raw_reader(self.packs, threads, block) for threads, block in RAW_READS
        }
        ours = {
            OURS: lambda mode: self.load_ours(mode, verify=True),
            UNVERIFIED: lambda mode: self.load_ours(mode, verify=False),
        }
        return raw | ours | {name: self._peer(name) for name in self.peers}

    def load_ours(self, mode: str, *, verify: bool) -> _Loaded:
        """Through a keeper that has loaded before, as a node's has: its staging buffers exist, its pages are mapped."""
        actor = self.used_keeper(verify=verify)
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        extents = RayExtents(actor, "bench")
        _set_cache(mode, self.packs)
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
        ray.kill(actor)
        return _Loaded(seconds, self.manifest.nbytes, peak, digest)

    def used_keeper(self, *, verify: bool = True) -> Any:
        """A keeper that has loaded the model once and holds nothing now."""
        actor = keeper_class().remote(
            str(self.store.packs), 2 * self.manifest.nbytes, "bench", verify=verify, audit_bytes_per_s=0
        )
        ids = [extent.id for extent in self.extents]
        ray.get(actor.acquire.remote(list(self.extents), "earlier"))
        ray.get(actor.release.remote(ids, "earlier"))
        assert len(ray.get(actor.drop.remote(ids))) == len(ids)
        return actor

    def _peer(self, name: str) -> Callable[[str], _Loaded]:
        def load(mode: str) -> _Loaded:
            command = [sys.executable, "-m", "deployments.bench.load_peers", name, str(self.source), mode]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False)
            if done.returncode:
                raise WeightsError(f"{name} could not load {self.source}: {done.stderr.strip().splitlines()[-1:]}")
            answer = json.loads(done.stdout.splitlines()[-1])
            return _Loaded(answer["seconds"], answer["bytes"], answer["peak_rss_bytes"], answer["digest"])

        return load


def run(source: Path | None, shape: str, rounds: int, with_peers: bool, work: Path | None = None) -> dict[str, Any]:
    """Figures of one model as one JSON-able object; GB/s are 10^9 bytes per second of the tensors' bytes.

    `source` None makes a Flux transformer of `shape` with random weights. `work` is where the store goes: the disk
    that is measured.
    """
    peers = tuple(load_peers.LOADERS) if with_peers else ()
    with tempfile.TemporaryDirectory(dir=work, prefix="bench-load-") as folder:
        if source is None:
            source = Path(folder) / shape
            write_flux_transformer(source, shape)
        bench = _Bench(source.expanduser(), Path(folder), peers)
        touch_memory(4 * bench.manifest.nbytes)
        # A model and a half: while one keeper's copy is freed, the next one's is made.
        with private_ray(int(bench.manifest.nbytes * 2.6)):
            samples = _take_turns(bench, rounds)
            report = _stage_report(bench)
    tensors = [ref for component in bench.manifest.components.values() for ref in component.tensors.values()]
    return {
        **_figures(samples["cold"], peers),
        "warm": _figures(samples["warm"], peers),
        "bytes": bench.manifest.nbytes,
        "num_tensors": len(tensors),
        "rounds": rounds,
        "report": report,
    }


def _take_turns(bench: _Bench, rounds: int) -> dict[str, dict[str, _Samples]]:
    """Each round in another order, so that nobody always follows the same neighbour."""
    loaders = bench.loaders()
    samples = {mode: {name: _Samples() for name in loaders} for mode in MODES}
    names = list(loaders)
    for number in range(rounds):
        for mode in MODES:
            for name in names[number % len(names) :] + names[: number % len(names)]:
                loaded = loaders[name](mode)
                found = samples[mode][name]
                found.gbps.append(loaded.nbytes / loaded.seconds / 1e9)
                found.peak_rss_bytes = max(found.peak_rss_bytes, loaded.peak_rss_bytes)
                found.digests.add(loaded.digest)
    return samples


def _figures(samples: dict[str, _Samples], peers: Sequence[str]) -> dict[str, Any]:
    ours = samples[OURS]
    raw_gbps = max(found.median for name, found in samples.items() if name.startswith("raw-"))
    medians = {name: samples[name].median for name in peers}
    digests = {digest for name, found in samples.items() if not name.startswith("raw-") for digest in found.digests}
    return {
        "ours_gbps": ours.median,
        "raw_gbps": raw_gbps,
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
    """Where the time goes, once more, cold, with a clock in every stage."""
    actor = bench.used_keeper()
    _set_cache("cold", bench.packs)
    report: LoadReport = ray.get(actor.acquire.remote(list(bench.extents), "bench")).report
    ray.kill(actor)
    return report.as_record() | {"what": MODEL}


def _raw_reader(packs: Sequence[Path], num_threads: int, block_bytes: int) -> Callable[[str], _Loaded]:
    """The disk itself: O_DIRECT reads of the same files, thrown away."""

    def load(_: str) -> _Loaded:
        blocks = iter([(pack, at) for pack in packs for at in range(0, pack.stat().st_size, block_bytes)])
        lock, total = threading.Lock(), [0]
        buffers = [mmap.mmap(-1, block_bytes) for _ in range(num_threads)]
        for buffer in buffers:
            buffer.write(bytes(block_bytes))

        def read(buffer: mmap.mmap) -> None:
            while True:
                with lock:
                    block = next(blocks, None)
                if block is None:
                    return
                descriptor = os.open(block[0], os.O_RDONLY | os.O_DIRECT)
                try:
                    count = os.preadv(descriptor, [buffer], block[1])
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

    return load


def _set_cache(mode: str, files: Sequence[Path]) -> None:
    (load_peers.drop_cache if mode == "cold" else load_peers.fill_cache)(list(files))


def _peak_private_bytes(pid: int) -> int:
    """Peak RSS of the keeper without the shared memory that it filled: staging, interpreter, libraries."""
    return load_peers.peak_rss_bytes(pid) - psutil.Process(pid).memory_info().shared


def _write_own_formats(files: list[Path], peers: Sequence[str]) -> None:
    """What tensorizer and torch.load read, from the same tensors."""
    from safetensors.torch import load_file

    if not {"tensorizer", "torch-mmap"} & set(peers):
        return
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if "torch-mmap" in peers:
        torch.save(tensors, load_peers.torch_file(files))
    if "tensorizer" in peers:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(load_peers.tensorizer_file(files)))
        serializer.write_state_dict(tensors)
        serializer.close()
