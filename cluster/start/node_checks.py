"""The checks of nodes of a Ray that others started: a cluster needs its code, HAProxy, free ports, and its files there.

`atelier up` looks at all of them, and the registry at those that join later.

All nodes have to run the same code: they send each other objects of its classes.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cluster.door.places import why_taken
from cluster.records.errors import ProxyUnavailable
from cluster.start.door_plan import check_haproxy_runs
from configs.cluster import ClusterConfig
from configs.distribution import installed_version

_ROOMS: Final = ("cluster", "configs", "deployments", "weights")
_DIGEST_CHARS: Final = 8


@functools.cache
def running_code() -> tuple[str, ...]:
    """Return Atelier with a digest of its files, and Python, in words: equal ones run the same code. Reads the files.

    A checkout has the same version for months, so that the number alone tells little.
    """
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for file in sorted(file for room in _ROOMS for file in (root / room).rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    python = ".".join(map(str, sys.version_info[:2]))
    name = " ".join(filter(None, ("Atelier", installed_version())))
    return f"{name} ({digest.hexdigest()[:_DIGEST_CHARS]})", f"Python {python}"


def why_other_code(node: str, there: Sequence[str], here: Sequence[str]) -> str:
    """Return the differences of a node from this one and their remedy, "" without any."""
    if list(there) == list(here):
        return ""
    other = " and ".join(one for one in there if one not in here)
    wanted = " and ".join(one for one in here if one not in there)
    return (
        f"node {node} has {other}, and this cluster {wanted}: install the same there, and start Ray of that node again"
    )


LOOK_S: Final = 20.0  # a node may start a process first
FIRST_PAUSE_S: Final = 5.0  # before a node that has a problem is looked at again; doubles each time
LONGEST_PAUSE_S: Final = 60.0
Ports = Mapping[str, tuple[str, int]]  # host and port that each node listens on, by the key of the config


@dataclass(frozen=True, slots=True)
class Wanted:
    """The needs of a cluster on each node beside its code: HAProxy, ports, and files, both by the key of the config."""

    ports: Ports = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    needs_haproxy: bool = True


def wanted_of(config: ClusterConfig, *, has_serve: bool, needs_haproxy: bool) -> Wanted:
    """Return the needs of nodes with an ingress. If Serve runs already, it has the port of HTTP."""
    keys_file = config.access.keys_file
    files = {"access.keys_file": str(keys_file)} if keys_file else {}
    return Wanted(_ports(config, has_serve=has_serve), files, needs_haproxy)


def _ports(config: ClusterConfig, *, has_serve: bool) -> Ports:
    http, grpc = config.http, config.grpc
    found = {} if has_serve else {"http.port": (http.host, http.port)}
    if http.proxy == "haproxy" and not has_serve:
        pages = {name: getattr(http.haproxy, name) for name in ("stats_port", "metrics_port")}
        found |= {f"http.haproxy.{name}": ("127.0.0.1", port) for name, port in pages.items() if port}
    return found | ({"grpc.port": (grpc.host, grpc.port)} if grpc else {})


def node_problems(wanted: Wanted) -> list[str]:
    """Return a sentence for whatever a node lacks of the Ray that this process has joined. Blocks, `LOOK_S` at most."""
    from cluster.process.ray_calls import node_addresses

    return [line for lines in problems_by_node(node_addresses(), wanted).values() for line in lines]


def problems_by_node(
    nodes: Mapping[str, str], wanted: Wanted, serving: Callable[[], Collection[str]] = set
) -> dict[str, list[str]]:
    """Return by id a sentence for whatever each of the nodes lacks. Blocks, `LOOK_S` at most.

    `nodes` are addresses by id. `serving` returns the nodes whose ports the cluster itself has taken; it is called
    where some are taken.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look, asked = ray.remote(num_cpus=0, max_retries=0)(look_at_node), {}
    for node_id in nodes:
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        asked[look.options(scheduling_strategy=place).remote(dict(wanted.ports), dict(wanted.files))] = node_id
    done, silent = ray.wait([*asked], num_returns=len(asked), timeout=LOOK_S) if asked else ([], [])
    late = f"does not answer within {LOOK_S:.0f} s: is it overloaded, or cut off?"
    found = {asked[ref]: [f"node {nodes[asked[ref]]} {late}"] for ref in silent}
    for ref in done:
        node_id, address = asked[ref], nodes[asked[ref]]
        try:
            seen = ray.get(ref)
            if seen["ports"] and node_id in serving():
                seen |= {"ports": {}}
            found[node_id] = [*describe_look(address, seen, wanted)]
        except ray.exceptions.RayError as error:
            found[node_id] = [describe_failed_look(address, error)]
    return found


