"""The end of a start: everything that can be there is there, or nothing moves any more; and replicas that no node has
room for, in words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from cluster.errors import SessionError
from deployments.cli.progress import StartState

UNPLACED_S: Final = 10.0  # without a place for a replica, before that is said
STALL_S: Final = 300.0  # without any change, though no model is entering the store: imports have limits of their own
_ENTERING: Final = ("registering", "updating")
_MAX_NODES: Final = 4  # that are described
_KEYS: Final = {"CPU": "num_cpus", "GPU": "num_gpus"}


class StartWatch:
    """Follows the states of one start.

    `timeout_s` bounds the whole of it. `is_private`: nobody adds nodes to this Ray.
    """

    def __init__(
        self, *, is_private: bool, timeout_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_private = is_private
        self._timeout_s = timeout_s
        self._clock = clock
        self._start_s = self._changed_s = clock()
        self._last = StartState()
        self._unplaced_s: dict[str, float] = {}

    def look(self, state: StartState) -> StartState:
        """Return the state with those lines on unplaced replicas alone that are old enough to be said."""
        now_s = self._clock()
        if state != self._last:
            self._last, self._changed_s = state, now_s
        self._unplaced_s = {name: self._unplaced_s.get(name, now_s) for name in state.unplaced}
        old = {name: line for name, line in state.unplaced.items() if now_s - self._unplaced_s[name] >= UNPLACED_S}
        return replace(state, unplaced=old)

    def is_over(self, state: StartState) -> bool:
        """Return whether the start is over, after a look at that state.

        What has no place is not waited for where the rest can serve. Raises SessionError when the start has failed.
        """
        now_s = self._clock()
        missing = {name for name, (num_running, num_wanted) in state.replicas.items() if num_running < num_wanted}
        if state.health in ("ok", "degraded") and state.replicas and missing <= state.unplaced.keys():
            return True
        without_door = state.replicas.get("ingress", (1, 1))[0] == 0 and "ingress" in state.unplaced
        if without_door and self._is_private:
            raise SessionError(f"the cluster cannot answer: {state.unplaced['ingress']}")
        if self._timeout_s is not None and now_s - self._start_s >= self._timeout_s:
            raise SessionError(f"the cluster was not ready within {self._timeout_s:g} s: {_shown(state)}")
        is_entering = any(found in _ENTERING for found in state.models.values())
        if not is_entering and now_s - self._changed_s >= STALL_S:
            raise SessionError(f"nothing has changed for {STALL_S:g} s: {_shown(state)}")
        return False


def _shown(state: StartState) -> str:
    """Return what is there and what is not, in one line."""
    replicas = [f"{name} {num_running} of {num_wanted}" for name, (num_running, num_wanted) in state.replicas.items()]
    entering = sum(found in _ENTERING for found in state.models.values())
    parts = [
        f"replicas that run: {', '.join(replicas) or 'none'}",
        f"models entering the store: {entering} of {len(state.models)}",
        f"/healthz says {state.health!r}" if state.health else "/healthz does not answer",
        *state.unplaced.values(),
    ]
    return "; ".join(parts)


def unplaced_line(
    name: str, num_unplaced: int, demand: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> str:
    """Return a line on replicas of deployment `name`, each of which takes `demand` of a node's resources.

    `nodes` are the resources of each node, whoever uses them now.
    """
    lacking = sorted(_lacking(demand, nodes))
    keys = [f"{name}.{_KEYS.get(resource, 'placement')}" for resource in lacking] or [f"{name}.num_replicas"]
    why = "no node has as much" if lacking else "all of it is taken"
    replicas = "1 replica finds" if num_unplaced == 1 else f"{num_unplaced} replicas find"
    return (
        f"{name}: {replicas} no place: each takes {_amounts(demand, demand)}, {why} ({_nodes(demand, nodes)}). "
        f"Lower {' or '.join(dict.fromkeys(keys))}, or add a node"
    )


def _lacking(demand: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield the resources of which no single node has enough."""
    for resource, amount in demand.items():
        if all(node.get(resource, 0.0) < amount for node in nodes):
            yield resource


def _nodes(demand: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    shown = ", ".join(f"{_amounts(demand, node)}" for node in nodes[:_MAX_NODES])
    further = f" and {len(nodes) - _MAX_NODES} more" if len(nodes) > _MAX_NODES else ""
    return f"{len(nodes)} node{'s have' if len(nodes) != 1 else ' has'} {shown or 'nothing'}{further}"


def _amounts(demand: Mapping[str, float], amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amounts.get(resource, 0.0):g} {resource}" for resource in demand) or "nothing"
