"""`atelier run`: serves models without a config file; it writes one that fits the models and this machine."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml
from rich.console import Console

from configs.errors import Problem
from configs.hub_names import hub_hint
from deployments.cli.cluster import Insecure, Port, start_attached
from deployments.console.output import OptionError
from deployments.console.progress import progress_bar
from deployments.fitted_config import Machine, fitted_config, model_id, summary
from weights.platform.private_folder import private_folder, state_folder

app = typer.Typer()
_out = Console()

NAME: Final = "run"
DRAFT: Final = "run-draft"  # what is checked: the file of a cluster that is up stays as it is
_HEADER: Final = "# Made by `atelier run`. `atelier up` of a copy of it starts the same cluster.\n"
_DISPLAYS: Final = ("DISPLAY", "WAYLAND_DISPLAY")


@dataclass(frozen=True, slots=True)
class Named:
    """A model or adapter of the command line: its id, where it is, and where it lies on this machine's disk."""

    id: str
    source: str
    path: Path
    base: tuple[str, ...] = ()

    def entry(self, *, local: bool) -> dict[str, Any]:
        """Return the entry of a config, with the path on this machine or the named source."""
        place = str(self.path) if local or "://" not in self.source else self.source
        return {"id": self.id, "path": place, **({"base": list(self.base)} if self.base else {})}


@app.command()
def run(
    sources: Annotated[
        list[str], typer.Argument(help="Folders, files, hf://organization/name[/file], s3://bucket/prefix.")
    ],
    lora: Annotated[
        list[str] | None,
        typer.Option(help="A LoRA or another adapter; MODEL=SOURCE where there are several models. Repeatable."),
    ] = None,
    port: Port = None,
    insecure: Insecure = False,
    store: Annotated[Path | None, typer.Option(help="Folder of the store; default: ~/.cache/atelier/store.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the config, and start nothing. Models are fetched for it.")
    ] = False,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    timeout_s: Annotated[float | None, typer.Option("--timeout", min=1.0, help="As that of `up`.")] = None,
) -> None:
    """Fetch models, fit a config to them and this machine, start the cluster and open its page."""
    options = {"store": {"path": str(store.expanduser().resolve())}} if store else {}
    models, adapters = _fetch_models(sources, lora or [], options)
    document = {"name": NAME, **options, **_fitted(models, adapters, options)}
    text = _HEADER + yaml.safe_dump(document, sort_keys=False)
    if print_config:
        sys.stdout.write(text)
        return
    _out.print(summary([model.id for model in models], document), markup=False, highlight=False, soft_wrap=True)
    config = _write_config(NAME, text)
    _out.print(f"config: {config}", markup=False, highlight=False, soft_wrap=True)
    has_display = sys.stdout.isatty() and any(os.environ.get(name) for name in _DISPLAYS)
    start_attached(config, port, insecure, timeout_s, webbrowser.open if open_page and has_display else None)


def _fetch_models(
    sources: Sequence[str], loras: Sequence[str], options: Mapping[str, Any]
) -> tuple[list[Named], list[Named]]:
    """Return the command line's models and adapters, fetched. Raises OptionError, and StoreError for a failed fetch."""
    models: list[Named] = []
    for source in sources:
        _check(source)
        taken = [model.id for model in models]
        models.append(Named(model_id(source, taken), source, _fetched(source, options)))
    adapters: list[Named] = []
    for lora in loras:
        base, source = _base_of(lora, [model.id for model in models])
        _check(source)
        taken = [one.id for one in (*models, *adapters)]
        adapters.append(Named(model_id(source, taken), source, _fetched(source, options), (base,)))
    return models, adapters


def _base_of(lora: str, ids: Sequence[str]) -> tuple[str, str]:
    """Return the base model of an adapter, and the adapter's source. Raises OptionError if the model is unclear."""
    first, is_named, rest = lora.partition("=")
    if is_named and first in ids:
        return first, rest
    if len(ids) == 1 and (not is_named or "/" in first or Path(lora).exists()):
        return ids[0], lora
    raise OptionError(f"--lora {lora}: say for which model, as --lora MODEL=SOURCE (models: {', '.join(ids)})")


def _check(source: str) -> None:
    """Raise OptionError for a source that is neither a path nor a known URL, with a near name."""
    scheme, is_url, _ = source.partition("://")
    if (is_url and scheme in ("hf", "s3")) or (not is_url and Path(source).expanduser().exists()):
        return
    hint = f"; a model of the hub is {meant}" if (meant := hub_hint(source)) else ""
    raise OptionError(f"{source}: {'expected a path, hf:// or s3://' if is_url else 'no such folder or file'}{hint}")


def _fetched(source: str, options: Mapping[str, Any]) -> Path:
    """Return the local path of a source, fetched if it is remote. Raises StoreError."""
    if "://" not in source:
        return Path(source).expanduser().resolve()
    from configs.cluster import StoreConfig
    from weights.sources.mirrors import SOURCES_FOLDER
    from weights.sources.object_storage import localized

    folder = StoreConfig(**options.get("store", {})).path.expanduser() / SOURCES_FOLDER
    with progress_bar(f"fetching {source}") as progress, localized(source, folder, progress=progress) as local:
        return local.path


def _fitted(models: Sequence[Named], adapters: Sequence[Named], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's sections. Raises ConfigFileError for models that cannot be served here."""
    from deployments.preflight import check_config

    machine, nbytes = _machine(), dict.fromkeys((one.id for one in (*models, *adapters)), 0)
    local = {
        "models": [one.entry(local=True) for one in models],
        "adapters": [one.entry(local=True) for one in adapters],
    }
    # Headers say how large the models are, so it is checked twice: with budgets for nothing, and with theirs.
    for _ in range(2):
        draft = _write_config(DRAFT, yaml.safe_dump({"name": NAME, **options, **fitted_config(local, nbytes, machine)}))
        _, read, problems = check_config(draft)
        nbytes |= {id_: one.record.nbytes for id_, one in read.items()}
    if problems:
        raise OptionError("\n".join(map(_text_of, problems)))
    named = {
        "models": [one.entry(local=False) for one in models],
        "adapters": [one.entry(local=False) for one in adapters],
    }
    return fitted_config(named, nbytes, machine)


def _text_of(problem: Problem) -> str:
    """Return a problem of the draft without its place there, for nobody wrote that file."""
    section, _, _ = problem.key.partition(".")
    return problem.text if section in ("models", "adapters") else f"{problem.key}: {problem.text}"


def _machine() -> Machine:
    import psutil
    import torch

    from cluster.ray_seam.ray_files import SHARED_MEMORY

    memory_bytes = psutil.virtual_memory().total
    shared_bytes = psutil.disk_usage(SHARED_MEMORY).total if os.path.isdir(SHARED_MEMORY) else memory_bytes
    cards = range(torch.cuda.device_count())
    card_bytes = [torch.cuda.get_device_properties(card).total_memory for card in cards]
    return Machine(os.cpu_count() or 1, memory_bytes, shared_bytes, card_bytes)


def _write_config(name: str, text: str) -> Path:
    """Write a config to a permanent place, for `atelier apply`, and return its path."""
    file = private_folder(state_folder()) / f"{name}.yaml"
    file.write_text(text)
    return file
