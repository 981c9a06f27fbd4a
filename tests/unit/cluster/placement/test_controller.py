"""The controller's actor, without Ray: what it keeps of those who are gone, and of what an operator orders."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kit.waiting import until

from cluster.admission.records import AdmissionSnapshot, Placement
from cluster.placement.deciding import Decided
from cluster.placement.observing import Observed
from cluster.placement.serving import actor
from cluster.placement.serving.actor import Controller
from cluster.placement.state import NOTHING, ClusterState, ModelState, SwitchPlan
from cluster.records.errors import OverrideRefused
from cluster.records.overrides import OverrideChange, Overrides
from cluster.registry.actor import WeightRegistry
from configs.cluster import ClusterConfig


class Registry:
    """Keeps overrides; `loses` answers to them."""

    def __init__(self) -> None:
        self.overrides = Overrides()
        self.loses = False

    async def call(self, method: Any, *arguments: Any) -> Any:
        if method is WeightRegistry.set_overrides:
            (self.overrides,) = arguments
            if self.loses:
                raise ConnectionError("the answer is lost")
            return None
        if method is WeightRegistry.overrides:
            return self.overrides
        raise ConnectionError("not of this test")


@pytest.fixture
async def controller(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Controller]:
    def refuse(config: ClusterConfig) -> Any:
        raise ConnectionError("no registry")

    monkeypatch.setattr(actor, "connect_registry", refuse)
    fields = {"models": [{"id": "m", "path": "/m"}], "controller": {"enabled": False, "tick_s": 0.05}}
    made = object.__new__(Controller)  # as Ray makes it
    await made.__init__(ClusterConfig.model_validate(fields | {"ingress": {"num_replicas": 2}}))  # type: ignore[misc]
    yield made
    for task in made._tasks:
        task.cancel()
    await asyncio.gather(*made._tasks, return_exceptions=True)


async def test_without_decisions_the_mailboxes_of_ingresses_that_are_gone_go_too(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    await controller.report("stays", AdmissionSnapshot())
    for number in range(5):
        await controller.receive(f"gone-{number}", "x", 0.0)
    await until(lambda: set(controller._mailboxes._mails) == {"stays"})


async def test_records_are_frozen_for_the_collector_once_they_have_doubled(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, num = list[int](), 0
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(num))
    controller._registry.overrides = Overrides()
    for num in (1, 2, 3, 6, 7, 13, 3, 14):
        state = ClusterState({f"m{number}": ModelState(f"m{number}", NOTHING) for number in range(num)})
        observed = Observed(state, "worker", (), (), frozenset(), {})
        decided = Decided(Placement(), {}, SwitchPlan(), observed)
        monkeypatch.setattr(controller._deciding, "decide", lambda *_, decided=decided: decided)
        controller._decide()
    assert frozen == [1, 3, 7]


async def test_overrides_whose_answer_is_lost_are_asked_for_again(controller: Controller) -> None:
    registry = Registry()
    controller._registry._snapshot.call_registry = registry.call  # type: ignore[method-assign, assignment]
    controller._registry.overrides = Overrides()
    registry.loses = True
    with pytest.raises(ConnectionError, match="the answer is lost"):
        await controller.change(OverrideChange("freeze", True))
    assert registry.overrides.is_frozen
    with pytest.raises(OverrideRefused, match="the registry is restarting"):
        await controller.change(OverrideChange("freeze", False))
    registry.loses = False
    controller._registry.overrides = await registry.call(WeightRegistry.overrides)
    assert not (await controller.change(OverrideChange("freeze", False))).is_frozen
    assert not registry.overrides.is_frozen
