"""Limits of one key on one replica: a token bucket for its rate, and a count of what it has in progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from deployments.errors import RateLimited

_ROUNDING: Final = 1e-9  # of tokens: who waited as long as told is not refused for a last bit
_BURST_S: Final = 1.0  # a key that was idle may ask at once for what its rate gives in this time


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of a key on one replica. None is for no limit."""

    requests_per_s: float | None
    max_concurrent: int | None

    @classmethod
    def share_of(cls, requests_per_s: float | None, max_concurrent: int | None, num_replicas: int) -> Self:
        """Return one replica's share of a cluster's limits: an equal part, and at least one request at a time.

        The proxy deals requests out evenly, so no replica asks another. All of a gRPC connection's calls meet one
        replica and its share.
        """
        rate = requests_per_s and requests_per_s / num_replicas
        return cls(rate, max_concurrent and -(-max_concurrent // num_replicas))


class KeyUse:
    """The use that a key has made of its limits, which are given with each request: they may change."""

    def __init__(self) -> None:
        self.num_in_progress = 0
        self._tokens = float("inf")  # the bucket is full at first, however large it is
        self._seen_s = 0.0

    def begin_request(self, limits: KeyLimits, now_s: float) -> None:
        """Count one request, until `end_request`. `now_s` never goes back. Raises: RateLimited; then nothing counts."""
        if limits.max_concurrent is not None and self.num_in_progress >= limits.max_concurrent:
            raise RateLimited(f"this key has as many requests in progress as it may ({limits.max_concurrent})")
        if limits.requests_per_s is not None:
            self._take_token(limits.requests_per_s, now_s)
        self.num_in_progress += 1

    def end_request(self) -> None:
        """Take one request off the count."""
        self.num_in_progress -= 1

    def _take_token(self, rate_per_s: float, now_s: float) -> None:
        """Let the bucket fill up, and take one token out of it."""
        full = max(1.0, rate_per_s * _BURST_S)
        tokens = min(full, self._tokens + (now_s - self._seen_s) * rate_per_s)
        self._seen_s = now_s
        self._tokens = tokens
        if tokens < 1.0 - _ROUNDING:
            wait_s = (1.0 - tokens) / rate_per_s
            raise RateLimited(
                f"this key has used up its rate ({rate_per_s:g} requests a second); try again in {wait_s:.3g} s",
                retry_after_s=wait_s,
            )
        self._tokens = tokens - 1.0
