"""Small records of the controller: mail to reporters, the registry that it follows, and reports at rest."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from unit.cluster.placement.reporting import worker

from cluster.placement.checking import mended
from cluster.placement.reports import Orders, SlotReport
from cluster.placement.serving.followed_registry import FollowedRegistry
from cluster.placement.serving.mailboxes import Mailboxes


async def test_mail_is_waited_for_until_there_is_another() -> None:
    boxes, orders = Mailboxes(), Orders(migrate=("a",))
    assert (await boxes.receive("w", "", wait_s=0.0)).content is None
    waiting = asyncio.ensure_future(boxes.receive("w", "", wait_s=60.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    boxes.post("w", orders)
    mail = await waiting
    assert mail.content == orders
    boxes.post("w", Orders(migrate=("a",)))  # the same again
    assert boxes.open("w") is mail
    assert await boxes.receive("w", "an older one", wait_s=60.0) is mail
    boxes.post("another", orders)
    boxes.keep({"another"})
    assert boxes.open("w").content is None
    assert boxes.open("another").content == orders


class Snapshot:
    """The registry's models."""

    def __init__(self, *records: Any) -> None:
        self.records, self.revision = records, ("session", 1)

    def __iter__(self) -> Any:
        return iter(self.records)


def test_models_that_can_be_placed_are_told_once_a_revision() -> None:
    def record(id_: str, **changes: Any) -> Any:
        return SimpleNamespace(
            **{"id": id_, "kind": "llm", "fingerprint": "f", "state": "loaded", "serves": True} | changes
        )

    snapshot: Any = Snapshot(
        *(record("a"), record("b", state="unloaded"), record("no", kind=None)),
        *(record("not", serves=False), record("never", state="does_not_fit")),
    )
    followed = FollowedRegistry(snapshot)
    found = followed.new_catalog()
    assert found is not None
    assert {name: entry.is_unloaded for name, entry in found.items()} == {"a": False, "b": True}
    assert followed.new_catalog() is None
    snapshot.revision = ("session", 2)
    assert followed.new_catalog() == found


@pytest.mark.parametrize("change", [{"leased": {"c"}}, {"coming": {"c": 1}}, {"switching_to": "m"}])
def test_a_worker_rests_when_nothing_runs_or_gets_ready(change: dict[str, Any]) -> None:
    report = worker()
    assert report.is_at_rest
    assert not replace(report, **change).is_at_rest


@pytest.mark.parametrize(
    ("claims", "ended", "rests"),
    [((0, 0), None, True), ((1, 0), None, False), ((0, 1), None, False), ((0, 0), "some", False)],
)
def test_an_ingress_rests_when_nothing_waits_runs_or_has_ended(claims: Any, ended: Any, rests: bool) -> None:
    running, waiting = ({"m": count} if count else {} for count in claims)
    pools: Any = {"p": SimpleNamespace(running=running, waiting=waiting)}
    report = SlotReport(3, "s", 1, None, pools, ended=ended)  # type: ignore[arg-type]
    assert report.is_at_rest is rests


def test_an_impossible_figure_is_told_in_short_and_becomes_its_default() -> None:
    notes: dict[str, tuple[str, ...]] = {}
    long: Any = "x" * 100
    found = mended("w", worker(slots=long, up_s=-1.0), notes)
    assert (found.slots, found.up_s) == (1, 0.0)
    assert notes["w"] == (f"w: slots is {repr(long)[:60]}; taken as 1", "w: up_s is -1.0; taken as 0.0")
    assert mended("w", worker(), notes) == worker()
    assert notes == {}
    assert mended("w", worker(budget=-1), notes).budget_bytes == 0
