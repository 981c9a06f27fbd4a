"""The processes that a private Ray starts beside its raylet, and the scripts that its workers run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from cluster.ray_seam import shims

# The autoscaler's loop, of which one node has no use, and what copies the workers' logs to the driver, which does not
# ask for them.
_SPARED: Final = {"no_monitor": True, "include_log_monitor": False}


@contextlib.contextmanager
def without_spare_processes() -> Iterator[None]:
    """Let a Ray that starts in the block leave out what one node without a dashboard has no use for.

    Ray 2.60 has no option for it. A Ray that has other names for them starts them.
    """
    if shims.problems(shims.SPARE_PROCESSES) or _refused(_SPARED):
        yield
        return
    # Of the dashboard, `include_dashboard=False` leaves a process with nothing but usage statistics.
    with _nodes_with(_SPARED, start_api_server=_start_nothing):
        yield


def _start_nothing(node: Any, *arguments: Any, **options: Any) -> None:
    """Start no process."""


@contextlib.contextmanager
def worker_scripts(own: tuple[str, str], of_ray: tuple[str, str], on_problem: Callable[[str], None]) -> Iterator[None]:
    """Let a Ray that starts in the block run the scripts `own` where it would run `of_ray`: worker and setup script.

    `on_problem` is called with the reason when this Ray starts its workers in another way, and then nothing changes.
    """
    settings = dict(zip(("worker_path", "setup_worker_path"), own, strict=True))
    absent = [f"it has no {path}" for path in of_ray if not os.path.isfile(path)]
    if found := [*shims.problems(shims.TEMPLATES), *absent] or _refused(settings):
        on_problem(f"this version of Ray starts its processes in another way: {found[0]}")
        yield
        return
    with _nodes_with(settings):
        yield


def _refused(settings: Mapping[str, Any]) -> list[str]:
    """Return this Ray's message about unknown settings."""
    from ray._private.parameter import RayParams

    try:
        RayParams().update(**settings)
    except ValueError as error:
        return [str(error)]
    return []


@contextlib.contextmanager
def _nodes_with(settings: Mapping[str, Any], **methods: Callable[..., Any]) -> Iterator[None]:
    """Let a Ray that starts in the block have these settings and methods of its node."""
    from ray._private.node import Node

    stock_init = Node.__init__

    def begin(node: Any, ray_params: Any, *arguments: Any, **options: Any) -> None:
        ray_params.update(**settings)
        stock_init(node, ray_params, *arguments, **options)

    changed = {"__init__": begin, **methods}
    known = {name: Node.__dict__[name] for name in changed}
    for name, method in changed.items():
        setattr(Node, name, method)
    try:
        yield
    finally:
        for name, method in known.items():
            setattr(Node, name, method)
