"""What replicas cost in memory beside the one copy, and whether switching loses any.

Needs an object store whose pages come with their use: what is counted is what is there.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import ray

from deployments.bench.figures import private_bytes, pss_bytes
from deployments.bench.switch_node import Models, Node, node_of
from deployments.bench.synthetic import FLUX, SDXL

NUM_REPLICAS = 4
NODE_SHARE = 0.6  # of all models' bytes: what the keeper may hold while there is random switching
WARM_UP = 40  # switches: every model several times
PLASMA = "plasma"
STORE_SHARE = 0.7  # of the object store is a keeper's budget where nothing else is configured


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