@dataclass(frozen=True, slots=True)
class _Look:
    """Keeps what was said of a node, how many times in a row it had a problem, and when it is looked at again."""

    lines: list[str]
    num_times: int
    again_s: float


class NodeWatch:
    """The problems of nodes that join a running cluster. A node is looked at when it comes, and while it has some.

    A problem counts once it was seen twice: what starts on a node may take its ports a moment before it says so. Those
    that are `known` are not looked at.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._looks = {node_id: _Look([], 0, math.inf) for node_id in known}
        self.problems: dict[str, list[str]] = {}  # by node id

    def due(self, nodes: Mapping[str, str], now_s: float) -> dict[str, str]:
        """Return the nodes to look at now, of all of Ray's by id."""
        return {
            id_: address
            for id_, address in nodes.items()
            if id_ not in self._looks or now_s >= self._looks[id_].again_s
        }

    def note(self, nodes: Mapping[str, str], found: Mapping[str, list[str]], now_s: float) -> list[str]:
        """Take in the problems found on nodes that were due, and return the sentences that are new."""
        looks = {node_id: look for node_id, look in self._looks.items() if node_id in nodes}
        problems = {node_id: lines for node_id, lines in self.problems.items() if node_id in looks}
        new: list[str] = []
        for node_id, lines in found.items():
            before = looks.get(node_id, _Look([], 0, 0.0))
            num_times = before.num_times + 1 if lines else 0
            pause_s = min(FIRST_PAUSE_S * 2 ** (num_times - 1), LONGEST_PAUSE_S) if lines else math.inf
            looks[node_id] = _Look(lines, num_times, now_s + pause_s)
            counted = [line for line in lines if line in before.lines]
            new += [line for line in counted if line not in problems.get(node_id, ())]
            problems[node_id] = counted
        self._looks, self.problems = looks, {node_id: lines for node_id, lines in problems.items() if lines}
        return new


def look_at_node(ports: Ports, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts of this process's machine, in plain values that other versions understand."""
    return {
        "code": list(running_code()),
        "haproxy": why_no_haproxy(),
        "ports": {key: why for key, place in ports.items() if (why := why_taken(*place))},
        "files": {key: why for key, path in files.items() if (why := _why_unreadable(path))},
    }


def describe_look(node: str, look: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    """Yield a sentence on each thing that a look at the node at that address has found missing.

    Pure but for the code of this process.
    """
    if other := why_other_code(node, look["code"], running_code()):
        yield other
    if wanted.needs_haproxy and look["haproxy"]:
        yield f"node {node} answers no HTTP: {look['haproxy']}; install the missing packages there"
    for key, why in look["ports"].items():
        host, port = wanted.ports[key]
        yield f"node {node} cannot listen on {host}:{port} ({why}): end the program there, or choose another `{key}`"
    for key, why in look["files"].items():
        yield f"node {node} cannot read {wanted.files[key]} ({why}), the `{key}`: copy it there"


def describe_failed_look(node: str, error: Exception) -> str:
    """Return the sentence on a node where the look itself failed, as where there is no Atelier."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"node {node} cannot run Atelier ({lines[-1]}): install {' and '.join(running_code())} there"


def _why_unreadable(path: str) -> str:
    try:
        with open(path, "rb"):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def why_no_haproxy() -> str:
    """Return why HAProxy does not run here, "" when it does."""
    try:
        check_haproxy_runs()
    except ProxyUnavailable as error:
        return str(error)
    return ""
