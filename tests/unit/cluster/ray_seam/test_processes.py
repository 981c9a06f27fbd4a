"""A private Ray starts without processes that one node has no use for, and with other scripts for its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray._private.node import Node
from ray._private.parameter import RayParams

from cluster.ray_seam import processes, shims
from cluster.ray_seam.processes import without_spare_processes, worker_scripts
from weights.platform.private_names import Shim

OWN = ("/own/worker.py", "/own/setup.py")


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[RayParams]:
    """The settings of nodes that were made: as Ray's, whose constructor fills in what is open, but nothing starts."""
    made: list[RayParams] = []

    def init(self: Any, ray_params: Any, head: bool = False) -> None:
        ray_params.update_if_absent(include_log_monitor=True, worker_path="ray's", setup_worker_path="ray's")
        made.append(ray_params)

    monkeypatch.setattr(Node, "__init__", init)
    return made


@pytest.fixture
def of_ray(tmp_path: Path) -> tuple[str, str]:
    files = tmp_path / "default_worker.py", tmp_path / "setup_worker.py"
    for file in files:
        file.touch()
    return str(files[0]), str(files[1])


def test_spare_processes_are_left_out_in_the_block_only(started: list[RayParams]) -> None:
    before = {name: Node.__dict__[name] for name in ("__init__", "start_api_server")}
    with without_spare_processes():
        made = Node(RayParams(), head=True)
        assert made.start_api_server(include_dashboard=False, raise_on_failure=True) is None
    assert (started[0].no_monitor, started[0].include_log_monitor) == (True, False)
    assert {name: Node.__dict__[name] for name in before} == before
    with pytest.raises(ZeroDivisionError), without_spare_processes():
        _ = 1 / 0
    assert {name: Node.__dict__[name] for name in before} == before


def test_workers_get_the_scripts_beside_what_else_is_changed(started: list[RayParams], of_ray: tuple[str, str]) -> None:
    problems: list[str] = []
    with worker_scripts(OWN, of_ray, problems.append), without_spare_processes():
        Node(RayParams())
    assert (started[0].worker_path, started[0].setup_worker_path, started[0].no_monitor) == (*OWN, True)
    assert problems == []


def test_a_ray_without_the_setting_starts_everything_as_usual(
    monkeypatch: pytest.MonkeyPatch, started: list[RayParams]
) -> None:
    monkeypatch.setattr(processes, "_SPARED", {"no_monitor": True, "setting_of_tomorrow": True})
    with without_spare_processes():
        Node(RayParams())
    assert not started[0].no_monitor


@pytest.mark.parametrize("lacks", ["a name", "a script"])
def test_a_ray_that_starts_its_workers_in_another_way_is_told(
    monkeypatch: pytest.MonkeyPatch, started: list[RayParams], of_ray: tuple[str, str], lacks: str
) -> None:
    if lacks == "a name":
        monkeypatch.setattr(shims, "TEMPLATES", Shim("p", "o", used=("ray._private.node:gone",)))
    else:
        Path(of_ray[1]).unlink()
    problems: list[str] = []
    with worker_scripts(OWN, of_ray, problems.append):
        Node(RayParams())
    assert started[0].worker_path == "ray's"
    (problem,) = problems
    assert ("ray._private.node:gone is missing" if lacks == "a name" else of_ray[1]) in problem
