"""The commands that order workers by hand, over the controller's head."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deployments.cli.client import Client, Key, Url, find_client
from deployments.cli.output import Json, print_json, print_line

app = typer.Typer()

Worker = Annotated[str, typer.Argument(help="Worker, as `atelier status --why` lists them; may be shortened.")]
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
def drain(worker: Worker, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Let a worker hand its models over and finish; no request fails."""
    _order(find_client(url, key), "drain", worker, is_on=True, as_json=as_json)


@app.command()
def undrain(worker: Worker, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Let a worker that drains have work again."""
    _order(find_client(url, key), "drain", worker, is_on=False, as_json=as_json)


def print_overrides(overrides: dict[str, Any]) -> None:
    """Print what was ordered by hand, a line for each."""
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
