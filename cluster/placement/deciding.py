"""The decisions, one after the other: a state becomes a plan, and the plan becomes orders and a placement. Pure.

The plan has no memory. This module keeps orders until their workers have them, the model that a worker
drains for, and the last decisions with their reasons. All of it may be lost: it is found anew from the reports.

An order that was not confirmed counts as under way for a moment, so that a plan is not ordered twice. Requests start
where the reports say that the model is ready, or will be in a moment: orders follow plans, slots follow facts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cluster.admission.records import OnDemandSwitch, Placement, Refusal
from cluster.placement.autoscaling import Scaling
from cluster.placement.observing import Observations, Observed
from cluster.placement.on_demand import chances_of, waits_there
from cluster.placement.reports import Order, OrderOutcome, Orders
from cluster.placement.state import Decision, SwitchPlan, WorkerState
from cluster.placement.switching import SwitchingPolicy, plan_switches
from cluster.records.overrides import Overrides
from weights.residency.recent import Recent

UNCONFIRMED_S: Final = 1.0  # an unconfirmed order is given anew after this time
PREFETCH_S: Final = 5.0  # a prefetch is not repeated for so long
PATIENCE_S: Final = 2.0  # requests for a model whose needs no worker reports start anywhere after it
MAX_ASKED: Final = 16  # models that one worker is asked about at a time
MAX_DECISIONS: Final = 500
_ASKED_S: Final = 1.0  # then another worker is asked
_NO_ORDERS: Final = Orders()


@dataclass(slots=True)
class LoggedDecision:
    """A decision, the time of the log and that of its order, and its outcome. A drain is no order to a worker."""

    at_s: float
    decision: Decision
    given_s: float
    order: Order | None = None
    is_taken: bool = False
    outcome: OrderOutcome | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """One moment's outcome: where requests start, the orders by worker, and the plan with its notes.

    `new` are the decisions that the moment before did not have.
    """

    placement: Placement
    orders: Mapping[str, Orders]
    plan: SwitchPlan
    observed: Observed
    new: tuple[LoggedDecision, ...] = ()


class Deciding:
    """The sequence of decisions. `order_ids` are the ids of its orders, unique across restarts."""

    def __init__(self, policy: SwitchingPolicy, observations: Observations, order_ids: Iterator[str]) -> None:
        self.log: deque[LoggedDecision] = deque(maxlen=MAX_DECISIONS)
        self.policy = policy
        self._observations = observations
        self._order_ids = order_ids
        self._given: dict[str, list[LoggedDecision]] = {}  # by worker: orders that it has or is about to get
        self._reserved: dict[str, str] = {}  # the model that a worker drains for
        self._waits_since: dict[str, float] = {}
        self._by_order: Recent[str, LoggedDecision] = Recent(MAX_DECISIONS)

    def decide(
        self, overrides: Overrides, now_s: float, wall_s: float, scaling: Scaling | None = None
    ) -> Decided | None:
        """Return the decisions that hold from now on; None while reports are missing. `wall_s` is for the log.

        Workers that leave or are spare by `scaling` get no work, and those that come get ready for what they are for.
        """
        self._observations.forget_silent(now_s)
        if scaling is not None:
            reports = self._observations.workers.reports
            scaling.assign(sorted(reports, key=lambda name: (not reports[name].leased, -reports[name].up_s, name)))
            overrides = overrides.model_copy(update={"draining": overrides.draining | scaling.draining})
        self._settle(now_s)
        observed = self._observations.observe(now_s, overrides, self._unconfirmed(), self._reserved)
        if observed is None:
            return None
        plan = plan_switches(observed.state, self.policy)
        if scaling is not None:
            preloads = scaling.preload_orders(observed.state, [one.worker for one in plan.decisions])
            plan = replace(plan, decisions=(*plan.decisions, *preloads))
        new = tuple(self._give(plan.decisions, now_s, wall_s))
        placement = self._placement(observed, plan, now_s)
        return Decided(placement, self._orders(observed, placement, now_s), plan, observed, new)

    def _unconfirmed(self) -> dict[str, tuple[str, float]]:
        return {
            worker: (given.decision.model, given.decision.switch_s)
            for worker, all_given in self._given.items()
            for given in all_given
            if given.decision.action == "switch" and not given.is_taken
        }

    def _settle(self, now_s: float) -> None:
        """Take in the workers' reports on their orders, and forget the finished ones."""
        reports = self._observations.workers.reports
        for worker, all_given in list(self._given.items()):
            report = reports.get(worker)
            for given in all_given:
                given.is_taken |= report is not None and given.order is not None and given.order.id in report.taken
            left = [given for given in all_given if report is not None and now_s - given.given_s < _lifetime_s(given)]
            if left:
                self._given[worker] = left
            else:
                del self._given[worker]
        for report in reports.values():
            for outcome in report.outcomes:
                if outcome.order in self._by_order:
                    self._by_order[outcome.order].outcome = outcome

    def _give(self, decisions: Sequence[Decision], now_s: float, wall_s: float) -> list[LoggedDecision]:
        """Log the decisions, and give the orders that were not given yet. Return the new decisions."""
        new = []
        drained, self._reserved = self._reserved, {one.worker: one.model for one in decisions if one.action == "drain"}
        for decision in decisions:
            logged = LoggedDecision(wall_s, decision, now_s)
            if decision.action == "drain":
                if drained.get(decision.worker) == decision.model:
                    continue
            else:
                given = self._given.setdefault(decision.worker, [])
                if any((one.decision.action, one.decision.model) == (decision.action, decision.model) for one in given):
                    continue
                id_ = next(self._order_ids)
                logged.order = Order(id_, decision.action, decision.model, decision.evict, decision.switch_s)
                given.append(logged)
                self._by_order.note(id_, logged)
            self.log.append(logged)
            new.append(logged)
        return new

    def _orders(self, observed: Observed, placement: Placement, now_s: float) -> dict[str, Orders]:
        """Return the orders of every worker. If one does not report the needs of models, another one is asked."""
        workers = sorted(name for name, worker in observed.state.workers.items() if not worker.is_stale)
        asked = workers[int(now_s / _ASKED_S) % len(workers)] if workers else None
        return {
            name: Orders(
                tuple(given.order for given in self._given.get(name, ()) if given.order),
                tuple(one for one in observed.unknown if one[0] not in worker.unable)[:MAX_ASKED]
                if name == asked
                else (),
                _movable(observed, placement, worker) if worker.is_draining else (),
            )
            if name == asked or worker.is_draining or name in self._given
            else _NO_ORDERS
            for name, worker in observed.state.workers.items()
        }

    def _placement(self, observed: Observed, plan: SwitchPlan, now_s: float) -> Placement:
        """Return the placement of requests: on planned workers that have the model ready, or will have it in a moment.

        Every model is named, so that a new one waits for a decision. Models that fit into no worker, and models whose
        needs no worker reports, are left out: a worker will show whether they run.
        """
        state, pool = observed.state, observed.pool
        self._waits_since = {model: self._waits_since.get(model, now_s) for model in observed.waits}
        models, workers, planned = state.models, state.workers, plan.planned
        replicas: dict[tuple[str, str], tuple[str, ...]] = {}
        unservable: dict[tuple[str, str], Refusal] = {}
        on_demand: dict[tuple[str, str], Mapping[str, OnDemandSwitch]] = {}
        most_bytes = max((worker.budget_bytes for worker in state.workers.values()), default=0)
        for model in observed.names if workers else ():
            known = models.get(model)
            if known is None:
                is_awaited = now_s - self._waits_since.get(model, now_s) < PATIENCE_S
            else:
                is_awaited = known.components.total_bytes <= most_bytes
            if not is_awaited:
                continue
            if model in plan.on_demand:
                replicas[pool, model] = tuple(plan.on_demand[model])
                on_demand[pool, model] = plan.on_demand[model]
                continue
            there = planned.get(model, ())
            for name in there:
                if model not in workers[name].models:
                    confirmed = [name for name in there if self._is_confirmed(model, observed, name)]
                    replicas[pool, model] = tuple(waits_there(state, model, confirmed)) if confirmed else ()
                    break
            else:  # all of them have it, so they may start now
                replicas[pool, model] = there
            if there:
                continue
            if model in observed.backoffs:
                backoff = observed.backoffs[model]
                text = f"{backoff.error} (tried again in {backoff.retry_in_s:.1f} s)"
                unservable[pool, model] = Refusal("unservable", backoff.retry_in_s, text=text)
            elif state.is_frozen:
                text = "no worker has it ready, and nothing is switched while the cluster is frozen (`atelier thaw`)"
                unservable[pool, model] = Refusal("unservable", text=text)
        return Placement(
            replicas,
            unservable=unservable,
            on_demand=on_demand,
            chances=chances_of(state) if on_demand else {},
            ready={name: worker.models for name, worker in state.workers.items()},
        )

    def _is_confirmed(self, model: str, observed: Observed, name: str) -> bool:
        """Return whether a worker has the model or reports that it gets ready for it; an order alone may be lost."""
        worker, report = observed.state.workers[name], self._observations.workers.reports.get(name)
        is_coming = report is not None and report.switching_to == model
        return is_coming or model in worker.models or model in worker.running


def _movable(observed: Observed, placement: Placement, worker: WorkerState) -> tuple[str, ...]:
    """Return the models that run on a worker and that requests may start elsewhere."""
    return tuple(
        model
        for model in sorted(worker.running)
        if any(other != worker.id for other in placement.replicas.get((observed.pool, model), ()))
    )


def _lifetime_s(given: LoggedDecision) -> float:
    """Return the seconds for which an order counts: until confirmed, and longer for a prefetch, which plans repeat."""
    if given.decision.action == "prefetch":
        return PREFETCH_S
    return 0.0 if given.is_taken else UNCONFIRMED_S
