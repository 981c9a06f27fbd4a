"""The check that this Ray has, and reads, the private names that Atelier changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from cluster.ray_seam import haproxy, loopback, placed_router, replica_http, serve_control, serve_proxy, shims
from cluster.ray_seam.shims import problems, require, unknown_variables
from cluster.records.errors import RayIncompatible
from cluster.start.door_plan import plan_unseen_door
from configs.cluster import ClusterConfig
from weights.platform import private_names
from weights.platform.private_names import Shim, source_digest

LIBRARY = """
import functools

def answer(): return 1
def ask(): return answer()
@functools.wraps(ask)
def decorated(): return [lambda: wanted_deep for _ in ()]
wanted_deep = unread = 2
class Server:
    def __init__(self): self._proc = None
    def start(self): self._reload()
    def _reload(self): ...
    def _orphan(self): ...
"""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("some_library")
    exec(LIBRARY, vars(module))
    monkeypatch.setitem(sys.modules, "some_library", module)
    private_names._names_read_by.cache_clear()
    return module


@pytest.mark.parametrize("shim", shims.ALL, ids=lambda shim: shim.purpose.partition(":")[0])
def test_the_pinned_ray_fits(shim: Shim) -> None:
    assert problems(shim) == []


@pytest.mark.parametrize(
    ("shim", "change"),
    [
        (shims.HAPROXY, haproxy.install),
        (shims.PROXY_HTTP, serve_proxy.install),
        (shims.REPLICA_HTTP, lambda: replica_http.put_before_serve(Mock(), Mock())),
        (shims.REPLICA_LOOPBACK, loopback.replica_calls_on_loopback),
        (shims.RAY_LOOPBACK, loopback.ray_on_loopback().__enter__),
        (shims.ROUTER, lambda: placed_router.PlacedRouter(deployment_id=Mock())),
        (shims.SERVE_CONTROL, lambda: serve_control.replaced_by_version(Mock(), "1")),
        (shims.SERVE_CONTROL, lambda: serve_control.deployed_app("app")),
        (shims.SERVE_CONTROL, serve_control.proxy_host),
        (shims.SERVE_CONTROL, serve_control.serving_nodes),
        (shims.SERVE_CONTROL, serve_control.running_serve),
    ],
)
def test_nothing_is_changed_in_a_ray_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, shim: Shim, change: Callable[[], Any]
) -> None:
    monkeypatch.setattr(shims, "problems", lambda asked: ["ray:gone is not there"] if asked is shim else [])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    with pytest.raises(RayIncompatible, match="ray:gone is not there"):
        change()


@pytest.mark.parametrize("name", ["answer", "wanted_deep", "Server._reload"])
def test_a_name_that_the_library_reads_can_be_changed(library: ModuleType, name: str) -> None:
    require(Shim("p", "o", changed={f"some_library:{name}": "some_library"}))


@pytest.mark.parametrize("name", ["unread", "Server._orphan"])
def test_a_name_that_nothing_reads_any_more_is_refused(library: ModuleType, name: str) -> None:
    """It could be assigned without an error, and without an effect."""
    shim = Shim("a purpose", "o", changed={f"some_library:{name}": "some_library"})
    with pytest.raises(RayIncompatible, match=rf"a purpose.*some_library:{name} has no effect: some_library does not"):
        require(shim)


@pytest.mark.parametrize("name", ["some_library:gone", "some_library:Server.gone", "some_library:No.gone", "no_such:a"])
def test_a_missing_name_is_named(library: ModuleType, name: str) -> None:
    assert problems(Shim("p", "o", used=(name,))) == [f"{name} is missing"]
    assert problems(Shim("p", "o", changed={name: "some_library"})) == [f"{name} is missing"]


def test_a_source_that_is_another_one_is_named_with_its_digest(library: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "quick.py"
    file.write_text("def forward(x):\n    return x\n")
    exec(compile(file.read_text(), str(file), "exec"), vars(library))
    digest = source_digest(library.forward)  # type: ignore[attr-defined]
    assert problems(Shim("p", "o", sources={"some_library:forward": digest})) == []
    (found,) = problems(Shim("p", "o", sources={"some_library:forward": "0" * 16}))
    assert "some_library:forward is not the one that was replaced" in found
    assert digest in found
    assert problems(Shim("p", "o", sources={"some_library:gone": digest})) == ["some_library:gone is missing"]


def test_a_public_name_that_is_overridden_has_to_be_read_as_well(library: ModuleType) -> None:
    assert problems(Shim("p", "o", public={"some_library:Server._reload": "some_library"})) == []
    (found,) = problems(Shim("p", "o", public={"some_library:unread": "some_library"}))
    assert "has no effect" in found


def test_private_names_of_ray_get_fewer() -> None:
    """The list may only get shorter: each name is one that a release takes away without a word."""
    # The 25th is that of objects which nobody fills: without it they are cleared, which a keeper finds out by trying.
    # The 26th is Serve's look at all nodes, ten times a second for ever: a fifth of what an idle cluster takes.
    assert len({name for shim in shims.ALL for name in shim.private}) <= 26


def test_what_only_instances_have_exists(library: ModuleType) -> None:
    assert problems(Shim("p", "o", used=("some_library:Server._proc",))) == []


@pytest.mark.parametrize(
    ("number", "expected"), [("2.61.0", True), ("2.57.1", True), ("2.58.0", False), ("2.60.3", False)]
)
def test_a_ray_out_of_bounds_is_named_with_the_bounds_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch, number: str, expected: bool
) -> None:
    monkeypatch.setattr(shims.metadata, "requires", lambda name: ["httpx", "rayon>1", "ray[serve]<2.61,>=2.58"])
    monkeypatch.setattr(shims.metadata, "version", lambda name: number)
    said = f"Ray {number} is none that Atelier was tried with (<2.61,>=2.58): pip install 'ray[serve]<2.61,>=2.58'"
    assert shims.why_untried() == (said if expected else "")


def test_the_pinned_ray_is_within_bounds_and_without_any_all_are() -> None:
    assert shims.why_untried() == ""


def test_every_variable_of_the_plan_is_known_to_this_ray() -> None:
    config = ClusterConfig.model_validate({"models": [{"id": "m", "path": "/m"}]})
    asked = [name for name in plan_unseen_door(config.http.haproxy).environment(config) if name.startswith("RAY_SERVE")]
    assert len(asked) > 10
    assert unknown_variables([*asked, "RAY_SERVE_OF_TOMORROW"]) == ["RAY_SERVE_OF_TOMORROW"]
