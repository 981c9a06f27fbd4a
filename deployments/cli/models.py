"""The commands that show and change what a running cluster serves and keeps in memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console

from configs.hub_names import hub_hint
from deployments.console.client import Client, ClientError, Key, Url, find_client
from deployments.console.output import SHORT_HASH, Column, Json, OptionError, Wide, print_json, print_table, size
from deployments.console.progress import followed, progress_bar

app = typer.Typer()

Model = Annotated[str, typer.Argument(help="Model id.")]
OfWorker = Annotated[
    str | None, typer.Option("--worker", help="This worker, as `atelier status --why` lists them; may be shortened.")
]
MODEL_COLUMNS: Final = (
    Column("model", "name"),
    Column("kind"),
    Column("state"),
    Column("size", align="right"),
    Column("description", "text"),
)

TABLE: Final = Path(__file__).with_name("supported.json")
_COLUMNS: Final = (Column("class"), Column("kind"), Column("way"), Column("compared"))
_REFUSED: Final = "refused: "


class Tier(StrEnum):
    """The memory that a model is prefetched into."""

    host = "host"
    device = "device"


@app.command()
def models(
    supported: Annotated[
        bool, typer.Option("--supported", help="The classes that are served at all, and how; asks no cluster.")
    ] = False,
    url: Url = None,
    key: Key = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """List the models and adapters that the cluster serves."""
    if supported:
        if as_json:
            print_json({"classes": [row._asdict() for row in read_table()]})
        else:
            _print_supported(wide=wide)
        return
    found = find_client(url, key).models()
    if as_json:
        print_json({"models": found})
    else:
        print_models(found, wide=wide)


@app.command()
def register(
    path: Annotated[str, typer.Argument(help="Checkpoint inside of the cluster's model_roots, or s3:// or hf:// URL.")],
    model: Annotated[str, typer.Option("--id", help="Under this name.")],
    base: Annotated[
        list[str] | None, typer.Option(help="It is an adapter (LoRA, ControlNet, ...) for this model; may be repeated.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast floating tensors: float32, bfloat16, float16.")] = None,
    component: Annotated[str | None, typer.Option(help="Only this component of a pipeline.")] = None,
    like: Annotated[
        str | None, typer.Option(help="The pipeline that a single file is of: a model, or FOLDER/.")
    ] = None,
    vae: Annotated[str | None, typer.Option(help="A VAE in the place of its own: a folder, or a file.")] = None,
    description: Annotated[str | None, typer.Option(help="For the listing.")] = None,
    wait: Annotated[bool, typer.Option(help="Return when it is ready, or is known to be unusable.")] = True,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Serve one more model or adapter, or another version of one, without a restart. A file that ends with .json is a
    workflow of ComfyUI: it becomes a pipeline whose inputs are the nodes with a title of one word."""
    given = {"base": base or None, "dtype": dtype, "component": component, "description": description}
    if path.endswith(".json") and not path.endswith(".index.json") and "://" not in path:
        of_models = {name for name, value in (given | {"like": like, "vae": vae}).items() if value is not None}
        if of_models := of_models - {"description"}:
            raise OptionError(f"--{min(of_models)}: {path} is a workflow, which has none")
        _register_workflow(Path(path), model, description, find_client(url, key), as_json)
        return
    if like is not None:
        given["like"] = _located(like) if "/" in like else like
    if vae is not None:
        given["vae"] = _located(vae)
    entry = {"id": model, "path": _located(path)} | {key: value for key, value in given.items() if value is not None}
    client = find_client(url, key)
    with (
        progress_bar(f"registering {model}", quiet=as_json) as on_progress,
        followed(lambda: client.import_progress(model), on_progress),
    ):
        try:
            found = client.register(entry, wait=wait)
        except ClientError as error:
            meant = "" if Path(path).expanduser().exists() else hub_hint(path)
            raise ClientError(f"{error}; a model of the hub is {meant}" if meant else str(error)) from None
    _print_answer(found, f"{model} is {found['state']} ({found['kind'] or 'kind not known yet'})", as_json)


def _register_workflow(file: Path, id_: str, description: str | None, client: Client, as_json: bool) -> None:
    from deployments.console.workflows import read_document

    about = {} if description is None else {"description": description}
    found = client.register_workflow({"id": id_, "workflow": read_document(file)} | about)
    ports = "; ".join(f"{side}: {_listed(found[side])}" for side in ("inputs", "outputs"))
    _print_answer(found, f"{id_} is {found['state']} (pipeline); {ports}", as_json)


