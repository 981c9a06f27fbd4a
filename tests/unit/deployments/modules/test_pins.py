"""Pinned models: on the device as in the budget, in the version that is served, and never beyond what fits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.modules import pins as pins_module
from deployments.modules.pins import Pins
from weights.records.errors import BudgetExceeded


class Device:
    """A device's tier, and the parts that are pinned there."""

    def __init__(self) -> None:
        self.pinned: set[str] = set()
        self.pin, self.unpin = self.pinned.add, self.pinned.remove


class Modules:
    """Resident modules with room for so many parts."""

    def __init__(self, room: int) -> None:
        self.room, self.parts, self.num_served = room, list[str](), 0

    def pin_only(self, parts: list[Any]) -> None:
        names = sorted(part.component for part in parts)
        if len(set(names)) > self.room:
            raise BudgetExceeded("no room")
        self.parts = names

    def serve(self) -> None:
        self.num_served += 1


def manifest(model: str, version: str, *parts: str) -> Any:
    return SimpleNamespace(model=model, fingerprint=version, parts=parts)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Modules, Device, dict[str, Any]]:
    monkeypatch.setattr(pins_module, "ArenaTier", Device)
    modules, device, served = Modules(3), Device(), dict[str, Any]()

    async def newest(model: str) -> Any:
        await asyncio.sleep(0)
        return served[model]

    planner = SimpleNamespace(
        plan=lambda manifest, wanted: {name: SimpleNamespace(component=name) for name in manifest.parts}
    )
    given: Any = (modules, planner, SimpleNamespace(newest=newest), device)
    return Pins(*given), modules, device, served


def test_a_model_is_pinned_in_one_version_and_let_go_of(made: Any) -> None:
    pins, modules, device, _ = made
    pins.pin(manifest("a", "1", "x", "y"), bool)
    pins.pin(manifest("b", "1", "y"), bool)
    assert (pins.models, modules.parts) == (["a", "b"], ["x", "y", "y"])
    assert device.pinned == {"x", "y"}
    assert not pins.is_outdated(manifest("a", "1"))
    assert pins.is_outdated(manifest("a", "2"))
    assert not pins.is_outdated(manifest("c", "2"))
    with pytest.raises(BudgetExceeded, match=r"'c' cannot be pinned: no room \(now: a, b\)"):
        pins.pin(manifest("c", "1", "p", "q"), bool)
    assert (pins.models, modules.parts) == (["a", "b"], ["x", "y", "y"])
    num_served = modules.num_served
    pins.unpin("a")
    assert (pins.models, modules.parts, modules.num_served) == (["b"], ["y"], num_served + 1)
    assert device.pinned == {"y"}
    pins.unpin("gone")
    assert modules.parts == ["y"]


async def test_a_pin_follows_the_served_version_where_it_fits(made: Any) -> None:
    pins, modules, device, served = made
    pins.pin(manifest("a", "1", "x"), bool)
    served["a"] = manifest("a", "1", "other")
    await pins.renew("a")
    assert modules.parts == ["x"]
    served["a"] = manifest("a", "2", "z")
    await pins.renew("a")
    assert (modules.parts, device.pinned) == (["z"], {"z"})
    await pins.renew("gone")  # the registry does not know it
    assert pins.models == ["a"]
    served["a"] = manifest("a", "3", "p", "q", "r", "s")
    await pins.renew("a")
    assert (pins.models, modules.parts) == ([], [])


def test_nothing_is_pinned_on_a_device_without_an_arena(made: Any) -> None:
    pins, modules, device, _ = made
    given: Any = (modules, pins._planner, None, SimpleNamespace())
    alone = Pins(*given)
    alone.pin(manifest("a", "1", "x"), bool)
    assert (modules.parts, device.pinned) == (["x"], set())
