"""`atelier status`: the running parts, the resident weights, and the reasons why they stay."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import typer

from deployments.cli.models import print_models
from deployments.cli.orders import print_overrides
from deployments.console.client import Key, Url, find_client
from deployments.console.output import SHORT_HASH, Column, Json, Wide, print_json, print_line, print_table, size

app = typer.Typer()

NUM_DECISIONS: Final = 30

NODE_COLUMNS: Final = (
    Column("node"),
    Column("extents", align="right"),
    Column("resident", align="right"),
    Column("leased", align="right"),
    Column("pinned", align="right"),
    Column("budget", align="right"),
    Column("read", align="right", only_wide=True),
    Column("read GB/s", align="right", only_wide=True),
)
RESIDENCY_COLUMNS: Final = (
    Column("model", "name"),
    Column("where"),
    Column("resident", align="right"),
    Column("of", align="right", only_wide=True),
    Column("uses", align="right", only_wide=True),
    Column("switch", align="right"),
    Column("why it stays", "text"),
)
QUEUE_COLUMNS: Final = (
    Column("model", "name"),
    Column("waiting", align="right"),
    Column("oldest", align="right"),
    Column("running", align="right"),
    Column("takes", align="right"),
    Column("started", align="right", only_wide=True),
    Column("refused", align="right", only_wide=True),
)


WORKER_COLUMNS: Final = (
    Column("worker"),
    Column("has ready", "text"),
    Column("runs", "text"),
    Column("switches to", "name"),
    Column("in use", align="right"),
    Column("budget", align="right"),
)
RANK_COLUMNS: Final = (
    Column("worker"),
    Column("rank", align="right"),
    Column("node"),
    Column("process", align="right"),
    Column("weights", align="right"),
    Column("sent", align="right"),
)
DECISION_COLUMNS: Final = (
    Column("age", align="right"),
    Column("decision"),
    Column("worker"),
    Column("model", "name"),
    Column("instead of", "text"),
    Column("took", align="right"),
    Column("why", "text"),
)
Why = Annotated[bool, typer.Option("--why", help="Show the controller's last decisions and their reasons instead.")]


@app.command()
def status(url: Url = None, key: Key = None, why: Why = False, wide: Wide = False, as_json: Json = False) -> None:
    """Show the running parts and the resident weights."""
    client = find_client(url, key)
    if why:
        decisions = client.decisions(NUM_DECISIONS)
        print_json(decisions) if as_json else _print_decisions(decisions, wide=wide)
        if not as_json:
            _print_ranks(client.cluster()["workers"], wide)
        return
    cluster = client.cluster()
    if as_json:
        print_json(cluster)
        return
    print_line(f"cluster {cluster['cluster']} at {client.url}")
    if "registry" in cluster:
        print_line(f"the registry is unreachable: {cluster['registry']['unreachable']}", "red")
    print_models(cluster["models"], wide=wide, title="models")
    for sort in ("models", "nodes"):
        shown, total = len(cluster[sort]), cluster.get(f"num_{sort}", 0)
        if shown < total:
            print_line(f"the first {shown} of {total} {sort}; /admin/cluster lists the others, page by page")
    _print_nodes(cluster["nodes"], wide)
    for problem in cluster.get("node_problems", ()):
        print_line(problem, "red")
    _print_residency(cluster["models"], wide)
    _print_queue(cluster.get("admission"), wide)
    print_line("")
    for encoder in cluster["text_encoders"]:
        _print_replica("encoder", encoder, f"{_cache_use(encoder)}{_programs(encoder)}")
    for worker in cluster["workers"]:
        _print_replica("worker", worker, f"{worker.get('denoising', 0)} requests denoising{_ranks(worker)}")
    _print_ranks(cluster["workers"], wide)
    _print_templates(cluster.get("templates"))


def _print_decisions(found: dict[str, Any], *, wide: bool = False) -> None:
    """Print the controller's decisions in the form of /admin/decisions."""
    if not found["enabled"]:
        print_line("the controller is off: every worker switches to the model of its requests")
        return
    age = f"the last plan is {found['age_s']:.1f} s old" if found["age_s"] is not None else "it has no plan yet"
    print_line(f"controller: {found['policy']}, {age}")
    print_overrides(found["overrides"])
    workers = [
        [
            worker["name"],
            ", ".join(worker["models"]),
            ", ".join(f"{count} {model}" for model, count in worker["running"].items()),
            worker["switching_to"] or "",
            size(worker["resident_bytes"]),
            size(worker["budget_bytes"]),
        ]
        for worker in found["workers"]
    ]
    print_table(WORKER_COLUMNS, workers, wide=wide, title="workers")
    if scaling := found.get("scaling"):
        leaving = f", of which {', '.join(scaling['leaving'])} leave" if scaling["leaving"] else ""
        spares = f", {', '.join(scaling['spares'])} spare" if scaling["spares"] else ""
        print_line(f"{scaling['target']} workers wanted{leaving}{spares}: {scaling['reason']}")
    rows = []
    for one in found["decisions"]:
        took = f"{one['took_s'] * 1e3:.0f} ms" if one["took_s"] is not None else ""
        why = one["reason"] if one["state"] in ("done", "taken", "draining") else f"{one['reason']} ({one['state']})"
        age = f"{max(0.0, time.time() - one['at_s']):.1f} s"
        rows.append([age, one["action"], one["worker"], one["model"], ", ".join(one["evict"]), took, why])
    print_table(DECISION_COLUMNS, rows, wide=wide, title="decisions")
    for model, backoff in found["backoffs"].items():
        print_line(f"{model} is tried again in {backoff['retry_in_s']:.1f} s: {backoff['error']}", "red")
    for model, reason in found["free"].items():
        print_line(f"{model} needs no order: {reason}")
    for note in found["notes"]:
        print_line(note)


