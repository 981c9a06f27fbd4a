"""A call that fails leaves nothing behind, though Ray raises out of a frame that has the error in a list.

An actor that has ended is found anew.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from cluster.process import ray_calls
from cluster.process.ray_calls import NamedActor, connect_actor, end_control_plane, get
from cluster.records.actor_names import cluster_key, keeper_name, registry_name
from configs.cluster import ClusterConfig, PlacementConfig
from weights.records.errors import BudgetExceeded


class View:
    """A view like an array of Ray's: memory goes with it."""


@pytest.fixture(autouse=True)
def no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """References are functions here; errors among what they give are raised, as Ray does."""

    def ray_get(refs: list[Any], timeout: float | None = None) -> list[Any]:
        values = [ref() for ref in refs]
        for value in values:
            if isinstance(value, ray.exceptions.RayTaskError):
                raise value.as_instanceof_cause()
            if isinstance(value, ray.exceptions.RayError):
                raise value
        return values

    monkeypatch.setattr("cluster.process.ray_calls.ray.get", ray_get)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def lost() -> Exception:
    return ray.exceptions.OwnerDiedError("0" * 28, None, "")


def of_the_actor() -> Exception:
    cause = BudgetExceeded("8 bytes are missing")
    return ray.exceptions.RayTaskError("acquire", "", cause)


@pytest.mark.parametrize("failure", [lost, of_the_actor])
def test_neither_what_came_beside_it_nor_what_comes_later_is_kept(failure: Any) -> None:
    seen: list[weakref.ref[View]] = []

    def view() -> View:
        made = View()
        seen.append(weakref.ref(made))
        return made

    def ask_twice() -> None:
        with pytest.raises((ray.exceptions.OwnerDiedError, BudgetExceeded)):
            get([view, failure])
        (later,) = get([view])
        assert [seen_view() for seen_view in seen] == [None, later]

    ask_twice()
    assert [seen_view() for seen_view in seen] == [None, None]


def test_the_actors_own_exception_is_raised() -> None:
    with pytest.raises(BudgetExceeded, match="8 bytes are missing"):
        get([of_the_actor])
    with pytest.raises(ray.exceptions.OwnerDiedError):
        get([lost])


async def test_an_actor_is_looked_up_once_and_anew_only_after_it_has_ended() -> None:
    found = [object(), object()]
    looked_up: list[Any] = []

    def connect() -> Any:
        looked_up.append(found[len(looked_up)])
        return looked_up[-1]

    actor = NamedActor(connect)
    assert actor.known_handle is None
    assert await asyncio.gather(*(actor.handle() for _ in range(8))) == [found[0]] * 8
    for error in (TimeoutError(), ValueError("of the actor's own")):
        actor.note_failure(error)
        assert await actor.handle() is actor.known_handle is found[0]
    actor.note_failure(ActorDiedError())
    assert actor.known_handle is None
    assert await actor.handle() is found[1]
    assert looked_up == found


async def test_an_actor_that_cannot_be_found_is_looked_up_again() -> None:
    handle, errors = object(), [RuntimeError("Ray's head is away")]

    def connect() -> Any:
        if errors:
            raise errors.pop()
        return handle

    actor = NamedActor(connect)
    with pytest.raises(RuntimeError, match="head is away"):
        await actor.handle()
    assert await actor.handle() is handle


def test_an_actor_lives_for_ever_under_its_name_and_takes_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Remote:
        def options(self, **options: Any) -> Any:
            made.append(options)
            return self

        def remote(self, *arguments: Any, **options: Any) -> str:
            made.append((arguments, options))
            return "handle"

    monkeypatch.setattr(ray, "remote", lambda class_: Remote())
    assert connect_actor(View, "view", 7, PlacementConfig(), 1, two=2) == "handle"
    options, given = made
    assert given == ((1,), {"two": 2})
    expected = {"name": "view", "lifetime": "detached", "get_if_exists": True, "max_restarts": -1, "num_cpus": 0}
    assert options.items() >= (expected | {"max_concurrency": 7}).items()


def test_the_registry_ends_behind_all_that_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ClusterConfig.model_validate({"name": "c", "models": [{"id": "m", "path": "/m"}]})
    registry, keeper = registry_name(config), keeper_name(cluster_key(config), "n1")
    names, ended = [registry, "another", keeper], list[list[str]]()
    monkeypatch.setattr(ray_calls, "end_actors", lambda find: ended.append(list(find(names))))
    end_control_plane(config)
    assert ended == [[keeper], [registry]]
