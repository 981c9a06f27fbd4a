"""The replicas where requests may start, by the controller's placement and the failed loads. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from cluster.admission.pool import Pool
from cluster.admission.records import Demand, Placement, Refusal, Waiting
from cluster.admission.replica_choice import Options, held_until_s
from cluster.admission.service_times import ServiceTimes

LEAST_SHARE: Final = 1e-6  # no request takes less of a replica


class Places:
    """The places for the requests of a queue's `pools`. Without a placement everything may start everywhere."""

    def __init__(self, pools: Mapping[str, Pool], times: ServiceTimes) -> None:
        self._pools = pools
        self._times = times
        self._placement = Placement()
        self._allowed: dict[tuple[str, str], list[str]] = {}  # by pool and replica: the models that it lets start there

    def set_placement(self, placement: Placement) -> None:
        """Let requests start only where `placement` does."""
        self._placement = placement
        self._allowed = {}
        for (pool_name, model), replicas in placement.replicas.items():
            for replica in replicas:
                self._allowed.setdefault((pool_name, replica), []).append(model)
        for name, pool in self._pools.items():
            pool.slots.replicas.set_resident(placement.ready)
            pool.lanes.set_stalled(placement.unplaced(name))
            pool.look_at_all()

    def drop_what_is_over(self, now_s: float) -> None:
        """Drop the placement once its time is over: everything may start everywhere."""
        if now_s >= self._placement.until_s:
            self.set_placement(Placement())

    def stalled(self, pool: str) -> Collection[str]:
        """Return the models that may start nowhere yet."""
        return self._placement.unplaced(pool)

    def models_on(self, pool: str, replica: str) -> Collection[str]:
        """Return the models that the placement names for a replica."""
        return self._allowed.get((pool, replica), ())

    def rivals(self, pool: str, replica: str) -> list[str]:
        """Return the models that a replica has and that may start there."""
        at_hand, placed = self._pools[pool].slots.replicas[replica].recent, self._placement.replicas
        return [model for model in at_hand if replica in placed.get((pool, model), (replica,))]

    def is_unplaced(self, demand: Demand) -> bool:
        """Return whether the placement has no replica for such a request: it waits for the controller."""
        return self._placement.replicas.get((demand.pool, demand.model)) == ()

    def why_never(self, demand: Demand, now_s: float) -> Refusal | None:
        """Return why a waiting request will never start; None if it may."""
        if demand.deadline_s <= now_s:
            return Refusal("expired")
        return self._placement.unservable.get((demand.pool, demand.model))

    def options(self, waiting: Waiting, full: Collection[str], now_s: float) -> Options:
        """Return the replicas where a request may start, without the `full` ones, and the figures of its model."""
        demand, placement = waiting.demand, self._placement
        key = demand.pool, demand.model
        among = self._able(demand, placement.replicas.get(key), now_s)
        times = self._times.times(demand.model)
        on_demand = placement.on_demand.get(key, {})
        return Options(
            among and [each for each in among if each not in full],
            self._times.switch_s(demand.model),
            times.joining_s(demand.work) if times else demand.share,
            on_demand,
            placement.chances,
            held_until_s(
                on_demand, waiting, times.expected_s(demand.work, times.usual_sharing) if times else 0.0, now_s
            ),
        )

    def _able(self, demand: Demand, among: Collection[str] | None, now_s: float) -> Collection[str] | None:
        """Return the replicas that have not just failed with the model; all of them if every one has."""
        pool = self._pools[demand.pool]
        if not (unable := pool.failures.unable(demand.model, demand.version, now_s)):
            return among
        able = [name for name in pool.slots.replicas.names() if name not in unable]
        return [name for name in able if among is None or name in among] if able else among

    def is_full(self, pool: str, model: str, full: Collection[str] = ()) -> bool:
        """Return whether the placement has no room for any request of the model, so that none need be tried."""
        among = self._placement.replicas.get((pool, model))
        if among is None or (pool, model) in self._placement.unservable:
            return False
        named = [each for each in among if each not in full] if full else among
        return not self._pools[pool].slots.replicas.has_room(LEAST_SHARE, named)
