"""`atelier inspect …`: what a model does when it runs, told without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.filesize import decimal

from deployments.cli.weights import DEFAULT_STORE, StorePath
from deployments.console.output import (
    Column,
    Json,
    OptionError,
    Wide,
    check_plot,
    print_json,
    print_line,
    print_table,
    write_file,
)

if TYPE_CHECKING:
    from deployments.engines.graph.recording import Recording
    from weights.records.manifest import Manifest
    from weights.storage.store import WeightStore

app = typer.Typer(no_args_is_help=True, help="What a model does when it runs.")
MAX_SHOWN: Final = 20
NODE_COLUMNS: Final = (
    Column("node", align="right"),
    Column("layer", "name"),
    Column("operation", "text"),
    Column("makes", align="right"),
    Column("until", align="right", only_wide=True),
    Column("place", align="right", only_wide=True),
)


@app.callback()
def _group() -> None:
    """Keep the command's name, of a group that has one only."""


@app.command()
def graph(
    model: Annotated[str, typer.Argument(help="An image model of the store.")],
    part: Annotated[
        Literal["denoiser", "vae"], typer.Option(help="What runs: a denoise step, or a decode.")
    ] = "denoiser",
    width: Annotated[int | None, typer.Option(min=8, max=8192, help="Default: the pipeline's own.")] = None,
    height: Annotated[int | None, typer.Option(min=8, max=8192, help="Default: the width.")] = None,
    tokens: Annotated[int, typer.Option(min=1, max=8192, help="Tokens of the prompt.")] = 77,
    rows: Annotated[int, typer.Option(min=1, max=256, help="Images at once.")] = 1,
    lacks: Annotated[
        list[str], typer.Option(help="An operation that the device lacks, such as native_layer_norm; repeatable.")
    ] = [],  # noqa: B006
    plot: Annotated[Path | None, typer.Option(help="Draw the planned memory over time, an SVG file.")] = None,
    store: StorePath = DEFAULT_STORE,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Record a forward without weights: its operations, the memory that it takes, and the plan of its buffers.

    Lists the operations that make the largest buffers; all of them with --wide.
    """
    from infra.offline.inspecting_plots import arena_plot
    from weights.memory.lifetimes import place
    from weights.storage.store import WeightStore

    check_plot(plot)
    weight_store = WeightStore(store.expanduser())
    manifest = weight_store.manifest(model)
    found, asked = _recorded(weight_store, manifest, part, (height or width, width), tokens, rows)
    plan = place(found.lifetimes())
    record: dict[str, Any] = {
        "model": model,
        "part": part,
        **asked,
        "num_nodes": len(found.nodes),
        "num_buffers": len(found.buffers),
        "weights_bytes": _weights_bytes(manifest, part),
        "eager_bytes": found.eager_peak(),
        "live_bytes": plan.live_bytes,
        "plan_bytes": plan.nbytes,
    }
    if lacks:
        record["splits"] = _splits(found, lacks)
    nodes = _node_records(found, plan.offsets)
    if plot is not None:
        write_file(plot, arena_plot(record, nodes))
    if as_json:
        print_json({**record, "nodes": nodes})
        return
    shown = nodes if wide else sorted(nodes, key=lambda node: -node["bytes"])[:MAX_SHOWN]
    print_table(NODE_COLUMNS, [_row(node) for node in sorted(shown, key=lambda node: node["node"])], wide=wide)
    _print_sums(record, lacks)


def _print_sums(record: Mapping[str, Any], lacks: list[str]) -> None:
    print_line(
        f"{record['num_nodes']} operations, {record['num_buffers']} buffers; "
        f"weights {decimal(record['weights_bytes'])}, "
        f"as it runs {decimal(record['eager_bytes'])}, alive at once {decimal(record['live_bytes'])}, "
        f"planned {decimal(record['plan_bytes'])}"
    )
    if lacks:
        splits = record["splits"]
        print_line(
            f"without {', '.join(lacks)}: {splits['num_splits']} splits, {splits['num_copies']} copies, "
            f"{decimal(splits['copied_bytes'])} to the host and back in a forward"
        )


def _splits(found: Recording, lacking: list[str]) -> dict[str, int]:
    """Return what a device costs that lacks operations. Raises OptionError for one that the forward has not."""
    from infra.offline.splitting import split_recording

    known = {node.op.split(".")[1] for node in found.nodes}
    if unknown := set(lacking) - known:
        expected = ", ".join(sorted(known))
        raise OptionError(f"--lacks {min(unknown)}: the forward has no such operation; it has {expected}")
    splits, copied_bytes = split_recording(found, lacking)
    return {"num_splits": len(splits.splits), "num_copies": len(splits.copies), "copied_bytes": copied_bytes}


def _recorded(
    store: WeightStore, manifest: Manifest, part: str, asked: tuple[int | None, int | None], tokens: int, rows: int
) -> tuple[Recording, dict[str, int]]:
    """Return the recording, and what was recorded. Raises OptionError for what cannot be recorded."""
    import torch

    from deployments.engines.diffusion.families import family_of
    from deployments.engines.diffusion.footprints import make_twin
    from deployments.engines.records.protocol import EngineError
    from weights.formats.pipeline_parts import pipeline_variant

    try:
        family = family_of(manifest.class_name or "")
        width, height = family.default_sides(pipeline_variant(store.skeleton(manifest)))
        height, width = asked[0] or height, asked[1] or width
        twin = make_twin(manifest, store.skeleton(manifest), torch.device("cpu"))
        twin.check_size(height, width)
    except EngineError as error:
        raise OptionError(f"{manifest.model!r}: {error}") from None
    try:
        found = (
            twin.record_decode(height, width, rows)
            if part == "vae"
            else twin.record_denoise(height, width, tokens, rows)
        )
    except Exception as error:  # of any operation of a model that fake tensors have no rule for
        raise OptionError(f"{manifest.model!r}: a forward cannot be recorded: {error}") from None
    return found, {"height": height, "width": width, "tokens": tokens, "rows": rows}


def _weights_bytes(manifest: Manifest, part: str) -> int:
    from deployments.engines.diffusion.families import family_of

    name = "vae" if part == "vae" else family_of(manifest.class_name or "").denoiser_name
    return manifest.components[name].nbytes


def _node_records(found: Recording, offsets: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return what each node does; `until` and `place` are of the buffers that it makes."""
    ends = {one.key: one.last for one in found.lifetimes()}
    return [
        {
            "node": at,
            "layer": node.layer,
            "op": node.op,
            "reads": list(node.reads),
            "makes": [
                {"buffer": one, "bytes": found.buffers[one].nbytes, "until": ends[one], "offset": offsets[one]}
                for one in node.makes
            ],
            "bytes": sum(found.buffers[one].nbytes for one in node.makes),
        }
        for at, node in enumerate(found.nodes)
    ]


def _row(node: Mapping[str, Any]) -> list[str]:
    until = ", ".join(str(one["until"]) for one in node["makes"])
    places = ", ".join(str(one["offset"]) for one in node["makes"])
    return [
        str(node["node"]),
        node["layer"],
        node["op"],
        decimal(node["bytes"]) if node["makes"] else "",
        until,
        places,
    ]
