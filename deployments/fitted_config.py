"""A cluster config made for some models and this machine, for who names nothing but models: `atelier run`. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

_SPARE_BYTES: Final = 2**28  # of the object store: extents on their way, answers of replicas
_LEAST_STORE_BYTES: Final = 2**29
_LEAST_PRIVATE_BYTES: Final = 2**29
_CARD_SHARE: Final = 0.85  # the rest is for activations that no budget counts, and for the card's libraries
_SUFFIXES: Final = (".safetensors", ".gguf", ".onnx", ".pt2")


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of a machine: CPUs, and bytes of memory, of shared memory and of each CUDA card."""

    num_cpus: int
    memory_bytes: int
    shared_bytes: int
    card_bytes: Sequence[int] = ()


def model_id(source: str, taken: Collection[str] = ()) -> str:
    """Return an id for a source: the name of its file, folder or repository in lower case, with a number if taken."""
    name = PurePosixPath(source.partition("://")[2] or source).name.partition("@")[0].lower()
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    plain = re.sub(r"[^a-z0-9._-]+", "-", name).strip("-._")[:120] or "model"
    numbers = (plain if number == 1 else f"{plain}-{number}" for number in range(1, len(taken) + 2))
    return next(one for one in numbers if one not in taken)


def fitted_config(
    entries: Mapping[str, Sequence[Mapping[str, Any]]], nbytes: Mapping[str, int], machine: Machine
) -> dict[str, Any]:
    """Return the config of a cluster for `models` and `adapters`, with budgets by their bytes and the machine's.

    `nbytes` are the bytes of weights by id. All weights are in memory where half of it is enough for them; otherwise
    models take turns there. Every CUDA card has a worker; without a card the CPUs are one worker's.
    """
    weights_bytes = sum(nbytes.values())
    room_bytes = min(machine.memory_bytes // 2, machine.shared_bytes * 9 // 10)
    store_bytes = min(max(weights_bytes + weights_bytes // 8 + _SPARE_BYTES, _LEAST_STORE_BYTES), room_bytes)
    private_bytes = max(min(machine.memory_bytes // 4, machine.memory_bytes - store_bytes), _LEAST_PRIVATE_BYTES)
    worker: dict[str, Any] = {"num_cpus": max(1, machine.num_cpus - 1)}
    if len(entries["models"]) == 1:  # several would take turns in the room that each takes for itself
        worker["kv_cache_bytes"] = "auto"
    if machine.card_bytes:
        worker |= {
            "num_replicas": len(machine.card_bytes),
            "num_cpus": 1,
            "num_gpus": 1,
            "device": "cuda",
            "device_budget_bytes": _size(int(min(machine.card_bytes) * _CARD_SHARE)),
        }
    num_cpus = worker.get("num_replicas", 1) * worker["num_cpus"] + 1
    return {
        "ray": {"num_cpus": max(machine.num_cpus, num_cpus), "object_store_bytes": _size(store_bytes)},
        "text_encoder": {"num_cpus": 0.5, "resident_bytes": _size(max(private_bytes // 4, _LEAST_PRIVATE_BYTES))},
        "ingress": {"num_cpus": 0.5},
        "worker": worker | {"resident_bytes": _size(private_bytes)},
        **{kind: [dict(entry) for entry in found] for kind, found in entries.items() if found},
    }


def _size(nbytes: int) -> str:
    """Return a size as a person writes it, in whole MiB."""
    return f"{nbytes // 2**20} MiB"


def summary(models: Sequence[str], config: Mapping[str, Any]) -> str:
    """Return the choices, in a line."""
    worker, budgets = config["worker"], config["ray"]
    cards = (
        f"{worker.get('num_replicas', 1)} x {worker['device_budget_bytes']} of cuda"
        if "device" in worker
        else "the CPU"
    )
    return f"{', '.join(models)}: {budgets['object_store_bytes']} for weights in memory, computed on {cards}"
