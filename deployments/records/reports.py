"""Reports that results of all kinds carry: times, switches, use of the cache, warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TimingsMs = dict[str, float]  # milliseconds by phase: queue, encode, switch, denoise, prefill, generate, decode, total


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """The work of making a model ready: components that were built, and components that were there already.

    `attached_bytes` are those of the components that were built. `storage_bytes` were read from storage or a peer for
    them, `host_bytes` were newly mapped from the node's memory (whole extents), `device_bytes` were copied to the
    device, and `reused_bytes` were there.
    """

    model: str
    switch_ms: float
    attach_ms: float
    build_ms: float
    attached_bytes: int
    built: tuple[str, ...]
    reused: tuple[str, ...]
    storage_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    reused_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Counts of one request's text encodings: found in the cache, and computed."""

    hits: int
    misses: int


def warnings_by_item(warnings: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the warnings of a request's items, each with the number of its item unless there is only one."""
    if len(warnings) == 1:
        return tuple(warnings[0])
    return tuple(f"item {number}: {text}" for number, texts in enumerate(warnings) for text in texts)
