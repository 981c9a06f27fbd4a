"""The commands that change what a running cluster serves and keeps in memory."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deployments.cli.options import Json, Url, cluster_client

app = typer.Typer()
out = Console()

Model = Annotated[str, typer.Argument(help="Model id.")]


class Tier(StrEnum):
    host = "host"
    device = "device"


@app.command()
def register(
    path: Annotated[str, typer.Argument(help="Checkpoint inside of the cluster's model_roots, or s3:// URL.")],
    model: Annotated[str, typer.Option("--id", help="Under this name.")],
    base: Annotated[list[str] | None, typer.Option(help="It is a LoRA for this model; may be repeated.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast floating tensors: float32, bfloat16, float16.")] = None,
    component: Annotated[str | None, typer.Option(help="Only this component of a pipeline.")] = None,
    description: Annotated[str | None, typer.Option(help="For the listing.")] = None,
    wait: Annotated[bool, typer.Option(help="Return when it is ready, or is known to be unusable.")] = True,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Serve one more model or LoRA, or another version of one, without a restart."""
    given = {"base": base or None, "dtype": dtype, "component": component, "description": description}
    entry = {"id": model, "path": _located(path)} | {key: value for key, value in given.items() if value is not None}
    client = cluster_client(url)
    with Console(stderr=True).status(f"registering {model!r}"):
        found = client.register(entry, wait=wait)
    _say(found, f"{model} is {found['state']} ({found['kind'] or 'kind not known yet'})", as_json)


@app.command()
def unregister(
    model: Model,
    purge: Annotated[bool, typer.Option("--purge", help="Take it out of the store, too.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Serve a model no more. Requests that run with it finish."""
    answer = cluster_client(url).unregister(model, purge=purge)
    orphans = ", ".join(answer["orphans"])
    _say(answer, f"{model} is served no more" + (f"; adapters without it: {orphans}" if orphans else ""), as_json)


@app.command()
def prefetch(
    model: Model,
    tier: Annotated[Tier, typer.Option(help="host: memory of every node; device: every worker, too.")] = Tier.host,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Bring a model nearer before it is asked for, into room that nothing else needs."""
    _outcome(cluster_client(url).prefetch(model, tier.value), f"{model} is prefetched", as_json)


@app.command()
def pin(model: Model, url: Url = None, as_json: Json = False) -> None:
    """Keep a model in memory where it is resident."""
    _outcome(cluster_client(url).pin(model), f"{model} is pinned", as_json)


@app.command()
def unpin(model: Model, url: Url = None, as_json: Json = False) -> None:
    """Let a model be evicted again."""
    _outcome(cluster_client(url).pin(model, pinned=False), f"{model} may be evicted", as_json)


def _located(path: str) -> str:
    """The cluster does not know this process's folder."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _outcome(answer: dict[str, Any], text: str, as_json: bool) -> None:
    """Exit code 1 when a node or a worker could not do it."""
    problems = {f"node {node[:12]}": problem for node, problem in answer["nodes"].items()}
    for role, name in (("workers", "worker"), ("text_encoders", "text encoder")):
        problems |= {f"{name} {number}": problem for number, problem in enumerate(answer.get(role, []))}
    failed = [f"{where}: {problem}" for where, problem in problems.items() if problem]
    _say(answer, "\n".join([f"{text} ({len(problems) - len(failed)} of {len(problems)})", *failed]), as_json)
    if failed:
        raise typer.Exit(1)


def _say(answer: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        out.print(text, markup=False, highlight=False, soft_wrap=True)
