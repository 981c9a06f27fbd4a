"""`atelier keys …`: the API keys of a cluster. A running one follows at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from configs.errors import ConfigError
from deployments.cli.cluster import DEFAULT_CONFIG
from deployments.console.output import SHORT_HASH, Column, Json, OptionError, Wide, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="API keys: make, list and revoke them.")

Name = Annotated[str, typer.Argument(help="The owner's name: one word.")]
ConfigPath = Annotated[Path, typer.Option("--config", help="Cluster YAML, whose access.keys_file is meant.")]
FilePath = Annotated[Path | None, typer.Option("--file", help="The keys file itself, without a cluster YAML.")]

COLUMNS: Final = (
    Column("key", "name"),
    Column("role"),
    Column("tenant", "name"),
    Column("requests/s", align="right"),
    Column("at once", align="right"),
    Column("priority", align="right"),
    Column("made"),
    Column("sha256", only_wide=True),
)


@app.command()
def add(
    name: Name,
    admin: Annotated[bool, typer.Option("--admin", help="Allow the operators' routes, too.")] = False,
    tenant: Annotated[
        str | None, typer.Option(help="The tenant whose share its requests take; default: its own.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second; default: the config's.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests at once; default: the config's.")] = None,
    max_priority: Annotated[
        int | None, typer.Option(help="The most urgent priority of its requests, 1 of all; default: the config's.")
    ] = None,
    config: ConfigPath = DEFAULT_CONFIG,
    file: FilePath = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it, this once: only its hash is kept."""
    from pydantic import ValidationError

    from deployments.ingress.access.keys import KeyEntry, add_key, hash_of, new_key

    path = _keys_file(config, file)
    key = new_key()
    try:
        entry = KeyEntry(
            name=name,
            sha256=hash_of(key),
            admin=admin,
            tenant=tenant,
            requests_per_s=rate,
            max_concurrent=concurrency,
            max_priority=max_priority,
            created=time.strftime("%Y-%m-%d", time.gmtime()),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise OptionError(f"{first['loc'][0]}: {first['msg']}, got {first['input']!r}") from None
    add_key(path, entry)
    if as_json:
        print_json({"name": name, "key": key, "file": str(path)})
    else:
        sys.stdout.write(key + "\n")
        sys.stderr.write(f"key {name!r} is in {path}; it is shown only now\n")


@app.command("list")
def list_keys(
    config: ConfigPath = DEFAULT_CONFIG, file: FilePath = None, wide: Wide = False, as_json: Json = False
) -> None:
    """List the keys. Wrong lines are named, and have no effect; then the exit code is 1."""
    from deployments.ingress.access.keys import described, read_key_store

    path = _keys_file(config, file)
    keys = read_key_store(path)
    entries = list(keys.entries.values())
    problems = [described(path, problem) for problem in keys.problems]
    if as_json:
        print_json({"keys": [entry.model_dump() for entry in entries], "problems": problems})
    else:
        rows = [
            [
                entry.name,
                "admin" if entry.admin else "user",
                entry.share,
                "" if entry.requests_per_s is None else f"{entry.requests_per_s:g}",
                "" if entry.max_concurrent is None else str(entry.max_concurrent),
                "" if entry.max_priority is None else str(entry.max_priority),
                entry.created or "",
                entry.sha256[:SHORT_HASH],
            ]
            for entry in entries
        ]
        print_table(COLUMNS, rows, wide=wide)
        for problem in problems:
            sys.stderr.write(problem + "\n")
    if problems:
        raise typer.Exit(1)


@app.command()
def revoke(name: Name, config: ConfigPath = DEFAULT_CONFIG, file: FilePath = None) -> None:
    """Let a key hold no more. Requests that run finish; the next one is refused, also on an open stream."""
    from deployments.ingress.access.keys import revoke_key

    path = _keys_file(config, file)
    revoke_key(path, name)
    sys.stdout.write(f"key {name!r} is revoked\n")


def _keys_file(config: Path, file: Path | None) -> Path:
    """Return the keys file of the options. Raises ConfigError."""
    if file is not None:
        return file.expanduser().absolute()
    from configs.loading import load_cluster_config

    path = load_cluster_config(config).access.keys_file
    if path is None:
        raise ConfigError(f"{config}: no keys file; set `access: {{keys_file: FILE}}`, or say --file FILE")
    return path
