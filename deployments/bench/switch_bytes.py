"""What a switch moves against what differs, and what is read again: by many callers at once, or after a death."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import ray

from deployments.bench.figures import summary
from deployments.bench.machine import wait_for_quiet
from deployments.bench.switch_node import Models, Node, node_of
from deployments.bench.synthetic import ALIAS, FLUX, TUNED

NUM_CALLERS = 64
PRIVATE = "cpu-private"


def sibling(models: Models, rounds: int) -> dict[str, Any]:
    """flux -> flux-tuned, and the same weights under another name, at each tier."""
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
    """`bytes_moved` from storage into the node's memory; `mapped_bytes` into the replica. In whole extents."""
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
    """Under another name, while the first one is built: what moves, and how long it takes."""
    reports = []
    for _ in range(rounds):
        ray.get(replica.forget.remote())
        ray.get(replica.switch.remote(FLUX))
        reports.append(ray.get(replica.switch.remote(ALIAS)))
    moved = sum(report[f"{tier}_bytes"] for report in reports for tier in ("storage", "host", "device"))
    return {"bytes_moved": moved, "ms": summary([report["ms"] for report in reports])}


def flood(models: Models) -> dict[str, Any]:
    """Many callers at once ask one keeper for a model that it does not have."""
    extents = models.extents(FLUX)
    with node_of(models) as node:
        node.stats()  # it is up
        start = time.perf_counter()
        ray.get([node.keeper.acquire.remote(extents, f"caller-{number}") for number in range(NUM_CALLERS)])
        seconds = time.perf_counter() - start
        read_bytes = node.stats().read_bytes
    return {"callers": NUM_CALLERS, "read_ratio": read_bytes / models.nbytes(FLUX), "seconds": seconds}


def recovery(models: Models, num_kills: int) -> dict[str, Any]:
    """SIGKILL for an idle keeper whose weights one replica uses: until another replica has them attached."""
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
