"""`atelier weights …`: the external weight store from the command line."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from configs.ranks import MAX_RANKS
from deployments.console.output import (
    SHORT_HASH,
    Column,
    Json,
    Wide,
    check_plot,
    print_json,
    print_line,
    print_table,
    write_file,
)
from deployments.console.progress import progress_bar

if TYPE_CHECKING:
    from weights.operations.compaction import ModelFigures
    from weights.operations.maintenance import ExternalWeight
    from weights.operations.repair import Damage
    from weights.records.manifest import Manifest
    from weights.storage.store import WeightStore

app = typer.Typer(no_args_is_help=True, help="External weights: bring models in, look at them, write them back.")
_err = Console(stderr=True)

_LayoutName = Literal["inline", "separate", "combined"]
_DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
Model = Annotated[str, typer.Argument(help="A model of the store.")]
StorePath = Annotated[Path, typer.Option("--store", "-s", envvar="ATELIER_STORE", help="The store's folder.")]
Layout = Annotated[_LayoutName, typer.Option(help="In the model's own files, one file per tensor, or one for all.")]
WeightDir = Annotated[
    Path | None,
    typer.Option(help="Where packs are written before they are published; default: $ATELIER_WORK_PATH, or here."),
]
DEFAULT_STORE: Final = Path("~/.cache/atelier/store")

MODEL_COLUMNS: Final = (
    Column("model", "name"),
    Column("kind"),
    Column("layout"),
    Column("tensors", align="right"),
    Column("given", align="right"),
    Column("stored", align="right"),
)
TENSOR_COLUMNS: Final = (
    Column("tensor", "name"),
    Column("dtype"),
    Column("shape"),
    Column("size", align="right"),
    Column("file", only_wide=True),
    Column("offset", align="right", only_wide=True),
    Column("sha256"),
)
RANK_COLUMNS: Final = (Column("rank", align="right"), Column("size", align="right"))
DAMAGE_COLUMNS: Final = (
    Column("model", "name"),
    Column("file", "name"),
    Column("tensors", "text", only_wide=True),
    Column("problem", "text"),
)


COMPACT_COLUMNS: Final = (
    Column("model", "name"),
    Column("tensors", "text"),
    Column("plain", align="right"),
    Column("delta", align="right"),
    Column("ratio", align="right"),
    Column("bases", "text", only_wide=True),
)


@app.command()
def externalize(
    source: Annotated[
        str, typer.Argument(help="A checkpoint folder or file, a .pt2 or .onnx program, s3://… or hf://…")
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Its name; default: the source's.")] = None,
    layout: Layout = "combined",
    dtype: Annotated[_DTypeName, typer.Option(help="Cast floating tensors on the way in.")] = "auto",
    component: Annotated[str | None, typer.Option(help="One component of a pipeline only.")] = None,
    like: Annotated[
        str | None, typer.Option(help="The pipeline that a single file is of: a model of the store, or FOLDER/.")
    ] = None,
    vae: Annotated[Path | None, typer.Option(help="A VAE in the place of its own: a folder, or a file.")] = None,
    weight_dir: WeightDir = None,
    allow_torch: Annotated[bool, typer.Option("--allow-torch", help="Open .pt, .pth, .bin and .pt2 as well.")] = False,
    store: StorePath = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Bring a model into the store. Equal tensors are stored once, over all its models."""
    from weights.operations.base_pipeline import open_base
    from weights.operations.intake import import_model

    weight_store = _open(store)
    name = model or PurePosixPath(source.rstrip("/")).name.split(".")[0]
    base = open_base(Path(like) if "/" in like else like, weight_store) if like else None
    with working_folder(weight_dir) as folder, progress_bar("externalize", quiet=as_json) as progress:
        manifest = import_model(
            weight_store,
            name,
            source if "://" in source else Path(source).expanduser().resolve(),  # `repair` looks there again
            component=component,
            dtype=dtype,
            layout=layout,
            weight_dir=folder,
            allow_torch=allow_torch,
            like=base,
            parts={} if vae is None else {"vae": vae},
            progress=progress,
        )
    _print_model(weight_store, manifest, as_json)


@app.command()
def inline(
    model: Model,
    target: Annotated[Path, typer.Argument(help="A new folder, or for a program a new file.")],
    external_data: Annotated[
        bool, typer.Option("--external-data", help="An ONNX model's weights in a file beside it.")
    ] = False,
    store: StorePath = DEFAULT_STORE,
) -> None:
    """Write a model back as stock libraries read it, its weights in its own files."""
    from weights.operations.intake import write_back

    weight_store = _open(store)
    with progress_bar("inline") as progress:
        write_back(weight_store, model, target.expanduser(), external=external_data, progress=progress)
    _err.print(f"{escape(model)} is in {escape(str(target))}", soft_wrap=True)


