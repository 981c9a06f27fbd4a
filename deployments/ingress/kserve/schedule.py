"""Request parameters that steer how a request waits: Triton's schedule policy, and its sequences, which are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from configs.batching import MAX_PRIORITY_LEVELS
from deployments.errors import InvalidRequest
from deployments.ingress.kserve.records import Parameters
from deployments.ingress.kserve.tensors import shown

MAX_TIMEOUT_US: Final = 2**63 - 1
_SEQUENCE: Final = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(frozen=True, slots=True)
class Schedule:
    """`priority` 1 is the most urgent, 0 the model's default. `timeout_s` bounds the whole request."""

    priority: int = 0
    timeout_s: float | None = None


def schedule_of(parameters: Parameters) -> Schedule:
    """Raises InvalidRequest. Parameters that are nobody's are opaque, says the protocol, and ignored."""
    for name in _SEQUENCE:
        if parameters.get(name, 0) not in (0, "", "0"):
            raise InvalidRequest(f"{name}: no model here keeps a state between requests; leave it out", name)
    timeout_us = _whole("timeout", parameters, MAX_TIMEOUT_US, " microseconds")
    priority = _whole("priority", parameters, MAX_PRIORITY_LEVELS)
    return Schedule(priority, timeout_us / 1e6 if timeout_us else None)


def _whole(name: str, parameters: Parameters, most: int, unit: str = "") -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidRequest(f"{name}: expected a whole number from 0 to {most}{unit}, got {shown(value)}", name)
    return value
