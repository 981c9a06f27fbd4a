"""The controller: it decides every moment anew which model is on which worker, and splits the slots of workers and text
encoders between several ingresses. A named, detached actor.

Workers and queues report to it and wait for its decisions (`link.py`); it follows the registry's models, its config,
and the nodes' extents. It has no memory that matters: killed and restarted, it gets all reports again within a tick,
and decides as soon as every worker known to the queues has reported. With `controller.enabled: false` it only splits
slots.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any, Final

from cluster.admission.outcomes import EndedRequests
from cluster.admission.records import AdmissionSnapshot, Placement
from cluster.placement.autoscaling import Scaling
from cluster.placement.deciding import Decided, Deciding, LoggedDecision
from cluster.placement.observing import Observations
from cluster.placement.on_demand import why_on_demand
from cluster.placement.reports import SlotAnswer, SlotReport, SlotUpdate, Update, WorkerReport
from cluster.placement.seen_workers import WORKERS
from cluster.placement.serving.followed_registry import FollowedRegistry
from cluster.placement.serving.mailboxes import Mailboxes
from cluster.placement.serving.slot_desk import SlotDesk
from cluster.placement.state import SloClass, SwitchPlan, WorkerState
from cluster.placement.switching import LATENCY_FIRST, THROUGHPUT_FIRST
from cluster.process.logs import configure_logs
from cluster.process.ray_calls import NamedActor, connect_actor, node_addresses
from cluster.process.telemetry import ControllerMetrics
from cluster.ray_seam.serve_control import ServeReplicas
from cluster.records.actor_names import controller_name
from cluster.records.overrides import OverrideChange, Overrides
from cluster.registry.actor import connect_registry
from cluster.registry.snapshot import RegistrySnapshot
from configs.admission import AdmissionConfig, ControllerConfig
from configs.cluster import ClusterConfig

__all__ = ["PLAN_LIVES_S", "Controller", "connect_controller"]

PLAN_LIVES_S: Final = 3.0  # older decisions block no request
GAP_S: Final = 0.01  # between two decisions, however many reports come
REST_S: Final = PLAN_LIVES_S / 3  # between two decisions at rest: a plan has to be renewed this often
HELD_S: Final = 1.0  # between two questions to the registry about the nodes' extents and the config
MAX_CALLS: Final = 10_000
_POLICIES: Final = {"latency-first": LATENCY_FIRST, "throughput-first": THROUGHPUT_FIRST}

logger = logging.getLogger("atelier.controller")


class Controller:
    """The actor. It is async: a reporter that waits holds no thread."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        configure_logs(config.logging.format)
        self._config = config.controller
        self._registry = FollowedRegistry(RegistrySnapshot(NamedActor(partial(connect_registry, config))))
        self._observations = Observations(self._slo_of, time.monotonic())
        self._deciding = Deciding(LATENCY_FIRST, self._observations, _new_ids())
        self._mailboxes = Mailboxes()
        self._changed = asyncio.Event()
        self._heard = asyncio.Event()  # set by a change that the next decision takes in, though not at once
        self._decided: Decided | None = None
        self._decided_s = 0.0
        self._num_ticks = 0
        self._longest_tick_s = 0.0
        self._num_frozen = 0  # models and workers at the last `gc.freeze`
        self._metrics = ControllerMetrics()
        self._scaling: Scaling | None = None  # None until Serve has reported its target of workers
        self._slots = SlotDesk()
        self._use(config.controller)
        works = (self._decide_on(), self._scale(config.name)) if self._config.enabled else (self._forget_silent(),)
        self._tasks = [asyncio.ensure_future(work) for work in (*works, self._follow_registry())]

    async def report(self, name: str, report: WorkerReport | AdmissionSnapshot) -> None:
        """Take in the report of a worker or a queue. After a change the next decision follows at once."""
        now_s = time.monotonic()
        self._mailboxes.open(name)
        self._heard.set()
        if isinstance(report, WorkerReport):
            before = self._observations.workers.reports.get(name)
            self._observations.workers.note(name, report, now_s)
            if before is None or _has_changed(before, report):
                self._changed.set()
        else:
            self._observations.queues.note(name, report, now_s)
            if any(load.waiting for load in report.models):
                self._changed.set()

    async def receive(self, name: str, revision: str, wait_s: float) -> Update:
        """Return the decision for a reporter that is newer than `revision`, or the same again after `wait_s`.

        The call is a sign of life, which keeps the reporter's last report valid.
        """
        self._observations.note_sign(name, time.monotonic())
        mail = await self._mailboxes.receive(name, revision, wait_s)
        content = mail.content
        if isinstance(content, Placement):
            content = replace(content, until_s=max(0.0, self._decided_s + PLAN_LIVES_S - time.monotonic()))
        return Update(mail.revision, content, self._config.tick_s)

    async def report_slots(self, name: str, report: SlotReport) -> SlotAnswer:
        """See `SlotDesk`."""
        return await self._slots.report_slots(name, report)

    async def receive_slots(self, name: str, session: str, revision: int, settings: str, wait_s: float) -> SlotUpdate:
        """See `SlotDesk`."""
        return await self._slots.receive_slots(name, session, revision, settings, wait_s)

    async def retune_queues(self, config: AdmissionConfig) -> bool:
        """Set bounds and weights of the queues of several ingresses; return whether all queues use them."""
        return await self._slots.retune(config)

    async def queues(self) -> AdmissionSnapshot:
        """Return the state of all queues together, by their last reports."""
        return self._observations.queues.joined()

    async def ended_requests(self, number: int | None) -> EndedRequests:
        """Return the requests that have ended, of several ingresses, from a number on."""
        return self._slots.ended.after(number, time.monotonic())

    async def change(self, change: OverrideChange) -> Overrides:
        """Change the operators' manual orders durably, and return all of them. Raises OverrideRefused."""
        models = self._decided.observed.names if self._decided else self._observations.catalog
        overrides = await self._registry.change(change, self._observations.workers.reports.keys(), models)
        self._changed.set()
        return overrides

    async def describe(self, max_decisions: int) -> dict[str, Any]:
        """Return the last decisions with their reasons, and the state for the next one, JSON-able."""
        addresses = await asyncio.to_thread(node_addresses)
        decided, now_s = self._decided, time.monotonic()
        state, plan = (decided.observed.state, decided.plan) if decided else (None, SwitchPlan())
        reports = self._observations.workers.reports
        return {
            "policy": self._config.policy,
            "age_s": now_s - self._decided_s if decided else None,
            "num_ticks": self._num_ticks,
            "longest_tick_s": self._longest_tick_s,
            "overrides": (self._registry.overrides or Overrides()).model_dump(mode="json"),
            "decisions": [_logged(one) for one in islice(reversed(self._deciding.log), max_decisions)],
            "notes": [*plan.notes, *decided.observed.state.ignored] if decided else [],
            "backoffs": {model: asdict(backoff) for model, backoff in decided.observed.backoffs.items()}
            if decided
            else {},
            "workers": [
                _described(name, report, state.workers.get(name) if state else None)
                | {"address": addresses.get(report.node, "")}
                for name, report in sorted(reports.items())
            ],
            "scaling": self._scaling.describe() if self._scaling else None,
            "planned": {model: list(workers) for model, workers in plan.planned.items()},
            "free": {id_: why_on_demand(starts, plan.longest_on_demand_s) for id_, starts in plan.on_demand.items()},
        }

    # the loop

    async def _decide_on(self) -> None:
        while True:
            await self._next_moment()
            self._changed.clear()
            self._heard.clear()
            is_at_rest = False
            try:
                self._decide()
                is_at_rest = self._is_at_rest()
            except Exception:  # a failed plan must not end the planning; the last plan ends by itself
                logger.exception("no decision")
            if not is_at_rest:
                self._heard.set()
            await asyncio.sleep(GAP_S)

    async def _next_moment(self) -> None:
        """Wait for a change: at most `tick_s` once any report came, and `REST_S` without one."""
        changed = asyncio.ensure_future(self._changed.wait())
        heard = asyncio.ensure_future(self._heard.wait())
        try:
            await asyncio.wait([changed, heard], timeout=REST_S, return_when=asyncio.FIRST_COMPLETED)
            if not changed.done() and heard.done():
                await asyncio.wait([changed], timeout=self._config.tick_s)
        finally:
            changed.cancel()
            heard.cancel()

    def _is_at_rest(self) -> bool:
        """Return whether the next decision would equal the last one until a report differs."""
        decided = self._decided
        return (
            decided is not None
            and self._observations.is_at_rest
            and not decided.observed.unknown
            and not any(orders.orders or orders.migrate for orders in decided.orders.values())
            and not (self._scaling and (self._scaling.leaving or self._scaling.released))
        )

    def _decide(self) -> None:
        if (overrides := self._registry.overrides) is None:
            return
        began_s = time.monotonic()
        if (catalog := self._registry.new_catalog()) is not None:
            self._observations.catalog = catalog
        decided = self._deciding.decide(overrides, began_s, time.time(), self._scaling)
        state = decided.observed.state if decided else self._observations.demand()
        if self._scaling is not None and state is not None:
            up_s = {name: report.up_s for name, report in self._observations.workers.reports.items()}
            idle = self._scaling.draining
            self._scaling.follow(state, up_s, began_s)
            if idle - self._scaling.draining:  # these can work now
                self._changed.set()
        if decided is None:
            return
        self._decided, self._decided_s = decided, began_s
        self._num_ticks += 1
        if (num := len(decided.observed.state.models) + len(decided.observed.state.workers)) > 2 * self._num_frozen:
            self._num_frozen = num
            gc.collect()
            gc.freeze()  # records stay: to look through those of 10,000 workers takes as long as a decision
        queues = self._observations.queues.names
        self._mailboxes.keep(self._observations.workers.reports.keys() | queues)
        for name, orders in decided.orders.items():
            self._mailboxes.post(name, orders)
        for name in queues:
            self._mailboxes.post(name, decided.placement)
        took_s = time.monotonic() - began_s
        self._longest_tick_s = max(self._longest_tick_s, took_s)
        num_held = sum([model.waiting for model in decided.observed.state.models.values()])
        self._metrics.note_tick(took_s, [one.decision.action for one in decided.new], num_held)
        num_wanted = self._scaling.target if self._scaling else None
        self._metrics.note_workers(len(decided.observed.state.workers), num_wanted)

    async def _forget_silent(self) -> None:
        """Without decisions: forget the queues of ingresses that are gone."""
        while True:
            await asyncio.sleep(self._config.tick_s)
            try:
                self._observations.forget_silent(time.monotonic())
                self._mailboxes.keep(self._observations.workers.reports.keys() | self._observations.queues.names)
            except Exception:  # as in `_decide_on`: nobody else would see it, and the next round may do better
                logger.exception("ingresses that are gone are not forgotten")

    async def _follow_registry(self) -> None:
        """Follow the registry: its config, models, overrides, the nodes' memory. Its last answer holds while it is
        away.
        """
        while True:
            try:
                self._use(await self._registry.controller_config())
                await self._registry.learn_overrides()
                self._observations.held = await self._registry.held(self._observations.wanted_extents())
            except Exception as error:  # of Ray or the registry; the next round may do better
                logger.warning("the registry does not answer: %s", str(error).partition("\n")[0])
            await asyncio.sleep(HELD_S)

    def _use(self, config: ControllerConfig) -> None:
        """Use other settings from the next decision on. `enabled` counts at the start only."""
        if config != self._config:
            self._changed.set()
        self._config, self._deciding.policy = config, _POLICIES[config.policy]
        if self._scaling is not None and config.scaling is not None:
            self._scaling.policy = config.scaling
        elif config.scaling is None:
            self._scaling = None

    async def _scale(self, app: str) -> None:
        """Have Serve run the decided number of workers. An earlier life of this actor may have set the last target."""
        replicas, asked = ServeReplicas(app, WORKERS), -1
        while True:
            try:
                if self._scaling is None and self._config.scaling is not None:
                    asked = await replicas.target()
                    if (found := self._config.scaling) is not None:
                        self._scaling = Scaling(found, asked)
                        self._changed.set()
                elif self._scaling is not None and (target := self._scaling.target) != asked:
                    await replicas.set_target(target)
                    logger.info("%d workers instead of %d: %s", target, asked, self._scaling.reason)
                    asked = target
            except Exception as error:  # of Ray or Serve; without it there is no scaling
                logger.warning("Serve does not scale: %s", str(error).partition("\n")[0])
                await asyncio.sleep(HELD_S)
            await asyncio.sleep(self._config.tick_s)

    def _slo_of(self, model: str) -> SloClass:
        name, found = self._config.slo_of(model)
        return SloClass(name, found.target_s, found.weight)


