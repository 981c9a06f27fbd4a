"""`atelier apply`: a running cluster takes its changed config."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from deployments.cli.cluster import Address, Insecure, Port, clusters_at, load_for_start
from deployments.console.output import Column, Json, print_json, print_line, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from configs.changes import Change

app = typer.Typer()

COLUMNS: Final = (Column("key", "name"), Column("now", "text"), Column("then", "text"), Column("what happens", "text"))
MAX_VALUE: Final = 60  # characters


@app.command()
def apply(
    config: Annotated[Path, typer.Argument(help="Cluster YAML, changed since the cluster was started with it.")],
    plan: Annotated[bool, typer.Option("--plan", help="Print the changes without making them.")] = False,
    port: Port = None,
    insecure: Insecure = False,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Apply a changed config to a running cluster: only replicas that a change concerns are replaced."""
    from cluster.records.errors import SessionError
    from configs.changes import BEYOND, Concern, changes

    wanted = load_for_start(config, port, insecure)
    at = address or wanted.ray.address or "auto"
    names, problem = clusters_at(at)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it tells on the terminal of its connections
    if wanted.name not in names:
        there = f"there are {', '.join(map(repr, names))}; another name is another cluster" if names else problem
        raise SessionError(f"no cluster {wanted.name!r} is up: {there}")
    from deployments.cli.applying import carry_out, running_config

    registry, running = running_config(wanted)
    found = changes(running, wanted)
    of_another = [change.key for change in found if Concern.IDENTITY in change.concerns]
    beyond = of_another or [change.key for change in found if BEYOND & {*change.concerns}]
    if not as_json:
        _print_plan(wanted.name, found)
    problems: Sequence[str] = ()
    if found and not (plan or beyond):
        problems = carry_out(registry, running, wanted, (lambda line: None) if as_json else print_line)
    if as_json:
        print_json({"cluster": wanted.name, "changes": list(map(asdict, found)), "problems": problems})
    if beyond and not plan:
        why = "another value makes it another cluster" if of_another else "no running cluster takes another value"
        raise SessionError(
            f"{', '.join(beyond)}: {why}, and nothing was changed; `atelier down {wanted.name}`, then `atelier up "
            f"{config}`"
        )
    if problems:
        raise SessionError("\n".join(problems))


def _print_plan(name: str, found: Sequence[Change]) -> None:
    from configs.changes import DONE

    if not found:
        print_line(f"cluster {name!r} follows this config already: nothing to change")
    rows = [
        [one.key, _shown(one.before), _shown(one.after), "; ".join(DONE[concern] for concern in one.concerns)]
        for one in found
    ]
    print_table(COLUMNS, rows)


def _shown(value: Any) -> str:
    """Return a value on one short line; of a whole entry its source."""
    if isinstance(value, dict) and "id" in value:
        value = value.get("path", value["id"])
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"