@app.command()
def convert(
    model: Model, layout: Layout, weight_dir: WeightDir = None, store: StorePath = DEFAULT_STORE, as_json: Json = False
) -> None:
    """Publish a model in another layout."""
    from weights.operations.layouts import convert as convert_layout

    weight_store = _open(store)
    with working_folder(weight_dir) as folder, progress_bar("convert", quiet=as_json) as progress:
        manifest = convert_layout(weight_store, model, layout, folder, progress)
    _print_model(weight_store, manifest, as_json)


@app.command()
def inspect(
    model: Annotated[str | None, typer.Argument(help="Its tensors; default: all models.")] = None,
    store: StorePath = DEFAULT_STORE,
    plot: Annotated[Path | None, typer.Option(help="Draw the bytes by model and component, an SVG file.")] = None,
    ranks: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Also the bytes of each of so many ranks.")] = 1,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Show the place of every tensor (--wide: with file and offset), or the bytes of each model."""
    from weights.operations.maintenance import summarize, totals

    check_plot(plot)
    weight_store = _open(store)
    if ranks > 1 and model is None:
        raise typer.BadParameter("name the model that ranks divide", param_hint="--ranks")
    if plot is not None:
        write_file(plot, _plot_of(weight_store, model))
    if model is None:
        records = [_model_record(weight_store, manifest) for manifest in weight_store.manifests().values()]
        whole = asdict(totals(weight_store))
        if as_json:
            print_json({"models": records, **whole})
            return
        print_table(MODEL_COLUMNS, [_model_row(record) for record in records], wide=wide)
        print_line(_saved(whole))
        return
    weights = summarize(weight_store, model)
    manifest = weight_store.manifest(model)
    record = _model_record(weight_store, manifest)
    shares = _bytes_of_ranks(weight_store, manifest, ranks) if ranks > 1 else []
    if as_json:
        shown = [asdict(weight) | {"path": str(weight.path)} for weight in weights]
        print_json({**record, **({"rank_bytes": shares} if shares else {}), "weights": shown})
        return
    print_table(MODEL_COLUMNS, [_model_row(record)], wide=wide)
    for component in record["components"]:
        rows = [_tensor_row(weight, wide) for weight in weights if weight.component == component]
        print_table(TENSOR_COLUMNS, rows, wide=wide, title=component)
    if shares:
        rows = [[str(rank), decimal(nbytes)] for rank, nbytes in enumerate(shares)]
        print_table(RANK_COLUMNS, rows, title=f"weights of {ranks} ranks (tensor {ranks})")
    print_line(_saved(record))


def _bytes_of_ranks(store: WeightStore, manifest: Manifest, count: int) -> list[int]:
    """Return the bytes of weights that each of so many ranks reads. Raises BadParameter for what they cannot divide."""
    from deployments.engines.llm.models.registry import check_ranks, load_config
    from deployments.engines.llm.models.stored_slices import stored_slices
    from deployments.engines.ranks.layout import RankLayout
    from deployments.engines.records.protocol import EngineError

    component = manifest.components.get("model")
    if manifest.kind != "llm" or component is None:
        raise typer.BadParameter("ranks divide the weights of language models alone", param_hint="--ranks")
    folder = store.skeleton(manifest) / component.folder
    dtypes = {name: ref.dtype for name, ref in component.tensors.items()}
    try:
        check_ranks(load_config(folder), RankLayout(tensor=count))
        return [component.sliced(stored_slices(folder, dtypes, rank, count)).nbytes for rank in range(count)]
    except EngineError as error:
        raise typer.BadParameter(str(error), param_hint="--ranks") from None


def _plot_of(store: WeightStore, model: str | None) -> str:
    from deployments.plots.svg import store_plot
    from weights.operations.maintenance import totals

    manifests = [store.manifest(model)] if model else store.manifests().values()
    sizes = {
        manifest.model: {name: part.nbytes for name, part in manifest.components.items()} for manifest in manifests
    }
    return store_plot(sizes, _saved(asdict(totals(store, model))))


@app.command()
def verify(
    model: Annotated[str | None, typer.Argument(help="Default: all models.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also the sha256 of every tensor.")] = False,
    store: StorePath = DEFAULT_STORE,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Read everything back and list damage; exit code 1 if there is any."""
    from weights.operations.repair import verify as verify_store

    with progress_bar("verify", quiet=as_json) as progress:
        report = verify_store(_open(store), model, deep=deep, progress=progress)
    damages = report.damages
    summary = f"{report.num_models} models, {report.num_extents} extents, {decimal(report.nbytes)}: "
    summary += f"{len(damages)} damaged" if damages else "sound"
    _print_report(asdict(report), DAMAGE_COLUMNS, _damage_rows(damages), summary, as_json, wide)
    if damages:
        raise typer.Exit(1)


@app.command()
def repair(
    models: Annotated[list[str] | None, typer.Argument(help="Default: all models.")] = None,
    allow_torch: Annotated[
        bool, typer.Option("--allow-torch", help="Open .pt, .pth and .bin sources as well.")
    ] = False,
    weight_dir: WeightDir = None,
    store: StorePath = DEFAULT_STORE,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Rewrite damaged extents from other models or the source; exit code 1 if damage is left."""
    from weights.operations.repair import repair as repair_store

    with working_folder(weight_dir) as folder, progress_bar("repair", quiet=as_json) as progress:
        report = repair_store(_open(store), models or (), allow_torch=allow_torch, weight_dir=folder, progress=progress)
    summary = f"{report.num_models} models: {len(report.repaired)} damages repaired, {len(report.damages)} left"
    _print_report(asdict(report), DAMAGE_COLUMNS, _damage_rows(report.damages), summary, as_json, wide)
    if report.damages:
        raise typer.Exit(1)


@app.command()
def index(store: StorePath = DEFAULT_STORE, as_json: Json = False) -> None:
    """Make the store's index again from its manifests, and write it as meta.json for other programs."""
    from weights.operations.maintenance import rebuild_index

    weight_store = _open(store)
    num_tensors = rebuild_index(weight_store)
    record = {"num_tensors": num_tensors, "meta": str(weight_store.meta_file)}
    _print_report(record, (), [], f"{num_tensors} tensors, listed in {weight_store.meta_file}", as_json)


@app.command()
def compact(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the savings.")] = False,
    keep_plain: Annotated[
        bool, typer.Option("--keep-plain", help="Keep the plain bytes beside, for loads that are faster so.")
    ] = False,
    weight_dir: WeightDir = None,
    store: StorePath = DEFAULT_STORE,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Store fine-tunes as lossless differences from a model of their family; exit code 1 when some could not be."""
    from weights.operations.compaction import compact as compact_store

    with working_folder(weight_dir) as folder, progress_bar("compact", quiet=as_json) as progress:
        report = compact_store(
            _open(store), keep_plain=keep_plain, dry_run=dry_run, weight_dir=folder, progress=progress
        )
    saved = report.before_bytes - report.after_bytes
    summary = f"{decimal(report.before_bytes)} {'would become' if dry_run else 'became'} {decimal(report.after_bytes)}"
    summary += "" if dry_run or saved <= 0 else f"; `gc` frees {decimal(saved)}"
    _print_report(asdict(report), COMPACT_COLUMNS, list(_compact_rows(report.models)), summary, as_json, wide)
    for problem in report.problems:
        _err.print(escape(problem), soft_wrap=True)
    if report.problems:
        raise typer.Exit(1)


@app.command()
def expand(
    models: Annotated[list[str] | None, typer.Argument(help="Models of the store.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All models.")] = False,
    weight_dir: WeightDir = None,
    store: StorePath = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Store models plain again that `compact` made deltas of."""
    from weights.operations.compaction import expand as expand_models

    if bool(models) == everything:
        raise typer.BadParameter("name models, or --all for all of them")
    weight_store = _open(store)
    with working_folder(weight_dir) as folder, progress_bar("expand", quiet=as_json) as progress:
        expanded = expand_models(weight_store, models or weight_store.model_names(), folder, progress)
    rows = [[model] for model in expanded]
    _print_report({"expanded": expanded}, (Column("expanded", "name"),), rows, f"{len(rows)} models", as_json)


@app.command()
def load(model: Model, store: StorePath = DEFAULT_STORE, as_json: Json = False) -> None:
    """Read a model into this process's memory and print the time of each stage."""
    from weights.loading.loader import load_model
    from weights.loading.provider import LocalExtents

    weight_store = _open(store)
    with progress_bar("load", quiet=as_json) as progress:
        extents = LocalExtents(weight_store.packs, progress=progress)
        start_s = time.perf_counter()
        load_model(weight_store.manifest(model), extents)
        elapsed_s = time.perf_counter() - start_s
    report = extents.last_report
    assert report is not None
    report = report.with_stage("attach", report.nbytes, elapsed_s - report.wall_s)
    record = report.as_record()
    stages = [
        [name, decimal(stage.nbytes), f"{stage.busy_s:.3f}", f"{stage.elapsed_s:.3f}", f"{stage.gbps:.2f}"]
        for name, stage in report.stages.items()
    ]
    columns = [Column("stage"), *(Column(name, align="right") for name in ("read", "busy s", "elapsed s", "GB/s"))]
    peak = f", {record['share_of_peak']:.0%} of the medium's peak" if record["share_of_peak"] else ""
    summary = f"{decimal(report.nbytes)} in {report.wall_s:.2f} s: {report.gbps:.2f} GB/s{peak}; "
    summary += f"limited by {report.limiting_stage}" + (f"\n{report.advice}" if report.advice else "")
    _print_report(record, columns, stages, summary, as_json)


@app.command()
def gc(
    grace_s: Annotated[
        float, typer.Option(min=0, help="Keep what runs before have not seen unneeded for so many seconds.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    store: StorePath = DEFAULT_STORE,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Remove bytes that no model of the store needs, and results of jobs and files of workflows whose time is over."""
    from cluster.jobs.disk import collect_results
    from deployments.ingress.comfy.files import collect_files
    from weights.operations.maintenance import gc as collect

    opened = _open(store)
    report = collect(opened, grace_s=grace_s, dry_run=dry_run)
    now_s = time.time()
    results, num_bytes = collect_results(opened.path, now_s, dry_run=dry_run)
    files, more_bytes = collect_files(opened.path, now_s, dry_run=dry_run)
    report = replace(report, freed_bytes=report.freed_bytes + num_bytes + more_bytes)
    removed = [str(path) for path in (*report.removed, *(path.relative_to(opened.path) for path in (*results, *files)))]
    summary = f"{decimal(report.freed_bytes)} {'would be ' if dry_run else ''}freed"
    rows = [[path] for path in removed]
    _print_report(asdict(report) | {"removed": removed}, (Column("removed", "name"),), rows, summary, as_json, wide)


@app.command()
def remove(model: Model, store: StorePath = DEFAULT_STORE) -> None:
    """Remove a model from the store; `gc` then frees its bytes."""
    from weights.operations.maintenance import remove_model

    remove_model(_open(store), model)


def _open(path: Path) -> WeightStore:
    from weights.storage.store import WeightStore

    return WeightStore(path.expanduser())


@contextlib.contextmanager
def working_folder(weight_dir: Path | None) -> Iterator[Path]:
    """Open the folder that packs are written in before they are published."""
    from weights.storage.staging import opened_weight_dir

    with opened_weight_dir(weight_dir, os.environ, Path.cwd(), os.getpid(), uuid.uuid4().hex[:12]) as folder:
        yield folder


def _model_record(store: WeightStore, manifest: Manifest) -> dict[str, Any]:
    from weights.operations.maintenance import totals

    record = {"model": manifest.model, "kind": manifest.kind, "layout": manifest.layout}
    return record | {"components": list(manifest.components), **asdict(totals(store, manifest.model))}


def _model_row(record: dict[str, Any]) -> list[str]:
    return [
        record["model"],
        record["kind"],
        record["layout"],
        str(record["num_tensors"]),
        decimal(record["given_bytes"]),
        decimal(record["stored_bytes"]),
    ]


def _tensor_row(weight: ExternalWeight, wide: bool) -> list[str]:
    return [
        weight.name,
        weight.dtype,
        " ".join(map(str, weight.shape)),
        decimal(weight.nbytes),
        f"{weight.path} (delta)" if weight.is_delta else str(weight.path),
        str(weight.offset),
        weight.id if wide else weight.id[:SHORT_HASH],
    ]


def _damage_rows(damages: Iterable[Damage]) -> list[list[str]]:
    return [[damage.model, damage.file, " ".join(damage.tensors), damage.problem] for damage in damages]


def _compact_rows(models: Iterable[ModelFigures]) -> Iterator[list[str]]:
    """Yield a row for each model, and below it one for each kind of its tensors."""
    for model in models:
        bases = " ".join(model.bases)
        yield [model.model, "all", *_ratio(model.plain_bytes, model.delta_bytes), bases]
        for kind in model.kinds:
            yield ["", kind.kind, *_ratio(kind.plain_bytes, kind.delta_bytes), bases]


def _ratio(plain_bytes: int, delta_bytes: int) -> tuple[str, str, str]:
    return decimal(plain_bytes), decimal(delta_bytes), f"{delta_bytes / plain_bytes:.2f}" if plain_bytes else ""


def _saved(totals: dict[str, Any]) -> str:
    given, stored = totals["given_bytes"], totals["stored_bytes"]
    share = f" ({stored / given:.2f} of it)" if given else ""
    return f"{decimal(given)} given, {decimal(stored)} stored{share}"


def _print_model(store: WeightStore, manifest: Manifest, as_json: bool) -> None:
    record = _model_record(store, manifest)
    if as_json:
        print_json(record)
    else:
        print_table(MODEL_COLUMNS, [_model_row(record)])


def _print_report(
    record: dict[str, Any],
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    summary: str,
    as_json: bool,
    wide: bool = False,
) -> None:
    if as_json:
        print_json(record)
        return
    print_table(columns, rows, wide=wide)
    print_line(summary)
