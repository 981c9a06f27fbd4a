"""The models of one worker under the controller: it reports the present models, and carries out orders.

An order is carried out once, however often it comes. A model that cannot be loaded is reported with the reason,
until it is ready or was not tried for long; the controller decides when it is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from ray.exceptions import RayError, RayTaskError

from cluster.placement.reports import LoadFailure, ModelNeed, Order, OrderOutcome, Orders, WorkerReport
from cluster.records.load_failures import LONGEST_RETRY_S, LoadFailures
from deployments.modules.cache import ModuleCache
from deployments.modules.parts import RequestParts, Wants
from deployments.records.tasks import shared_task
from weights.platform.panics import panics_as_errors
from weights.records.manifest import Manifest

__all__ = ["OrderedModels"]

MAX_REMEMBERED: Final = 64  # orders
# Failures no further apart belong to one load, reported by its modules and by its order: the next try comes later.
ONE_LOAD_S: Final = 0.5
_HERE: Final = ""  # this replica

logger = logging.getLogger("atelier.replica")


@dataclass(slots=True)
class _Switch:
    model: str
    ready_s: float  # when it is expected to be


class OrderedModels:
    """The models of one worker. Lives on one event loop. `changed` is set when something has changed by an order."""

    def __init__(
        self,
        cache: ModuleCache,
        wants: Wants,
        kinds: Collection[str],
        *,
        pool: str,
        node: str,
        slots: int,
    ) -> None:
        self.changed = asyncio.Event()
        self._cache = cache
        self._wants = wants
        self._kinds = frozenset(kinds)
        self._pool = pool
        self._node = node
        self._slots = slots
        self._began_s = cache.clock()
        self._taken: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._outcomes: deque[OrderOutcome] = deque(maxlen=MAX_REMEMBERED // 4)
        self._switches: dict[str, _Switch] = {}  # by order
        self._failures = LoadFailures(ONE_LOAD_S)  # of this replica alone
        self._asked: tuple[tuple[str, str], ...] = ()
        self._needs: dict[str, ModelNeed] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def report(self) -> WorkerReport:
        """Return the present models."""
        now_s, here = self._cache.clock(), self._cache.occupancy()
        self._failures.forget_before(now_s - 2 * LONGEST_RETRY_S)
        switch, speeds = next(iter(self._switches.values()), None), self._cache.switches.speeds
        return WorkerReport(
            self._pool,
            self._node,
            self._kinds,
            here.budget_bytes,
            here.ready,
            here.coming,
            here.leased,
            here.pinned,
            self._slots,
            switching_to=switch.model if switch else None,
            ready_in_s=max(0.0, switch.ready_s - now_s) if switch else 0.0,
            fixed_switch_s=speeds.fixed_s,
            attach_bytes_per_s=speeds.attach_bytes_per_s,
            load_bytes_per_s=speeds.load_bytes_per_s,
            taken=tuple(self._taken),
            outcomes=tuple(self._outcomes),
            failures={
                model: LoadFailure(version, failed.num, now_s - failed.at_s, failed.error)
                for (model, version), failed in self._failures.of_replica(_HERE).items()
            },
            needs=dict(self._needs),
            up_s=now_s - self._began_s,
        )

    def apply(self, orders: Orders) -> None:
        """Begin the new orders."""
        for order in orders.orders:
            if order.id not in self._taken:
                self._taken.append(order.id)
                self._begin(order)
        if orders.describe and orders.describe != self._asked:
            self._asked = orders.describe
            self._run(self._describe(orders.describe))

    def note_load(self, model: str, version: str, error: str | None) -> None:
        """Report the outcome of a request's load, too: `error`, or None when the model could be loaded again."""
        if error is None:
            self._failures.forget_model(model)
        else:
            self._note_failure(model, version, error)
        self.changed.set()

    def _begin(self, order: Order) -> None:
        if order.action == "switch":
            self._switches[order.id] = _Switch(order.model, self._cache.clock() + order.switch_s)
        self._run(self._carry_out(order))
        self.changed.set()

    async def _carry_out(self, order: Order) -> None:
        began_s, version, problem = self._cache.clock(), "", ""
        try:
            with panics_as_errors():
                if order.action == "evict":
                    self._cache.evict(order.model)
                else:
                    manifest = await self._cache.manifests.newest(order.model)
                    version = manifest.fingerprint
                    await self._bring(manifest, order)
        except Exception as error:  # any error is this model's: the others go on
            problem = str(error).partition("\n")[0] or type(error).__name__
            logger.warning("%s of %r failed: %s", order.action, order.model, problem)
            if version or _is_of_model(error):
                self._note_failure(order.model, version, problem)
        else:
            if order.action == "switch":
                self._failures.forget_model(order.model)
        finally:
            self._switches.pop(order.id, None)
        self._outcomes.append(OrderOutcome(order.id, self._cache.clock() - began_s, problem))
        self.changed.set()

    async def _bring(self, manifest: Manifest, order: Order) -> None:
        """Bring the model of an order into the node's memory, or onto the device."""
        if order.action == "prefetch":
            self._cache.fetch_ahead(RequestParts(manifest.model, self._cache.planner.plan(manifest, self._wants)))
        else:
            await self._switch(manifest, order.evict)

    async def _switch(self, manifest: Manifest, evict: Collection[str]) -> None:
        """Evict models, keeping components that the next one shares, then load it."""
        keep = {part.component.module_key for part in self._cache.planner.plan(manifest, self._wants).values()}
        for model in evict:
            self._cache.evict(model, keep)
        async with self._cache.lease(manifest.model, self._wants, version=manifest.fingerprint):
            pass

    async def _describe(self, asked: Collection[tuple[str, str]]) -> None:
        """Find the bytes of each model in the budget. Earlier answers, already used, are forgotten."""
        needs = {}
        for model, version in asked:
            try:
                with panics_as_errors():
                    manifest = await self._cache.manifests.find_version(model, version)
            except Exception as error:
                if _is_of_model(error):
                    self._note_failure(model, version, str(error).partition("\n")[0] or type(error).__name__)
                continue
            parts = self._cache.planner.plan(manifest, self._wants).values()
            needs[model] = ModelNeed(
                manifest.fingerprint,
                {part.component.module_key: sum(part.footprint.values()) for part in parts},
                {part.component.module_key: tuple(extent.id for extent in part.extents) for part in parts},
            )
        self._needs = needs
        self._asked = ()  # asked again, it looks again
        self.changed.set()

    def _note_failure(self, model: str, version: str, error: str) -> None:
        self._failures.note_failure(model, version, _HERE, self._cache.clock(), error)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := shared_task(work))
        task.add_done_callback(self._tasks.discard)


def _is_of_model(error: Exception) -> bool:
    """Return whether the model, not a missing registry, is the reason that its manifest is unavailable."""
    return isinstance(error, RayTaskError) or not isinstance(error, RayError)