def _new_ids() -> Iterator[str]:
    while True:
        yield uuid.uuid4().hex[:16]


def _has_changed(before: WorkerReport, after: WorkerReport) -> bool:
    """Return whether the worker has loaded, lost or failed to load a component since its last report."""
    return (
        before.ready.keys() != after.ready.keys()
        or before.switching_to != after.switching_to
        or before.outcomes != after.outcomes
        or before.needs.keys() != after.needs.keys()
    )


def _described(name: str, report: WorkerReport, state: WorkerState | None) -> dict[str, Any]:
    return {
        "name": name,
        "node": report.node,
        "models": list(state.models) if state else [],
        "running": dict(state.running) if state else {},
        "switching_to": report.switching_to,
        "resident_bytes": sum(report.ready.values()) + sum(report.coming.values()),
        "budget_bytes": report.budget_bytes,
        "attach_bytes_per_s": report.attach_bytes_per_s,
        "load_bytes_per_s": report.load_bytes_per_s,
        "fixed_switch_s": report.fixed_switch_s,
    }


def _logged(one: LoggedDecision) -> dict[str, Any]:
    decision = one.decision
    state = "draining" if not one.order else "taken" if one.is_taken else "given"
    if one.outcome is not None:
        state = f"failed: {one.outcome.error}" if one.outcome.error else "done"
    return {
        "at_s": one.at_s,
        "action": decision.action,
        "worker": decision.worker,
        "model": decision.model,
        "evict": list(decision.evict),
        "reason": decision.reason,
        "expected_s": decision.switch_s,
        "took_s": one.outcome.took_s if one.outcome else None,
        "state": state,
    }


def connect_controller(config: ClusterConfig) -> Any:
    """Return the handle of the cluster's controller; the first caller starts it. Blocks."""
    return connect_actor(Controller, controller_name(config), MAX_CALLS, config.ray.control_plane, config)
