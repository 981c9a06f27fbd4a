"""The watch over a start: when it is over, and what is said of replicas without a place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kit.clock import Clock

from cluster.records.errors import SessionError
from deployments.console.progress import STALL_S, UNPLACED_S, StartState, StartWatch, unplaced_line

RUNNING = {"ingress": (1, 1), "text_encoder": (1, 1), "worker": (2, 2)}
LINE = {"worker": "worker: 1 replica finds no place"}


def watch(**options: Any) -> tuple[StartWatch, Clock]:
    clock = Clock()
    return StartWatch(clock.now_s, is_private=options.pop("is_private", True), **options), clock


def is_over(watched: StartWatch, state: StartState, clock: Clock) -> bool:
    return watched.is_over(watched.look(state, clock.now_s), clock.now_s)


@pytest.mark.parametrize(
    ("health", "replicas", "over"),
    [
        ("ok", RUNNING, True),
        ("degraded", RUNNING, True),
        ("loading", RUNNING, False),
        ("starting", RUNNING, False),
        ("", RUNNING, False),
        ("ok", RUNNING | {"worker": (1, 2)}, False),
        ("ok", {}, False),
    ],
)
def test_a_start_is_over_when_all_replicas_run_and_no_model_is_on_its_way(
    health: str, replicas: dict[str, tuple[int, int]], over: bool
) -> None:
    watched, clock = watch()
    assert is_over(watched, StartState(replicas, {"m": "ready"}, health=health), clock) is over


def test_a_model_may_take_hours_to_enter_the_store() -> None:
    watched, clock = watch()
    state = StartState(RUNNING, {"m": "registering"}, health="starting")
    for _ in range(10):
        assert not is_over(watched, state, clock)
        clock.now_s += STALL_S
    assert is_over(watched, StartState(RUNNING, {"m": "ready"}, health="ok"), clock)


def test_a_start_in_which_nothing_changes_ends_and_says_what_was_there() -> None:
    watched, clock = watch()
    state = StartState(RUNNING | {"worker": (1, 2)}, {"m": "ready"}, health="ok")
    assert not is_over(watched, state, clock)
    clock.now_s += STALL_S - 1
    assert not is_over(watched, state, clock)
    clock.now_s += 1
    with pytest.raises(SessionError, match=r"nothing has changed for 300 s: .*ingress 1 of 1, .*worker 1 of 2.*'ok'"):
        is_over(watched, state, clock)


def test_a_limit_of_the_whole_ends_a_start_that_still_moves() -> None:
    watched, clock = watch(timeout_s=60)
    for seconds in range(59):
        assert not is_over(watched, StartState(imports={"m": (seconds, 100)}, models={"m": "registering"}), clock)
        clock.now_s += 1
    clock.now_s += 1
    with pytest.raises(SessionError, match=r"not ready within 60 s: .*entering the store: 1 of 1"):
        is_over(watched, StartState(models={"m": "registering"}), clock)


@pytest.mark.parametrize(("num_workers", "health"), [(1, "ok"), (0, "loading"), (0, "starting")])
def test_the_rest_serves_while_a_replica_finds_no_place(num_workers: int, health: str) -> None:
    watched, clock = watch()
    state = StartState(RUNNING | {"worker": (num_workers, 2)}, {"m": "ready"}, health=health, unplaced=LINE)
    assert watched.look(state, clock.now_s).unplaced == {}
    assert not is_over(watched, state, clock)
    clock.now_s += UNPLACED_S
    assert watched.look(state, clock.now_s).unplaced == LINE
    assert is_over(watched, state, clock)
    for unfinished in ({"models": {"m": "registering"}}, {"health": ""}):
        assert num_workers or not is_over(watched, replace(state, **unfinished), clock)


def test_who_waits_for_a_place_again_waits_from_the_beginning() -> None:
    watched, clock = watch()
    waiting = StartState(RUNNING, unplaced=LINE)
    watched.look(waiting, clock.now_s)
    clock.now_s += UNPLACED_S - 1
    watched.look(StartState(RUNNING), clock.now_s)
    watched.look(waiting, clock.now_s)
    clock.now_s += 2
    assert watched.look(waiting, clock.now_s).unplaced == {}


@pytest.mark.parametrize("is_private", [True, False])
def test_without_a_place_for_the_ingress_a_private_ray_fails_and_another_may_get_nodes(is_private: bool) -> None:
    watched, clock = watch(is_private=is_private)
    state = StartState({"ingress": (0, 1)}, unplaced={"ingress": "ingress: 1 replica finds no place"})
    assert not is_over(watched, state, clock)
    clock.now_s += UNPLACED_S
    if is_private:
        with pytest.raises(SessionError, match="cannot answer: ingress: 1 replica finds no place"):
            is_over(watched, state, clock)
    else:
        assert not is_over(watched, state, clock)


def test_a_line_says_what_a_replica_takes_what_nodes_have_and_what_to_change() -> None:
    nodes = [{"CPU": 2.0, "memory": 1e9}, {"CPU": 8.0}]
    assert unplaced_line("worker", 2, {"CPU": 0.5, "GPU": 1.0}, nodes) == (
        "worker: 2 replicas find no place: each takes 0.5 CPU and 1 GPU, no node has as much "
        "(2 nodes have 2 CPU and 0 GPU, 8 CPU and 0 GPU). Lower worker.num_gpus, or add a node"
    )
    assert unplaced_line("worker", 1, {"CPU": 1.0}, nodes[:1]) == (
        "worker: 1 replica finds no place: each takes 1 CPU, all of it is taken (1 node has 2 CPU). "
        "Lower worker.num_replicas, or add a node"
    )
    assert "Lower worker.num_cpus or worker.placement" in unplaced_line("worker", 1, {"fast": 1, "CPU": 9}, nodes)
    assert len(unplaced_line("worker", 1, {"CPU": 9.0}, [{"CPU": 1.0}] * 10_000)) < 300
