"""A picture of the cluster for the page that shows it live: small values by section and name, and their changes. Pure.

Sections are mappings whose values are replaced whole, so that a change is a JSON Merge Patch (RFC 7396) of two levels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic_core import to_json

from deployments.ingress.service.model_answers import Nearness, NearTier

Picture = dict[str, dict[str, Any]]
MAX_REQUESTS: Final = 400  # ended requests in a picture
MAX_SWITCHES: Final = 100
_WHOLE: Final = 0.98  # of a model's bytes: padding between them in an extent is not the model's


def nearness_of(cluster: Mapping[str, Any], decisions: Mapping[str, Any]) -> dict[str, Nearness]:
    """Return the nearness of each model by the answers of /admin/cluster and /admin/decisions."""
    workers = [_Costs.of(worker) for worker in decisions.get("workers", ())]
    ready = {model for worker in decisions.get("workers", ()) for model in worker["models"]}
    return {model["id"]: _nearness(model, model["id"] in ready, workers) for model in cluster["models"]}


class _Costs(NamedTuple):
    """The cost of a switch on a worker: fixed seconds, and seconds per byte from and to the node's memory."""

    name: str
    node: str
    fixed_s: float
    attach_s: float
    load_s: float

    @classmethod
    def of(cls, worker: Mapping[str, Any]) -> _Costs:
        rates = 1 / worker["attach_bytes_per_s"], 1 / worker["load_bytes_per_s"]
        return cls(worker["name"], worker["node"], worker["fixed_switch_s"], *rates)


def _nearness(model: Mapping[str, Any], is_ready: bool, workers: Sequence[_Costs]) -> Nearness:
    host_bytes = {node: found["host_bytes"] for node, found in model["resident"].items()}
    if model["kind"] not in ("diffusion", "llm"):  # of the text encoders: no controller plans them
        return Nearness("resident" if model["built"] else _tier_of(model["nbytes"], host_bytes))
    if is_ready:
        return Nearness("resident", 0.0)
    built = {one["replica"].partition("-")[2]: one["bytes"] for one in model["built"]}
    found_s = min((_ready_in_s(model["nbytes"], costs, built, host_bytes) for costs in workers), default=None)
    return Nearness(_tier_of(model["nbytes"], host_bytes), None if found_s is None else round(found_s, 3))


def _ready_in_s(nbytes: int, costs: _Costs, built: Mapping[str, int], host_bytes: Mapping[str, int]) -> float:
    """Return the seconds of a switch of the worker, as `ClusterState.switch_s` computes them from components."""
    name, node, fixed_s, attach_s, load_s = costs
    missing = max(0, nbytes - built.get(name, 0)) if built else nbytes
    cold = min(missing, max(0, nbytes - host_bytes.get(node, 0))) if host_bytes else missing
    return fixed_s + missing * attach_s + cold * load_s


def _tier_of(nbytes: int, host_bytes: Mapping[str, int]) -> NearTier:
    return "memory" if nbytes and max(host_bytes.values(), default=0) >= _WHOLE * nbytes else "disk"


class Chronicle:
    """The latest events, found by comparing states of a cluster: switches and ended requests.

    Rare looks miss switches in between; ordered ones are in the decisions as well.
    """

    def __init__(self) -> None:
        self.switches: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_SWITCHES)
        self.requests: deque[tuple[int, list[Any]]] = deque(maxlen=MAX_REQUESTS)
        self._seen: dict[tuple[str, str], Any] | None = None  # None before a first look
        self._num_switches = 0

    def begin(self) -> None:
        """Begin to look, perhaps after a while without looks: switches since the last one have no time."""
        self._seen = None

    def note_replicas(self, replicas: Iterable[Mapping[str, Any]], at_s: float) -> None:
        """Note new reports of switches, but for those of a first look."""
        known, seen = self._seen, {}
        for replica in replicas:
            for model, report in replica.get("last_switches", {}).items():
                key = (replica["name"], model)
                seen[key] = report
                if known is not None and report != known.get(key) and report["built"]:
                    self._num_switches += 1
                    switch = {"at_s": round(at_s, 2), "replica": replica["name"], **_described(report)}
                    self.switches.append((self._num_switches, switch))
        self._seen = seen

    def note_requests(self, ended: Sequence[Any], first_number: int, clock_ahead_s: float) -> None:
        """Take in ended requests. `clock_ahead_s` turns the queue's times into Unix time."""
        for number, one in enumerate(ended, first_number):
            times = (round(at_s + clock_ahead_s, 3) for at_s in (one.arrived_s, one.started_s, one.ended_s))
            self.requests.append((number, [one.model, one.pool, one.replica, one.tenant, *times, one.is_answered]))


