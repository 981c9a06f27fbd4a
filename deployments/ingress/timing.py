"""Stage times in the answer: the standard `Server-Timing` header (W3C Server Timing, section 3)."""

from __future__ import annotations

from collections.abc import Mapping


def server_timing(timings_ms: Mapping[str, float]) -> dict[str, str]:
    """`{"Server-Timing": "queue;dur=0.4, denoise;dur=212.0"}`; browsers show it beside the request."""
    return {"Server-Timing": ", ".join(f"{stage};dur={ms:.2f}" for stage, ms in timings_ms.items())}


def rounded(timings_ms: Mapping[str, float]) -> dict[str, float]:
    return {stage: round(ms, 2) for stage, ms in timings_ms.items()}
