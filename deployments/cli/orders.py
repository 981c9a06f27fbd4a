"""The commands that give orders to workers, above the controller."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import psutil
import typer

from deployments.console.client import Client, ClientError, Key, Url, find_client
from deployments.console.output import Json, print_json, print_line

app = typer.Typer()

HERE: Final = "here"  # the node on which the command runs
POLL_S: Final = 0.5

Worker = Annotated[str, typer.Argument(help="Worker, as `atelier status --why` lists them; may be shortened.")]
OneWorker = Annotated[str | None, typer.Argument(help="Worker, may be shortened.")]
AnyWorker = Annotated[str | None, typer.Argument(help="Worker, may be shortened; default: the whole cluster.")]


@app.command()
def freeze(worker: AnyWorker = None, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Order no switches any more, of one worker or of all."""
    _order(find_client(url, key), "freeze", worker, is_on=True, as_json=as_json)


@app.command()
def thaw(worker: AnyWorker = None, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Order switches again."""
    _order(find_client(url, key), "freeze", worker, is_on=False, as_json=as_json)


@app.command()
def drain(
    worker: OneWorker = None,
    node: Annotated[
        str | None, typer.Option(help=f"Address of a node, or `{HERE}`: drain all its workers, and wait.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until nothing runs on the node.")] = 300.0,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Let a worker, or all of a node, hand their models over and finish; no request fails."""
    if (worker is None) == (node is None):
        raise typer.BadParameter("name a worker, or a node by --node")
    client = find_client(url, key)
    if node is not None:
        _drain_node(client, node, timeout, as_json=as_json)
    else:
        _order(client, "drain", worker, is_on=True, as_json=as_json)


def _drain_node(client: Client, node: str, timeout_s: float, *, as_json: bool) -> None:
    """Drain the workers of a node and wait until nothing runs there. Raises ClientError for an unknown node."""
    names = [worker["name"] for worker in _on_node(client, node)]
    for name in names:
        client.override("drain", name, is_on=True)
    deadline_s = time.monotonic() + timeout_s
    while busy := [one for one in _on_node(client, node) if one["name"] in names and one["running"]]:
        if time.monotonic() >= deadline_s:
            what = ", ".join(f"{sum(one['running'].values())} on worker {one['name']}" for one in busy)
            raise ClientError(f"requests still run after {timeout_s:g} s: {what}")
        time.sleep(POLL_S)
    if as_json:
        print_json({"node": node, "drained": names})
    else:
        print_line(f"nothing runs on node {node}: {', '.join(names) or 'no worker is there'}")


def _on_node(client: Client, node: str) -> list[dict[str, Any]]:
    """Return the workers of a node. Raises ClientError if no worker has its address."""
    workers = client.decisions(0)["workers"]
    found = [one for one in workers if one["address"] in (_own_addresses() if node == HERE else {node})]
    if not found and node != HERE:
        known = ", ".join(sorted({one["address"] for one in workers})) or "none"
        raise ClientError(f"no worker is on node {node!r} (nodes with workers: {known})")
    return found


def _own_addresses() -> set[str]:
    """Return this machine's addresses."""
    return {one.address for all_ in psutil.net_if_addrs().values() for one in all_}


@app.command()
def undrain(worker: Worker, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Let a worker that drains have work again."""
    _order(find_client(url, key), "drain", worker, is_on=False, as_json=as_json)


def print_overrides(overrides: dict[str, Any]) -> None:
    """Print the orders in force, a line each."""
    if overrides["is_frozen"]:
        print_line("frozen: no switches are ordered (`atelier thaw`)")
    for name in overrides["frozen"]:
        print_line(f"worker {name} is frozen (`atelier thaw {name}`)")
    for name in overrides["draining"]:
        print_line(f"worker {name} drains (`atelier undrain {name}`)")
    for name, models in overrides["pins"].items():
        print_line(f"worker {name} keeps {', '.join(sorted(models))} (`atelier unpin MODEL --worker {name}`)")


def _order(client: Client, what: str, worker: str | None, *, is_on: bool, as_json: bool) -> None:
    overrides = client.override(what, worker, is_on=is_on)
    if as_json:
        print_json(overrides)
    elif any(overrides.values()):
        print_overrides(overrides)
    else:
        print_line("nothing is ordered by hand")