def _print_nodes(nodes: list[dict[str, Any]], wide: bool) -> None:
    names = ("resident_bytes", "leased_bytes", "pinned_bytes", "budget_bytes", "read_bytes")
    rows = [
        [
            _node(node["node_id"], wide),
            str(node["num_extents"]),
            *(size(node.get(name, 0)) for name in names),
            f"{node['read_bytes'] / node['read_s'] / 1e9 if node['read_s'] else 0.0:.2f}",
        ]
        for node in nodes
        if "unreachable" not in node
    ]
    print_table(NODE_COLUMNS, rows, wide=wide, title="weights by node")
    for node in nodes:
        if "unreachable" in node:
            print_line(f"node {_node(node['node_id'], wide)} is unreachable: {node['unreachable']}", "red")


def _print_residency(models: list[dict[str, Any]], wide: bool) -> None:
    """One row for each model and place with parts of it; "may go" means evictable."""
    rows = []
    for model in models:
        for node_id, found in model.get("resident", {}).items():
            held = [*(["pinned"] if found["pinned"] else []), *found["holders"]]
            rows.append(
                [
                    model["id"],
                    f"node {_node(node_id, wide)}",
                    size(found["host_bytes"]),
                    size(model["nbytes"]),
                    str(found["hits"]),
                    "",
                    ", ".join(held) or "may go",
                ]
            )
        last = model.get("last_switch") or {}
        for found in model.get("built", []):
            held = [
                *(["pinned"] if found["pinned"] else []),
                *([f"{found['leases']} leases"] if found["leases"] else []),
            ]
            took = f"{last['switch_ms']:.1f} ms" if last.get("replica") == found["replica"] else ""
            rows.append(
                [model["id"], found["replica"], size(found["bytes"]), "", "", took, ", ".join(held) or "may go"]
            )
    print_table(RESIDENCY_COLUMNS, rows, wide=wide, title="models in memory")


