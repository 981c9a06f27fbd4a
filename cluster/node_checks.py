"""What nodes of a Ray that others started lack for a cluster: the same code, HAProxy, free ports, and its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.door.door_plan import check_haproxy_runs, why_taken
from cluster.errors import ProxyUnavailable
from cluster.node_code import running_code, why_other_code
from configs.cluster import ClusterConfig

LOOK_S: Final = 20.0  # a node may start a process first
Ports = Mapping[str, tuple[str, int]]  # host and port that each node listens on, by the key of the config


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a cluster wants of each node beside its code: HAProxy, ports, and files, both by the key of the config."""

    ports: Ports = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    needs_haproxy: bool = True


def wanted_of(config: ClusterConfig, *, has_serve: bool, needs_haproxy: bool) -> Wanted:
    """Return what nodes with an ingress have to have. With a Serve that runs, the port of HTTP is its own already."""
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
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cluster.registry.node_keepers import node_addresses

    look, asked = ray.remote(num_cpus=0, max_retries=0)(look_at_node), {}
    for node_id, address in node_addresses().items():
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        asked[look.options(scheduling_strategy=place).remote(dict(wanted.ports), dict(wanted.files))] = address
    done, silent = ray.wait([*asked], num_returns=len(asked), timeout=LOOK_S) if asked else ([], [])
    found = [
        f"node {asked[ref]} does not answer within {LOOK_S:.0f} s: is it overloaded, or cut off?" for ref in silent
    ]
    for ref in done:
        try:
            found += told(asked[ref], ray.get(ref), wanted)
        except ray.exceptions.RayError as error:
            found.append(unable(asked[ref], error))
    return found


def look_at_node(ports: Ports, files: Mapping[str, str]) -> dict[str, Any]:
    """Return what the machine of this process has, in plain values, which other versions understand."""
    return {
        "code": list(running_code()),
        "haproxy": why_no_haproxy(),
        "ports": {key: why for key, place in ports.items() if (why := why_taken(*place))},
        "files": {key: why for key, path in files.items() if (why := _why_unreadable(path))},
    }


def told(node: str, look: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    """Yield the sentences on the look at a node. Pure but for the code of this process."""
    if other := why_other_code(node, look["code"], running_code()):
        yield other
    if wanted.needs_haproxy and look["haproxy"]:
        yield f"node {node} answers no HTTP: {look['haproxy']}; install what is missing there"
    for key, why in look["ports"].items():
        host, port = wanted.ports[key]
        yield f"node {node} cannot listen on {host}:{port} ({why}): end what does there, or choose another `{key}`"
    for key, why in look["files"].items():
        yield f"node {node} cannot read {wanted.files[key]} ({why}), the `{key}`: copy it there"


def unable(node: str, error: Exception) -> str:
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
