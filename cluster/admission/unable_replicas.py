"""Replicas that could not load a model: its requests go to others, and those of other models still come here. Pure.

A replica is tried again after a time that doubles with each failure in a row, at once for another version of the model,
and when every replica has failed: then each may, and says why not. Who replaces it has another name, and begins anew.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from cluster.admission.demand import Demand

FIRST_S: Final = 1.0  # without the model, after one failure
LONGEST_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Failed:
    num: int
    until_s: float


class UnableReplicas:
    """What is known of failures to load, by pool, model and version. Times are parameters, of one clock."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str, str], dict[str, _Failed]] = {}

    def note_failure(self, demand: Demand, replica: str, now_s: float) -> None:
        """Let the replica be without the request's model for a while."""
        failed = self._failed.setdefault(_key(demand), {})
        num = failed[replica].num + 1 if replica in failed else 1
        failed[replica] = _Failed(num, now_s + min(FIRST_S * 2.0 ** (min(num, 32) - 1), LONGEST_S))

    def note_answer(self, demand: Demand, replica: str) -> None:
        """Forget the failures of a replica that has answered with the model."""
        failed = self._failed.get(_key(demand))
        if failed and failed.pop(replica, None) and not failed:
            del self._failed[_key(demand)]

    def keep_replicas(self, pool: str, names: Collection[str]) -> None:
        """Forget the failures of replicas that are not there any more."""
        for key, failed in list(self._failed.items()):
            if key[0] == pool:
                kept = {replica: one for replica, one in failed.items() if replica in names}
                self._failed[key] = kept
                if not kept:
                    del self._failed[key]

    def unable(self, demand: Demand, now_s: float) -> frozenset[str]:
        """Return the replicas that do not get such a request now."""
        failed = self._failed.get(_key(demand)) if self._failed else None
        return frozenset([replica for replica, one in failed.items() if now_s < one.until_s] if failed else ())


def _key(demand: Demand) -> tuple[str, str, str]:
    return demand.pool, demand.model, demand.version
