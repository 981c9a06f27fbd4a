"""Bytes of a switch: moved against different, read again after a death, and the memory of replicas and node.

Memory needs an object store whose pages come with their use: what is counted is what is there.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import ray

from deployments.bench.figures import private_bytes, pss_bytes, summary
from deployments.bench.machine import wait_for_quiet
from deployments.bench.switch_node import Models, Node, node_of
from deployments.bench.synthetic import ALIAS, FLUX, SDXL, TUNED

NUM_CALLERS = 64
PRIVATE = "cpu-private"
NUM_REPLICAS = 4
NODE_SHARE = 0.6  # of all models' bytes: what the keeper may hold while there is random switching
WARM_UP = 40  # switches: every model several times
PLASMA = "plasma"
STORE_SHARE = 0.7  # of the object store is a keeper's budget where nothing else is configured


def sibling(models: Models, rounds: int) -> dict[str, Any]:
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


def _host_sibling(node: Node, replica: Any) -> dict[str, Any]:
    """Return `bytes_moved` from storage to the node, `mapped_bytes` into the replica, in whole extents."""
    different = node.models.different_bytes(TUNED, FLUX)
    ray.get(replica.switch.remote(FLUX))
    before = node.stats().read_bytes
    report = ray.get(replica.switch.remote(TUNED))
    moved = node.stats().read_bytes - before
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


def flood(models: Models) -> dict[str, Any]:
    """Let many callers at once ask one keeper for a model that it does not have."""
    extents = models.extents(FLUX)
    with node_of(models) as node:
        node.stats()  # it is up
        start = time.perf_counter()
        ray.get([node.keeper.acquire.remote(extents, f"caller-{number}") for number in range(NUM_CALLERS)])
        seconds = time.perf_counter() - start
        read_bytes = node.stats().read_bytes
    return {"callers": NUM_CALLERS, "read_ratio": read_bytes / models.nbytes(FLUX), "seconds": seconds}


def recovery(models: Models, num_kills: int) -> dict[str, Any]:
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
            stats = node.stats()  # of the new life
            read_bytes.append(stats.read_bytes)
            adopted_bytes.append(stats.adopted_bytes)
    return {"ms": summary(samples), "read_bytes": max(read_bytes), "adopted_bytes": min(adopted_bytes)}


def store_bytes(models: Models) -> int:
    """The object store of a node whose keeper has the budget that `churn` wants."""
    return int(models.nbytes() * NODE_SHARE / STORE_SHARE)


def shared(models: Models) -> dict[str, Any]:
    """Four replicas have the Flux pipeline, and read every byte of it.

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
        without_bytes = sum(map(_private, pids))
        ray.get([replica.switch.remote(FLUX, True) for replica in replicas])
        private, store = sum(map(_private, pids)) - without_bytes, _store_bytes()
    one_copy = models.nbytes(FLUX)
    return {
        "ratio": (store + max(0, private)) / one_copy,
        "store_bytes": store,
        "private_bytes": private,
        "one_copy_bytes": one_copy,
        "replicas": NUM_REPLICAS,
    }


def churn(models: Models, num_switches: int, seed: int = 0) -> dict[str, Any]:
    """Random switches where neither the node nor the replica can hold all models."""
    chosen = random.Random(seed)
    names = list(models.manifests)
    one = max(models.manifests[name].nbytes for name in (FLUX, SDXL))
    with node_of(models, int(models.nbytes() * NODE_SHARE)) as node:
        (replica,) = node.replicas(1, one)
        ray.get(replica.switch_many.remote(chosen.choices(names, k=WARM_UP)))
        before = _settled(node, replica)
        seconds = ray.get(replica.switch_many.remote(chosen.choices(names, k=num_switches)))
        after = _settled(node, replica)
        stats = node.stats()
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


def _settled(node: Node, replica: Any) -> dict[str, int]:
    """Memory with the Flux pipeline attached and nothing else going on."""
    ray.get(replica.switch.remote(FLUX, True))
    ray.get(replica.collect.remote())
    return {
        "replica_private": _private(ray.get(replica.pid.remote())),
        "keeper_private": _private(node.keeper_pid()),
        "keeper_resident": node.stats().resident_bytes,
        "store": _store_bytes(),
    }


def _private(pid: int) -> int:
    return private_bytes(Path(f"/proc/{pid}/smaps_rollup").read_text())


def _store_bytes() -> int:
    """Pages of the object store, over all processes of this Ray: they are this process's children."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            total += pss_bytes(Path(f"/proc/{process.pid}/smaps").read_text(), PLASMA)
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return total