def _described(report: Mapping[str, Any]) -> dict[str, Any]:
    names = ("model", "switch_ms", "attached_bytes", "reused_bytes", "storage_bytes", "built", "reused")
    return {name: report[name] for name in names}


def picture_of(
    cluster: Mapping[str, Any],
    decisions: Mapping[str, Any],
    near: Mapping[str, Nearness],
    chronicle: Chronicle,
    at_s: float,
) -> Picture:
    """Return the picture, by the answers of /admin/cluster and /admin/decisions at a Unix time."""
    admission = cluster.get("admission") or {"models": [], "replicas": {}, "tenants": {}, "shares": []}
    loads = {replica["name"]: replica for replicas in admission["replicas"].values() for replica in replicas}
    totals = {name: cluster[name] for name in ("cluster", "num_models", "num_nodes")}
    totals |= {name: decisions.get(name) for name in ("enabled", "policy", "notes", "scaling", "overrides")}
    if "registry" in cluster:
        totals["registry"] = cluster["registry"]["unreachable"]
    return {
        "totals": {**totals, "at_s": round(at_s, 2)},
        "nodes": dict(_nodes(cluster["nodes"])),
        "workers": dict(
            _replicas(cluster["workers"], loads, {one["name"]: one for one in decisions.get("workers", ())})
        ),
        "encoders": dict(_replicas(cluster["text_encoders"], loads, {})),
        "models": {model["id"]: _model(model, near[model["id"]]) for model in cluster["models"]},
        "loads": {f"{load['pool']}/{load['model']}": _rounded(load) for load in admission["models"]},
        "tenants": dict(admission["tenants"]),
        "shares": {_key_of(share): _rounded(share) for share in admission["shares"]},
        "decisions": {f"{one['at_s']:.4f} {one['worker']}": one for one in decisions.get("decisions", ())},
        "switches": {str(number): switch for number, switch in chronicle.switches},
        "requests": {str(number): request for number, request in chronicle.requests},
    }


def changes_of(old: Picture, new: Picture) -> Picture:
    """Return the JSON Merge Patch from `old` to `new`; removed values are None."""
    changes: Picture = {}
    for section, values in new.items():
        before = old.get(section, {})
        changed = {name: value for name, value in values.items() if name not in before or before[name] != value}
        changed |= dict.fromkeys(before.keys() - values.keys())
        if changed:
            changes[section] = changed
    return changes


def _nodes(nodes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    names = ("resident_bytes", "leased_bytes", "pinned_bytes", "budget_bytes", "object_store_bytes")
    counts = ("num_extents", "num_evicted", "num_waiting", "read_bytes", "peer_bytes")
    for node in nodes:
        if "unreachable" in node:
            yield node["node_id"], {"unreachable": node["unreachable"]}
        else:
            yield node["node_id"], {name: node.get(name, 0) for name in (*names, *counts)}


def _replicas(
    replicas: Iterable[Mapping[str, Any]], loads: Mapping[str, Any], planned: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, replica in enumerate(replicas):
        if "unreachable" in replica:
            yield f"unreachable {place}", {"unreachable": replica["unreachable"]}
            continue
        name = replica["name"]
        load, plan = loads.get(name, {}), planned.get(name, {})
        yield (
            name,
            {
                **{key: replica.get(key) for key in ("device", "budget_bytes", "charged_bytes", "resident_bytes")},
                "node": plan.get("node", ""),
                "modules": [_module(module) for module in replica["modules"]],
                "used": round(load.get("used", 0.0), 3),
                "running": load.get("running", {}),
                "ready": plan.get("models", []),
                "switching_to": plan.get("switching_to"),
                "num_switches": replica["num_switches"],
                "cache": replica.get("cache"),
            },
        )


def _module(module: Mapping[str, Any]) -> list[Any]:
    """Return component, models, bytes, whether something leases it, whether it is pinned, and a short key."""
    leased = module["leases"] > 0
    return [module["component"], module["models"], module["bytes"], leased, module["pinned"], module["key"][:12]]


def _model(model: Mapping[str, Any], near: Nearness) -> dict[str, Any]:
    resident = model["resident"].values()
    return {
        "kind": model["kind"],
        "state": model["state"],
        "error": model["error"],
        "bytes": model["nbytes"],
        "tier": near.tier,
        "ready_in_s": near.ready_in_s,
        "host_bytes": max((found["host_bytes"] for found in resident), default=0),
        "hits": sum(found["hits"] for found in resident),
        "pinned": any(found["pinned"] for found in resident) or any(one["pinned"] for one in model["built"]),
        "replicas": [one["replica"] for one in model["built"]],
    }


def _key_of(share: Mapping[str, Any]) -> str:
    return to_json([share["pool"], share["model"], share["tenant"]]).decode()  # names may have any character


def _rounded(load: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in load.items()}
