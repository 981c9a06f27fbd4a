"""GET /admin/live: one look for all who watch, changes that make the next picture, and how near models are."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kit.seeding import seeded_random
from kit.waiting import until

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.outcomes import EndedRequest
from configs.admission import AdmissionConfig
from deployments.ingress.admin import live
from deployments.ingress.admin.live import MAX_VIEWERS, ClusterView
from deployments.ingress.admin.picture import MAX_REQUESTS, Chronicle, changes_of, nearness_of, picture_of
from deployments.ingress.service.model_answers import Nearness
from deployments.records.errors import NoReplica, Overloaded

REPORT = {
    "model": "flux",
    "switch_ms": 5.0,
    "attached_bytes": 100,
    "reused_bytes": 7,
    "storage_bytes": 0,
    "built": ["transformer"],
    "reused": ["vae"],
    "attach_ms": 1.0,
}
MODULE = {"component": "vae", "models": ["flux"], "bytes": 10, "leases": 1, "pinned": False, "key": "k" * 64}
ENDED = EndedRequest("worker", "flux", "team", 2, 1.0, 1.0, "a", 1.0, 2.0, 3.0, 0.0, True)


def worker(name: str, **changes: Any) -> dict[str, Any]:
    told = {"name": name, "device": "cpu", "budget_bytes": 1000, "charged_bytes": 10, "resident_bytes": 10}
    return {**told, "modules": [MODULE], "num_switches": 1, "last_switches": {}, **changes}


def model(name: str, **changes: Any) -> dict[str, Any]:
    told = {"id": name, "kind": "diffusion", "state": "ready", "error": "", "nbytes": 100, "resident": {}, "built": []}
    return {**told, **changes}


def planned(name: str, models: tuple[str, ...] = (), fixed_s: float = 1.0) -> dict[str, Any]:
    rates = {"fixed_switch_s": fixed_s, "attach_bytes_per_s": 100.0, "load_bytes_per_s": 10.0}
    return {"name": name, "node": "n", "models": list(models), "switching_to": None, **rates}


def resident(nbytes: int) -> dict[str, Any]:
    return {"n": {"host_bytes": nbytes, "hits": 3, "pinned": False}}


def cluster(**changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"cluster": "demo", "num_models": 1, "num_nodes": 0, "models": [model("flux")], "nodes": []}
    return {**told, "workers": [worker("a")], "text_encoders": [], **changes}


class Cluster:
    """Operations and controller in one: what they answer, how often they were asked, and an error to raise."""

    def __init__(self) -> None:
        self.now = cluster()
        self.found: dict[str, Any] = {"workers": [planned("a")], "decisions": []}
        self.num_asked = 0
        self.error: Exception | None = None

    async def describe_cluster(self, page: Any) -> Any:
        self.num_asked += 1
        if self.error:
            raise self.error
        answer = copy.deepcopy(self.now)
        return SimpleNamespace(model_dump=lambda **_: answer)

    async def decisions(self, max_decisions: int) -> dict[str, Any]:
        return copy.deepcopy(self.found)


@pytest.fixture
def told() -> Cluster:
    return Cluster()


@pytest.fixture
def view(told: Cluster) -> ClusterView:
    both: Any = told
    return ClusterView(both, Dispatcher(AdmissionConfig()), both, period_s=0.01)


def parsed(event: str) -> tuple[str, Any]:
    name, data = event.strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def merged(picture: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """RFC 7396, section 2."""
    whole = copy.deepcopy(picture)
    for name, value in changes.items():
        if value is None:
            whole.pop(name, None)
        else:
            whole[name] = merged(whole.get(name) or {}, value) if isinstance(value, dict) else value
    return whole


async def changed(events: AsyncIterator[str], section: str) -> Any:
    """The next change of a section."""
    while True:
        name, data = parsed(await anext(events))
        if name == "change" and section in data:
            return data[section]


async def test_whoever_watches_gets_the_picture_and_then_what_changes(told: Cluster, view: ClusterView) -> None:
    events = view.watch()
    name, picture = parsed(await anext(events))
    assert (name, picture["totals"]["cluster"], list(picture["workers"])) == ("picture", "demo", ["a"])
    told.now["workers"].append(worker("b"))
    assert list(await changed(events, "workers")) == ["b"]
    del told.now["workers"][0]
    assert await changed(events, "workers") == {"a": None}
    await events.aclose()


async def test_ten_who_watch_cost_one_look_and_nobody_none(told: Cluster, view: ClusterView) -> None:
    viewers = [view.watch() for _ in range(10)]
    for number in range(20):
        pieces = [await anext(one) for one in viewers]
        assert len(set(pieces)) == 1 or not number
    assert told.num_asked <= 21
    for one in viewers:
        await one.aclose()
    asked = told.num_asked
    await until(lambda: view._task is not None and view._task.done(), "nobody looks any more")
    assert told.num_asked <= asked + 1


async def test_who_misses_a_change_gets_the_whole_picture(told: Cluster, view: ClusterView) -> None:
    slow, quick = view.watch(), view.watch()
    await anext(slow)
    for _ in range(4):
        await anext(quick)
    name, picture = parsed(await anext(slow))
    assert (name, list(picture["workers"])) == ("picture", ["a"])
    await slow.aclose()
    await quick.aclose()


async def test_so_many_may_watch(told: Cluster, view: ClusterView) -> None:
    viewers = [view.watch() for _ in range(MAX_VIEWERS)]
    for one in viewers:
        await anext(one)
    with pytest.raises(Overloaded, match=str(MAX_VIEWERS)):
        view.watch()
    await viewers.pop().aclose()
    await anext(again := view.watch())
    for one in (*viewers, again):
        await one.aclose()


async def test_a_look_that_fails_ends_nothing(told: Cluster, view: ClusterView) -> None:
    events = view.watch()
    await anext(events)
    told.error = NoReplica("away")
    asked = told.num_asked
    await until(lambda: told.num_asked > asked + 3)
    told.error, told.now["num_models"] = None, 5
    while (await changed(events, "totals"))["num_models"] != 5:
        pass
    await events.aclose()


async def test_what_happened_while_nobody_watched_is_not_told_as_new(told: Cluster, view: ClusterView) -> None:
    events = view.watch()
    await anext(events)
    await events.aclose()
    await until(lambda: view._task is not None and view._task.done(), "nobody looks any more")
    told.now["workers"] = [worker("a", last_switches={"flux": REPORT}), worker("b")]
    events = view.watch()
    name, picture = parsed(await anext(events))
    assert (name, list(picture["workers"]), picture["switches"]) == ("picture", ["a", "b"], {})
    told.now["workers"][1]["last_switches"] = {"flux": REPORT}
    assert [one["replica"] for one in (await changed(events, "switches")).values()] == ["b"]
    await events.aclose()


async def test_requests_and_switches_are_told_once(told: Cluster, view: ClusterView) -> None:
    for _ in range(MAX_REQUESTS + 50):
        view._queues._queue.ended._kept.append(ENDED)  # type: ignore[attr-defined]
        view._queues._queue.ended._num_ended += 1  # type: ignore[attr-defined]
    events = view.watch()
    _, picture = parsed(await anext(events))
    assert list(picture["requests"]) == [str(number) for number in range(50, MAX_REQUESTS + 50)]
    assert picture["switches"] == {}
    told.now["workers"][0]["last_switches"] = {"flux": REPORT}
    switches = await changed(events, "switches")
    assert [(one["replica"], one["model"], one["attached_bytes"]) for one in switches.values()] == [("a", "flux", 100)]
    view._queues._queue.ended._kept.append(replace(ENDED, model="sdxl"))  # type: ignore[attr-defined]
    view._queues._queue.ended._num_ended += 1  # type: ignore[attr-defined]
    requests = await changed(events, "requests")
    assert requests[str(MAX_REQUESTS + 50)][0] == "sdxl"
    assert requests["50"] is None
    await events.aclose()


async def test_nearness_is_asked_once_by_all_who_want_it(told: Cluster, view: ClusterView) -> None:
    found = await asyncio.gather(*(view.nearness() for _ in range(20)))
    assert told.num_asked == 1
    assert all(one == {"flux": Nearness("disk", 1.0 + 100 / 100 + 100 / 10)} for one in found)


async def test_nearness_is_asked_again_after_a_while(
    told: Cluster, view: ClusterView, monkeypatch: pytest.MonkeyPatch
) -> None:
    await view.nearness()
    monkeypatch.setattr(live, "_FRESH_S", 0.0)
    told.now["models"] = [model("flux", resident=resident(100))]
    assert (await view.nearness())["flux"] == Nearness("memory", 2.0)


@pytest.mark.parametrize(
    ("told_model", "workers", "expected"),
    [
        (model("m"), [planned("a", ("m",)), planned("b")], Nearness("resident", 0.0)),
        (model("m", resident=resident(100)), [planned("a", fixed_s=3.0), planned("b")], Nearness("memory", 2.0)),
        (model("m", resident=resident(50)), [planned("a")], Nearness("disk", 1 + 1 + 5.0)),
        (
            model("m", built=[{"replica": "worker-a", "bytes": 60, "pinned": False}]),
            [planned("a")],
            Nearness("disk", 1 + 0.4 + 4.0),
        ),
        (model("m"), [], Nearness("disk", None)),
        (
            model("m", kind="embedding", built=[{"replica": "encoder-x", "bytes": 1, "pinned": False}]),
            [planned("a")],
            Nearness("resident"),
        ),
        (model("m", kind=None, nbytes=0), [planned("a")], Nearness("disk")),
    ],
)
def test_nearness_is_reckoned_from_what_lacks_at_each_tier(
    told_model: dict[str, Any], workers: list[dict[str, Any]], expected: Nearness
) -> None:
    assert nearness_of({"models": [told_model]}, {"workers": workers})["m"] == expected


def test_what_does_not_answer_is_shown_so() -> None:
    lost = {"unreachable": "died"}
    told = cluster(workers=[lost, worker("a")], nodes=[{"node_id": "n", **lost}], registry={"unreachable": "gone"})
    picture = picture_of(told, {}, nearness_of(told, {}), Chronicle(), 0.0)
    assert picture["workers"]["unreachable 0"] == lost
    assert picture["nodes"] == {"n": lost}
    assert picture["totals"]["registry"] == "gone"


def test_tenants_are_told_by_name_with_what_they_wait_for() -> None:
    load = {"pool": "worker", "model": 'a "model"/b', "tenant": "<b>", "waiting": 1, "oldest_age_s": 0.12345}
    told = cluster(admission={"models": [], "replicas": {}, "tenants": {"<b>": 1}, "shares": [load]})
    shares = picture_of(told, {}, nearness_of(told, {}), Chronicle(), 0.0)["shares"]
    assert shares == {'["worker","a \\"model\\"/b","<b>"]': load | {"oldest_age_s": 0.123}}


def test_changes_make_the_next_picture() -> None:
    rng = seeded_random()

    def drawn() -> dict[str, dict[str, Any]]:
        names = rng.sample("abcdefgh", rng.randrange(8))
        return {section: {name: {"n": rng.randrange(3)} for name in names} for section in ("one", "two")}

    before = drawn()
    for _ in range(200):
        after = drawn()
        assert merged(before, changes_of(before, after)) == after
        before = after
