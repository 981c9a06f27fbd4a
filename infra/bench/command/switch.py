"""`atelier bench switch`: what it takes to change from one model to another, beside diffusers, in one run.

Ours is a replica's own way: its module cache, its node's keeper, shared memory. Ours and the peer take turns,
each in one process with one thread; figures are medians with ranges, times in milliseconds. Memory is measured with an
object store whose pages come with their use: what is counted is what is there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from infra.bench.command.figures import OnProgress, Parts, summary
from infra.bench.command.machine import object_store_bytes, own_memory_bytes, private_ray, touch_memory, wait_for_quiet
from infra.bench.command.peers import Peer
from infra.bench.command.switch_node import BenchNode, Models, node_of
from infra.bench.command.switch_simulated import measure_simulated, simulated_tables
from infra.bench.command.synthetic import ALIAS, FLUX, SDXL, TUNED, write_pipelines

DEMO = {FLUX: "digits-flux", TUNED: "digits-flux-inverted", ALIAS: "digits-flux", SDXL: "digits-sdxl"}
REPLICAS_AT_ONCE = 5  # that start side by side; they are measured one by one
NUM_CALLERS = 64
PRIVATE = "cpu-private"
PRIVATE_BYTES = 64 * 2**20  # worker.resident_bytes of the demo's cluster
NUM_REPLICAS = 4
NODE_SHARE = 0.6  # of all models' bytes: what the keeper may hold while there is random switching
WARM_UP = 40  # switches: every model several times
STORE_SHARE = 0.7  # of the object store is a keeper's budget where nothing else is configured

TARGETS_MS = {"new_replica": 50, "kept_skeleton": 5}
LEGS = {
    "switch_ms": "Atelier",
    "touched_ms": "  every byte read",
    "diffusers_ms": "diffusers, loaded",
    "diffusers_touched_ms": "  every byte read",
    "diffusers_freeing_ms": "  freeing the other",
    "moved_ms": "diffusers, copied",
    "lookup_ms": "diffusers, kept",
}


@dataclass(frozen=True)
class SwitchRounds:
    """The number of repetitions of each measurement."""

    num_attaches: int = 20
    rounds: int = 9
    num_switches: int = 500
    num_kills: int = 5


def measure_switch(
    stock: Path, settings: SwitchRounds, work: Path | None = None, progress: OnProgress | None = None
) -> dict[str, Any]:
    """Measure; returns a JSON-able object. `stock` holds the demo pipelines; `work` is where 8 GB of files go."""
    done = Parts(10, progress).done
    with tempfile.TemporaryDirectory(dir=work, prefix="bench-switch-") as folder:
        models = Models(Path(folder) / "store", write_pipelines(Path(folder) / "models", stock))
        demo = Models(Path(folder) / "demo", {name: stock / source for name, source in DEMO.items()})
        store_bytes = 2 * models.nbytes()  # while one keeper's copy is freed, the next one's is made
        touch_memory(2 * store_bytes)
        with private_ray(store_bytes):
            found = {
                "attach_ms": done(_attaches(models, settings)),
                **done(_legs(models, settings.rounds)),
                "sibling": done(_sibling(models, settings.rounds)),
                "flood": done(_flood(models)),
                "recovery": done(_recovery(models, settings.num_kills)),
                "demo": done(_legs(demo, settings.rounds)) | {"sibling": done(_sibling(demo, settings.rounds))},
            }
        with private_ray(_store_bytes(models), preallocate=False):
            found["pss"] = done(_shared(models))
            found["churn"] = done(_churn(models, settings.num_switches))
    flux = models.manifests[FLUX]
    return found | {
        "simulated": done(measure_simulated(stock)),
        "pss_ratio": found["pss"]["ratio"],
        "bytes_moved": found["sibling"]["host"]["bytes_moved"],
        "bytes_different": found["sibling"]["bytes_different"],
        "bytes": {"flux": models.nbytes(FLUX), "sdxl": models.nbytes(SDXL), "all": models.nbytes()},
        "num_tensors": sum(len(component.tensors) for component in flux.components.values()),
    }


def _attaches(models: Models, settings: SwitchRounds) -> dict[str, Any]:
    """Measure attaches of the resident Flux pipeline in three kinds of process.

    A new one that has done its imports, one that has made the structures too, as a replica of the cluster has, and one
    that had the pipeline before.
    """
    with node_of(models) as node:
        node.import_models(FLUX)
        new = {"imports_only": False, "new_replica": True}
        found = {name: summary(_new_attaches(node, settings.num_attaches, prepare)) for name, prepare in new.items()}
        (replica,) = node.replicas(1, models.nbytes())
        ray.get(replica.switch.remote(FLUX))
        wait_for_quiet()
        kept = [_attach_again(replica) for _ in range(settings.num_attaches)]
        return found | {"kept_skeleton": summary(kept)}


def _new_attaches(node: BenchNode, number: int, prepare: bool) -> list[float]:
    samples: list[float] = []
    while len(samples) < number:
        replicas = node.replicas(min(REPLICAS_AT_ONCE, number - len(samples)), node.models.nbytes(), prepare=prepare)
        wait_for_quiet()
        samples += [ray.get(replica.switch.remote(FLUX))["ms"] for replica in replicas]
        node.end_replicas(replicas)
    return samples


def _attach_again(replica: Any) -> float:
    ray.get(replica.forget.remote())
    return float(ray.get(replica.switch.remote(FLUX))["ms"])


def _legs(models: Models, rounds: int) -> dict[str, Any]:
    """Measure the third leg of flux -> sdxl -> flux with resident weights.

    Ours keeps what it has built, within the private memory that the demo's config gives a worker: weights are the
    node's. The peer's `lookup` finds what it has built and kept.

    `touched` legs end when every byte of the pipeline has been read once: diffusers maps files that nobody has read.
    Ours includes giving up the other pipeline; what that takes diffusers is `diffusers_freeing_ms`, on top.
    """
    samples: dict[str, list[float]] = {}
    peer = Peer(num_threads=1)
    try:
        with node_of(models) as node:
            node.import_models(FLUX, SDXL)
            (replica,) = node.replicas(1, PRIVATE_BYTES)
            _keep(peer, models)
            wait_for_quiet()
            for number in range(rounds + 1):
                ours_ms = _third_leg(replica, touch=False)["ms"]
                loading_ms, freeing_ms = _peer_third_leg(peer, models, touch=False)
                turns = {
                    "switch_ms": ours_ms,
                    "diffusers_ms": loading_ms,
                    "diffusers_freeing_ms": freeing_ms,
                    "touched_ms": _third_leg(replica, touch=True)["touched_ms"],
                    "diffusers_touched_ms": _peer_third_leg(peer, models, touch=True)[0],
                    "moved_ms": _peer_move(peer),
                    "lookup_ms": peer.run_order("find_model", model=f"kept-{FLUX}"),
                }
                for name, ms in turns.items() if number else ():  # the first round is for lazy imports
                    samples.setdefault(name, []).append(ms)
    finally:
        peer.close()
    found: dict[str, Any] = {name: summary(values) for name, values in samples.items()}
    return found | {
        "ratio": found["diffusers_ms"]["p50"] / found["switch_ms"]["p50"],
        "ratio_with_freeing": (found["diffusers_ms"]["p50"] + found["diffusers_freeing_ms"]["p50"])
        / found["switch_ms"]["p50"],
        "ratio_touched": found["diffusers_touched_ms"]["p50"] / found["touched_ms"]["p50"],
        "ratio_moved": found["moved_ms"]["p50"] / found["switch_ms"]["p50"],
    }


def _third_leg(replica: Any, touch: bool) -> dict[str, Any]:
    legs: Sequence[dict[str, Any]] = [ray.get(replica.switch.remote(name, touch)) for name in (FLUX, SDXL, FLUX)]
    return legs[-1]


def _peer_third_leg(peer: Peer, models: Models, touch: bool) -> tuple[float, float]:
    """Return milliseconds to load, and before that to free the memory of the other."""
    loading = freeing = 0.0
    for name in (FLUX, SDXL, FLUX):
        freeing = peer.run_order("drop_models", models=[FLUX, SDXL])
        path = str(models.sources[name])
        loading = peer.run_order("load_model", model=name, path=path, drop=[], dtype="bfloat16", touch=touch)
    return loading, freeing


def _keep(peer: Peer, models: Models) -> None:
    for name in (FLUX, SDXL):
        path = str(models.sources[name])
        peer.run_order("load_model", model=f"kept-{name}", path=path, drop=[], dtype="bfloat16")
        peer.run_order("keep_weights", model=f"kept-{name}")


def _peer_move(peer: Peer) -> float:
    kept = {name: f"kept-{name}" for name in (FLUX, SDXL)}
    peer.run_order("move_weights", model=kept[SDXL], away=[kept[FLUX]])
    return peer.run_order("move_weights", model=kept[FLUX], away=[kept[SDXL]])


def _sibling(models: Models, rounds: int) -> dict[str, Any]:
    """Measure flux -> flux-tuned, and the same weights under another name, at each tier."""
    different = models.different_bytes(TUNED, FLUX)
    with node_of(models) as node:
        (replica,) = node.replicas(1, models.nbytes())
        host = _host_sibling(node, replica)
        (private,) = node.replicas(1, models.nbytes(), device=PRIVATE)
        ray.get(private.switch.remote(FLUX))
        moved = ray.get(private.switch.remote(TUNED))["device_bytes"]
        device = {"bytes_moved": moved, "ratio": moved / different}
        same = {tier: _same_weights(who, rounds) for tier, who in (("host", replica), (PRIVATE, private))}
    return {"bytes_different": different, "host": host, PRIVATE: device, "same_weights": same}


def _host_sibling(node: BenchNode, replica: Any) -> dict[str, Any]:
    """Return `bytes_moved` from storage to the node, `mapped_bytes` into the replica, in whole extents."""
    different = node.models.different_bytes(TUNED, FLUX)
    ray.get(replica.switch.remote(FLUX))
    before = node.keeper_stats().read_bytes
    report = ray.get(replica.switch.remote(TUNED))
    moved = node.keeper_stats().read_bytes - before
    return {
        "bytes_moved": moved,
        "ratio": moved / different,
        "mapped_bytes": report["host_bytes"],
        "mapped_ratio": report["host_bytes"] / different,
    }


def _same_weights(replica: Any, rounds: int) -> dict[str, Any]:
    """Measure a switch to the same weights under another name while the first one is built."""
    reports = []
    for _ in range(rounds):
        ray.get(replica.forget.remote())
        ray.get(replica.switch.remote(FLUX))
        reports.append(ray.get(replica.switch.remote(ALIAS)))
    moved = sum(report[f"{tier}_bytes"] for report in reports for tier in ("storage", "host", "device"))
    return {"bytes_moved": moved, "ms": summary([report["ms"] for report in reports])}


def _flood(models: Models) -> dict[str, Any]:
    """Let many callers at once ask one keeper for a model that it does not have."""
    extents = models.extents(FLUX)
    with node_of(models) as node:
        node.keeper_stats()  # it is up
        start = time.perf_counter()
        ray.get([node.keeper.acquire.remote(extents, f"caller-{number}") for number in range(NUM_CALLERS)])
        seconds = time.perf_counter() - start
        read_bytes = node.keeper_stats().read_bytes
    return {"callers": NUM_CALLERS, "read_ratio": read_bytes / models.nbytes(FLUX), "seconds": seconds}


def _recovery(models: Models, num_kills: int) -> dict[str, Any]:
    """Kill an idle keeper whose weights one replica uses; time until another replica has them attached."""
    samples, read_bytes, adopted_bytes = [], [], []
    with node_of(models) as node:
        # Without leases that may be called back: a replica that keeps its weights does not notice the death.
        user, newcomer = node.replicas(2, models.nbytes(), keeps=False)
        ray.get([user.switch.remote(FLUX), newcomer.switch.remote(FLUX)])
        for _ in range(num_kills):
            ray.get(newcomer.forget.remote())
            wait_for_quiet()
            pid = node.keeper_pid()
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            ray.get(newcomer.switch.remote(FLUX))
            samples.append((time.perf_counter() - start) * 1e3)
            stats = node.keeper_stats()  # of the new life
            read_bytes.append(stats.read_bytes)
            adopted_bytes.append(stats.adopted_bytes)
    return {"ms": summary(samples), "read_bytes": max(read_bytes), "adopted_bytes": min(adopted_bytes)}


def _store_bytes(models: Models) -> int:
    """Return the bytes of the object store of a node whose keeper has the budget that `_churn` wants."""
    return int(models.nbytes() * NODE_SHARE / STORE_SHARE)


def _shared(models: Models) -> dict[str, Any]:
    """Measure the memory of four replicas that have the Flux pipeline and read every byte of it.

    `ratio`: the object store's pages, counted once over all processes that map them (Ray's own among them), and by how
    much more private memory the replicas have with the pipeline than without; by one copy's bytes.
    """
    with node_of(models, models.nbytes(FLUX)) as node:
        replicas = node.replicas(NUM_REPLICAS, models.nbytes())
        pids = ray.get([replica.pid.remote() for replica in replicas])
        ray.get([replica.switch.remote(FLUX, True) for replica in replicas])
        # What came with the first use, libraries and structures, is no weights: it is there before and after.
        ray.get([replica.forget.remote() for replica in replicas])
        ray.get([replica.collect.remote() for replica in replicas])
        without_bytes = sum(map(own_memory_bytes, pids))
        ray.get([replica.switch.remote(FLUX, True) for replica in replicas])
        private, store = sum(map(own_memory_bytes, pids)) - without_bytes, object_store_bytes()
    one_copy = models.nbytes(FLUX)
    return {
        "ratio": (store + max(0, private)) / one_copy,
        "store_bytes": store,
        "private_bytes": private,
        "one_copy_bytes": one_copy,
        "replicas": NUM_REPLICAS,
    }


def _churn(models: Models, num_switches: int) -> dict[str, Any]:
    """Switch at random where neither the node nor the replica can hold all models; measure the growth of memory."""
    chosen = random.Random(0)
    names = list(models.manifests)
    one = max(models.manifests[name].nbytes for name in (FLUX, SDXL))
    with node_of(models, int(models.nbytes() * NODE_SHARE)) as node:
        (replica,) = node.replicas(1, one)
        ray.get(replica.switch_many.remote(chosen.choices(names, k=WARM_UP)))
        before = _settled(node, replica)
        seconds = ray.get(replica.switch_many.remote(chosen.choices(names, k=num_switches)))
        after = _settled(node, replica)
        stats = node.keeper_stats()
    return {
        "switches": num_switches,
        "switches_per_s": num_switches / seconds,
        "before": before,
        "after": after,
        "growth_bytes": {name: after[name] - before[name] for name in before},
        "read_bytes": stats.read_bytes,
        "num_evicted": stats.num_evicted,
        "budget_bytes": stats.budget_bytes,
    }


def _settled(node: BenchNode, replica: Any) -> dict[str, int]:
    """Return memory with the Flux pipeline attached and nothing else going on."""
    ray.get(replica.switch.remote(FLUX, True))
    ray.get(replica.collect.remote())
    return {
        "replica_private": own_memory_bytes(ray.get(replica.pid.remote())),
        "keeper_private": own_memory_bytes(node.keeper_pid()),
        "keeper_resident": node.keeper_stats().resident_bytes,
        "store": object_store_bytes(),
    }


def print_switch_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    console = Console()
    sizes = figures["bytes"]
    console.print(
        f"Flux pipeline {sizes['flux'] / 1e9:.2f} GB in {figures['num_tensors']} tensors, "
        f"SDXL {sizes['sdxl'] / 1e9:.2f} GB, all {sizes['all'] / 1e9:.2f} GB"
    )
    console.print(_attach_table(figures["attach_ms"]))
    for title, legs in (("synthetic", figures), ("demo", figures["demo"])):
        console.print(_legs_table(title, legs))
        console.print(_bytes_table(title, legs["sibling"]))
    for table in simulated_tables(figures["simulated"]):
        console.print(table)
    for line in _lines(figures):
        console.print(line)


def _attach_table(attaches: dict[str, Any]) -> Table:
    table = _table("Attach of resident Flux", "", "p50 ms", "p95 ms", "range", "n", "target")
    for name, found in attaches.items():
        table.add_row(name, *_times(found), str(TARGETS_MS.get(name, "")))
    return table


def _legs_table(title: str, legs: dict[str, Any]) -> Table:
    table = _table(f"flux -> sdxl -> flux, third leg ({title})", "", "p50 ms", "p95 ms", "range", "n", "x ours")
    for name, text in LEGS.items():
        table.add_row(text, *_times(legs[name]), f"{legs[name]['p50'] / legs['switch_ms']['p50']:.2f}")
    return table


def _bytes_table(title: str, sibling: dict[str, Any]) -> Table:
    table = _table(f"flux -> flux-tuned ({title})", "", "bytes moved", "different", "ratio or time")
    for tier in ("host", "cpu-private"):
        found = sibling[tier]
        table.add_row(tier, f"{found['bytes_moved']:,}", f"{sibling['bytes_different']:,}", f"{found['ratio']:.4f}")
    for tier, same in sibling["same_weights"].items():
        table.add_row(f"renamed: {tier}", f"{same['bytes_moved']:,}", "0", f"{same['ms']['p50']:.1f} ms")
    return table


def _lines(figures: dict[str, Any]) -> list[str]:
    pss, flood, churn, recovery = (figures[name] for name in ("pss", "flood", "churn", "recovery"))
    growth = ", ".join(f"{name} {nbytes / 1e6:+.1f} MB" for name, nbytes in churn["growth_bytes"].items())
    return [
        f"{pss['replicas']} replicas hold {pss['ratio']:.4f} copies (target 1.02), "
        f"{pss['private_bytes'] / 1e6:.1f} MB of that their own",
        f"{flood['callers']} callers of a cold model: {flood['read_ratio']:.2f} x its bytes read",
        f"{churn['switches']} random switches, {churn['switches_per_s']:.1f} per s: {growth}",
        f"keeper killed: attached elsewhere after {recovery['ms']['p50']:.0f} ms "
        f"({recovery['ms']['low']:.0f} to {recovery['ms']['high']:.0f}), {recovery['read_bytes']:,} bytes read",
    ]


def _table(title: str, *headers: str) -> Table:
    return Table(*headers, title=title, title_justify="left")


def _times(found: dict[str, Any]) -> tuple[str, str, str, str]:
    low, high = f"{found['low']:.2f}", f"{found['high']:.2f}"
    return f"{found['p50']:.2f}", f"{found['p95']:.2f}", f"{low} to {high}", str(found["n"])