def _print_queue(queue: dict[str, Any] | None, wide: bool) -> None:
    """One row for each requested model, and a line for each pool of replicas."""
    if queue is None:
        print_line("")
        print_line("the admission queue does not answer", "red")
        return
    rows = [
        [
            load["model"],
            str(load["waiting"]),
            f"{load['oldest_age_s']:.1f} s" if load["waiting"] else "",
            str(load["running"]),
            f"{load['latency_s']:.2g} s" if load["latency_s"] else "",
            str(load["started"]),
            str(load["refused"]),
        ]
        for load in queue["models"]
    ]
    print_table(QUEUE_COLUMNS, rows, wide=wide, title="requests")
    for pool, replicas in queue["replicas"].items():
        shares = [f"{replica['used']:.0%}" for replica in replicas if not replica["is_gone"]]
        if shares:
            print_line(f"{pool.replace('_', ' ')}: {', '.join(shares)} of the places taken")


def _print_replica(role: str, replica: dict[str, Any], doing: str) -> None:
    """One line, by the nodes' name of the replica."""
    if "unreachable" in replica:
        print_line(f"{role} is unreachable: {replica['unreachable']}", "red")
    else:
        held = f"{len(replica['modules'])} modules, {size(replica['resident_bytes'])}"
        print_line(f"{role}-{replica['name']}: {held}; {doing}")


def _ranks(worker: dict[str, Any]) -> str:
    """Return the ranks of a worker, for the end of its line; "" where one process computes a model."""
    if (ranks := worker.get("ranks")) is None:
        return ""
    axes = ", ".join(f"{axis} {ranks[axis]}" for axis in ("cfg", "sequence", "tensor") if ranks[axis] > 1)
    silent = [str(one["rank"]) for one in ranks["processes"] if "process" not in one]
    return f"; {len(ranks['processes'])} ranks ({axes})" + (f", no answer of {', '.join(silent)}" if silent else "")


def _print_ranks(workers: list[dict[str, Any]], wide: bool) -> None:
    """One row for each rank of workers with several: where it is, and the weights of its parts."""
    rows = [
        [
            worker["name"],
            str(one["rank"]),
            _node(one.get("node", ""), wide),
            str(one.get("process", "no answer")),
            size(one["weights_bytes"]) if "weights_bytes" in one else "",
            size(one["sent_bytes"]) if "sent_bytes" in one else "",
        ]
        for worker in workers
        for one in worker.get("ranks", {}).get("processes", ())
    ]
    if rows:
        print_table(RANK_COLUMNS, rows, wide=wide, title="ranks")


def _print_templates(found: dict[str, Any] | None) -> None:
    """One line for all templates, whose processes start with finished imports."""
    if found is None:
        print_line("no templates: each of Ray's processes imports everything itself")
        return
    shown = [
        f"{one['num_copies']} of {one['name']}" + ("" if one["is_ready"] else ", which makes no more now")
        for one in found["templates"]
    ]
    print_line(f"processes that are copies of templates: {'; '.join(shown)}")
    for problem in found["problems"]:
        print_line(f"a process was not forked from a template: {problem}")


def _cache_use(encoder: dict[str, Any]) -> str:
    cache = encoder.get("cache")
    if not cache:
        return "no cache"
    hits = cache["local"] + cache["joined"]
    return f"cache {cache['entries']} entries, {size(cache['nbytes'])}, {hits} hits, {cache['computed']} misses"


def _programs(encoder: dict[str, Any]) -> str:
    found = encoder.get("programs") or {}
    counts = [f"{found[state]} {state}" for state in ("compiled", "compiling") if found.get(state)]
    reasons = [f"{name} not compiled ({reason})" for name, reason in found.get("not_compiled", {}).items()]
    return f"; programs: {', '.join(counts + reasons)}" if counts or reasons else ""


def _node(node_id: str, wide: bool) -> str:
    return node_id if wide else node_id[:SHORT_HASH]