def _listed(types: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({type_})" for name, type_ in types.items())


@app.command()
def unregister(
    model: Model,
    purge: Annotated[bool, typer.Option("--purge", help="Take it out of the store, too.")] = False,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Serve a model no more. Requests that run with it finish."""
    answer = find_client(url, key).unregister(model, purge=purge)
    orphans = ", ".join(answer["orphans"])
    text = f"{model} is served no more" + (f"; adapters without it: {orphans}" if orphans else "")
    _print_answer(answer, text, as_json)


@app.command()
def prefetch(
    model: Model,
    tier: Annotated[Tier, typer.Option(help="host: memory of every node; device: every worker, too.")] = Tier.host,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Bring a model nearer before it is asked for, into room that nothing else needs."""
    _print_outcome(find_client(url, key).prefetch(model, tier.value), f"{model} is prefetched", as_json)


@app.command()
def pin(model: Model, worker: OfWorker = None, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Keep a model in memory where it is resident, or bring it to a worker and keep it there."""
    if worker is not None:
        answer = find_client(url, key).pin_to(worker, model)
        _print_answer(answer, f"{model} is pinned to worker {worker}", as_json)
        return
    _print_outcome(find_client(url, key).pin(model), f"{model} is pinned", as_json)


@app.command()
def unpin(model: Model, worker: OfWorker = None, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Let a model be evicted again, or let a worker switch away from it."""
    if worker is not None:
        answer = find_client(url, key).pin_to(worker, model, pinned=False)
        _print_answer(answer, f"{model} is pinned to worker {worker} no longer", as_json)
        return
    _print_outcome(find_client(url, key).pin(model, pinned=False), f"{model} may be evicted", as_json)


def print_models(models: list[dict[str, Any]], *, wide: bool = False, title: str = "") -> None:
    """Print models in the form of /v1/models or /admin/cluster."""
    rows = []
    for model in models:
        nbytes = model.get("bytes", model.get("nbytes", 0))
        about = model["error"] or model["description"] or (f"for {', '.join(model['base'])}" if model["base"] else "")
        kind = f"{model['kind'] or ''}{', sees images' if model.get('sees') else ''}"
        rows.append([model["id"], kind, model["state"].replace("_", " "), size(nbytes), about])
    print_table(MODEL_COLUMNS, rows, wide=wide, title=title)


def _located(path: str) -> str:
    """Return an absolute path: the cluster does not know this process's folder."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _print_outcome(answer: dict[str, Any], text: str, as_json: bool) -> None:
    """Exit with code 1 if a node or a replica failed."""
    problems = {f"node {node[:SHORT_HASH]}": problem for node, problem in answer["nodes"].items()}
    for role, name in (("workers", "worker"), ("text_encoders", "text encoder")):
        problems |= {f"{name} {number}": problem for number, problem in enumerate(answer.get(role, []))}
    failed = [f"{where}: {problem}" for where, problem in problems.items() if problem]
    text = "\n".join([f"{text} ({len(problems) - len(failed)} of {len(problems)})", *failed])
    _print_answer(answer, text, as_json)
    if failed:
        raise typer.Exit(1)


def _print_answer(answer: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        Console().print(text, markup=False, highlight=False, soft_wrap=True)


class SupportedClass(NamedTuple):
    """A class of a library; `how` it is served, or "refused: " and why; what it `makes`, "" if nothing.

    `is_equal`: a tiny model of it is compared with its own library by the long tests.
    """

    kind: str
    class_name: str
    how: str
    makes: str
    is_equal: bool

    @property
    def is_refused(self) -> bool:
        return self.how.startswith(_REFUSED)

    @property
    def why(self) -> str:
        """Return why it is refused."""
        return self.how.removeprefix(_REFUSED)


def read_table() -> list[SupportedClass]:
    """Return the rows of the table."""
    return [SupportedClass(*row) for row in json.loads(TABLE.read_text(encoding="utf-8"))]


def _print_supported(*, wide: bool = False) -> None:
    """Print all classes and how each is served."""
    rows = read_table()
    cells = [[row.class_name, row.kind, row.how, "equal" if row.is_equal else ""] for row in rows]
    print_table(_COLUMNS, cells, wide=wide, title=_counts(rows))


def _counts(rows: list[SupportedClass]) -> str:
    served = Counter(row.kind for row in rows if not row.is_refused)
    return ", ".join(f"{count} {kind}s" for kind, count in served.items()) + " served"
