"""What the replicas tell of themselves, turned round: by model instead of by replica. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def built_models(replicas: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """By model, what each replica (by name, with its description) has built of it: bytes, leases, whether pinned.

    A module that models share counts for each of them. Replicas that did not answer have no modules.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for name, replica in replicas:
        mine: dict[str, dict[str, Any]] = {}
        for module in replica.get("modules", []):
            for model in module["models"]:
                part = mine.setdefault(model, {"replica": name, "bytes": 0, "leases": 0, "pinned": False})
                part["bytes"] += module["bytes"]
                part["leases"] += module["leases"]
                part["pinned"] |= module["pinned"]
        for model, part in mine.items():
            found.setdefault(model, []).append(part)
    return found


def last_switches(replicas: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By model, the report of the first replica that has switched to it."""
    found: dict[str, dict[str, Any]] = {}
    for name, replica in replicas:
        for model, report in replica.get("last_switches", {}).items():
            found.setdefault(model, {"replica": name, **report})
    return found
