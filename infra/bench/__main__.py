"""`python -m infra.bench NAME`, in a checkout: the benchmarks that make the tables of BENCHMARKS.md.

Those that users run as well are under `atelier bench`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from deployments.cli.cluster import DEFAULT_CONFIG, ConfigPath
from deployments.console.output import Json, print_json

app = typer.Typer(
    no_args_is_help=True, help="Measure on this machine, beside the peers.", pretty_exceptions_enable=False
)
_err = Console(stderr=True)
_Rows = TypeVar("_Rows")


@app.command("merge")
def bench_merge(
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure dynamic batching at dispatch beside Serve's own batching: a scenario, 50 patterns, overhead."""
    from infra.bench.merge import MergeSettings, measure_merge, print_merge_figures

    with _err.status("measuring: takes about five minutes"):
        figures = measure_merge(MergeSettings(), seed)
    print_merge_figures(figures, as_json)


@app.command("encode")
def bench_encode(
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    cache: Annotated[Path, typer.Option(help="Keeps the peer's environment.")] = Path("~/.cache/atelier/bench"),
    as_json: Json = False,
) -> None:
    """Measure the text-encoder service beside infinity-emb, and beside a load of the encoder for each request."""
    from infra.bench.encode import EncodeSettings, measure_encode, print_encode_figures

    with _err.status("measuring: takes about eight minutes, and some more the first time"):
        figures = measure_encode(EncodeSettings(), seed, cache.expanduser())
    print_encode_figures(figures, as_json)


@app.command("split")
def bench_split(as_json: Json = False) -> None:
    """Measure a language model at half of its device beside accelerate's device_map: bytes over the link, CPU time."""
    from infra.bench.split import measure_split, print_split

    with _err.status("measuring: takes about half a minute"):
        rows = measure_split()
    if as_json:
        print_json(rows)
    else:
        print_split(rows)


@app.command("ranks")
def bench_ranks(
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Each way completes this many prompts, in turn.")] = 5,
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    predict: Annotated[bool, typer.Option(help="Predict image models on several cards, and measure nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Measure a language model on two ranks of one thread beside one process of two threads."""
    if predict:
        from infra.bench.rank_prediction import print_prediction

        print_prediction()
        return
    from infra.bench.ranks import RanksSettings, measure_ranks, print_ranks

    with _err.status("measuring: takes about a minute"):
        rows = measure_ranks(RanksSettings(rounds=rounds), seed)
    if as_json:
        print_json(rows)
    else:
        print_ranks(rows)


@app.command("extrapolate")
def bench_extrapolate(
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Every way makes an image this often, in turn.")] = 12,
    seed: Annotated[int, typer.Option(help="Of noise and texts.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure extrapolated steps beside fewer steps, and in a batch with requests that have none."""
    from infra.bench.extrapolate import measure_extrapolation, print_extrapolation

    with _err.status("measuring: takes about a minute"):
        rows = measure_extrapolation(rounds, seed)
    if as_json:
        print_json(rows)
    else:
        print_extrapolation(rows)


@app.command("plan")
def bench_plan(as_json: Json = False) -> None:
    """Predict what forwards take, plan their memory, and split them over devices, all without weights."""
    from infra.bench.planning import measure_plans, print_plans

    with _err.status("measuring: takes less than a minute"):
        rows = list(measure_plans())
    if as_json:
        print_json(rows)
    else:
        print_plans(rows)


@app.command("programs")
def bench_programs(
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Of each program's speeds.")] = 20.0,
    part: Annotated[list[str], typer.Option("--part", help="Only this part; repeatable.")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of weights and texts.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure stored programs as they run and compiled, beside their modules and onnxruntime; switches; memory."""
    from infra.bench.programs import PARTS, measure_programs, print_part

    found = measure_programs(seconds, seed, _chosen(part, PARTS))
    _print_parts("three minutes, most of it to compile", found, print_part, as_json)


@app.command("peers")
def bench_peers(
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Of each figure, sides in turn.")] = 9,
    part: Annotated[list[str], typer.Option("--part", help="Only this part; repeatable.")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of weights and texts.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure the work between two switches beside vLLM, llama.cpp, OpenVINO, onnxruntime, diffusers, transformers."""
    from infra.bench.peers.parts import PARTS, measure_peers, print_part
    from infra.bench.peers.settings import PeersSettings

    found = measure_peers(PeersSettings(rounds=rounds), seed, _chosen(part, PARTS))
    _print_parts("two to five minutes a part", found, print_part, as_json)


@app.command("stock")
def bench_stock(
    texts: Annotated[bool, typer.Option("--texts", help="Language models beside `generate` instead.")] = False,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure what the libraries' own code runs beside the libraries alone: pipelines, and a chat beside one."""
    from infra.bench.stock import Effort, measure_stock, print_stock_figures
    from infra.bench.stock_texts import TextEffort, measure_texts, print_text_figures

    with _err.status("measuring: takes some minutes" if texts else "measuring: takes a minute or two"):
        if texts:
            rows = measure_texts(TextEffort(), seed)
            print_text_figures(rows, TextEffort(), as_json)
            return
        figures = measure_stock(Effort(), seed)
    print_stock_figures(figures, as_json)


@app.command("door")
def bench_door(
    config: ConfigPath = DEFAULT_CONFIG,
    quick: Annotated[bool, typer.Option("--quick", help="One round of few requests: whether it works.")] = False,
    seed: Annotated[int, typer.Option(help="Of texts, arrivals and cancels.")] = 0,
    cache: Annotated[Path, typer.Option(help="Keeps the peer's environment.")] = Path("~/.cache/atelier/bench"),
    overload: Annotated[int, typer.Option(help="Only the overload, with so many ingress replicas.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure what a request costs on its way in and out, and what the cluster does when too many come."""
    from configs.loading import load_cluster_config
    from infra.bench.door import QUICK, DoorSettings, measure_door, measure_overload_alone
    from infra.bench.door_report import print_door_figures, print_overload_figures

    settings = QUICK if quick else DoorSettings()
    if overload:
        found = measure_overload_alone(load_cluster_config(config), str(config), settings, overload, seed)
        print_overload_figures(found, as_json)
        return
    _err.print("measuring: takes six minutes, and some more the first time; a minute and a half with --quick")
    figures = measure_door(load_cluster_config(config), str(config), settings, seed, cache.expanduser())
    print_door_figures(figures, as_json)


@app.command("denoise")
def bench_denoise(
    quick: Annotated[bool, typer.Option("--quick", help="One round of few steps: whether it works.")] = False,
    part: Annotated[list[str], typer.Option("--part", help="Only this part; repeatable.")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of weights, texts and arrivals.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure the denoise engine beside stock diffusers: alone, together, as they come, streamed, on small devices."""
    from infra.bench.denoise import PARTS, QUICK, DenoiseSettings, measure_denoise, print_part

    found = measure_denoise(QUICK if quick else DenoiseSettings(), seed, _chosen(part, PARTS))
    _print_parts("about five minutes", found, print_part, as_json)


@app.command("pages")
def bench_pages(config: ConfigPath = DEFAULT_CONFIG, as_json: Json = False) -> None:
    """Measure what the pages cost: their script, first paint, and the live view of the cluster. Needs Chromium."""
    from configs.loading import load_cluster_config
    from infra.bench.pages import measure_pages, print_pages_figures

    with _err.status("measuring: takes two minutes"):
        figures = measure_pages(load_cluster_config(config), str(config))
    print_pages_figures(figures, as_json)


@app.command("workflows")
def bench_workflows(
    config: ConfigPath = DEFAULT_CONFIG,
    users: Annotated[int, typer.Option(min=1, max=64, help="Of workflows, on two models in turn.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Of each way, in turn.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the order, and of the noise.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure several users' workflows of ComfyUI at once, beside the same cluster asked in one queue."""
    from configs.loading import load_cluster_config
    from infra.bench.workflows import WorkflowSettings, measure_workflows, print_workflows

    settings = WorkflowSettings(users=users, rounds=rounds)
    with _err.status("measuring: takes about two minutes"):
        figures = measure_workflows(load_cluster_config(config), str(config), settings, seed)
    print_workflows(figures, as_json)


@app.command("dedup")
def bench_dedup(models: Path = Path("infra/demo/models"), as_json: Json = False) -> None:
    """Count the bytes that a store keeps of the demo pipelines and one more fine-tune, by layout."""
    from infra.bench.dedup import measure_dedup, print_dedup_figures

    print_dedup_figures(measure_dedup(models), as_json)


@app.command("single-file")
def bench_single_file(
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Of each way, in turn.")] = 3,
    as_json: Json = False,
) -> None:
    """Measure the import of an all-in-one file of 2 GB beside `from_single_file`, and the bytes that it adds."""
    from infra.bench.single_file import Sizes, measure_single_file, print_single_file_figures

    with _err.status("measuring: takes a minute or two, and 9 GB of the temporary folder"):
        print_single_file_figures(measure_single_file(Sizes(), seed, rounds), as_json)


@app.command("deltas")
def bench_deltas(
    models: Path = Path("infra/demo/models"),
    quick: Annotated[bool, typer.Option("--quick", help="Few steps and small loads: whether it works.")] = False,
    seed: Annotated[int, typer.Option(help="Of the fine-tunes.")] = 0,
    zipnn: Annotated[Path, typer.Option(help="Where zipnn is installed: `make judge-zipnn`.")] = Path(".judges/zipnn"),
    as_json: Json = False,
) -> None:
    """Measure fine-tunes stored as differences from their base: ratios, decoding, and loads from slow media."""
    from infra.bench.deltas import QUICK, DeltaSettings, measure_deltas, print_delta_figures

    settings = QUICK if quick else DeltaSettings()
    with _err.status("measuring: takes about eight minutes"):
        figures = measure_deltas(settings, models, seed, zipnn, _err.print)
    print_delta_figures(figures, settings, as_json)


@app.command("evict")
def bench_evict(as_json: Json = False) -> None:
    """Count the bytes that eviction moves on a heavy-tailed trace, beside least recent use; simulated."""
    from infra.bench.eviction import measure_eviction, print_eviction_figures

    print_eviction_figures(measure_eviction(), as_json)


@app.command("starts")
def bench_starts(
    config: ConfigPath = DEFAULT_CONFIG,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Starts each way.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure `atelier up` with template processes (`ray.templates`) and without, in turn."""
    from infra.bench.starts import measure_starts, print_start_figures

    with _err.status("measuring: takes about half a minute a round"):
        print_start_figures(measure_starts(config, rounds), as_json)


@app.command("idle")
def bench_idle(
    config: ConfigPath = DEFAULT_CONFIG,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="To count CPU time over.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Measure what each process of a cluster takes of CPU and memory while nobody asks it for anything.

    Beside Ray and Serve alone.
    """
    from configs.loading import load_cluster_config
    from infra.bench.idle import measure_idle, print_idle_figures

    with _err.status("measuring: takes five minutes"):
        figures = measure_idle(load_cluster_config(config), seconds)
    print_idle_figures(figures, as_json)


@app.command("schedule")
def bench_schedule(
    seeds: Annotated[int, typer.Option(min=1, max=50, help="Traces that the figures are means of.")] = 3,
    part: Annotated[list[str], typer.Option(help="Only this part, such as tick or sizing; repeatable.")] = [],  # noqa: B006
    real: Annotated[
        bool, typer.Option("--real", help="A real cluster beside serve.multiplexed; not simulated.")
    ] = False,
    config: ConfigPath = DEFAULT_CONFIG,
    rate: Annotated[float, typer.Option(min=0.1, max=1000, help="Requests per second, with --real.")] = 6.0,
    duration_s: Annotated[float, typer.Option(min=1, max=600, help="Of each trace, with --real.")] = 40.0,
    record: Annotated[Path | None, typer.Option(help="Folder for the recorded traces, with --real.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the controller beside serve.multiplexed: simulated with plain queues and a tick, or in a real cluster."""
    if real:
        from infra.bench.schedule_real import measure_real, print_real_figures

        print_real_figures(measure_real(config, rate, duration_s, 0, record), as_json)
        return
    from infra.bench.schedule import PARTS, measure_schedule, print_schedule_figures

    chosen = _chosen(part, PARTS)
    with _err.status("measuring: takes some minutes"):
        print_schedule_figures(measure_schedule(seeds, chosen), as_json)


@app.command("optimum")
def bench_optimum(
    cases: Annotated[int, typer.Option(min=1, max=100_000, help="Cases that are drawn.")] = 500,
    large: Annotated[int, typer.Option(min=0, max=10_000, help="Larger ones, beside a lower bound.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Of the first case; each further one has the next.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare the controller with the best schedule there is, on drawn small cases, and print the worst of them."""
    from infra.bench.optimum import measure_optimum, print_optimum_figures

    with _err.status("measuring: takes some minutes"):
        outcomes = measure_optimum(cases, seed, large)
    print_optimum_figures(outcomes, as_json)


@app.command("refusals")
def bench_refusals(
    cases: Annotated[int, typer.Option(min=1, max=100_000, help="Cases that are drawn at each load.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the first case; each further one has the next.")] = 0,
    foresees: Annotated[
        bool, typer.Option("--foresees", help="Beside one who knows what requests take, and plays them forward: slow.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Judge what the admission queue refuses and lets in at 0.5 to 10 times the capacity, by replay on a fake clock."""
    from infra.bench.refusals import LOADS, measure_refusals, print_refusal_figures

    with _err.status("measuring: takes some minutes"):
        verdicts = measure_refusals(cases, seed, LOADS, (False, True) if foresees else (False,))
    print_refusal_figures(verdicts, as_json)


@app.command("llm-accuracy")
def bench_llm_accuracy(
    model: Annotated[
        Path | None, typer.Option("-m", "--model", help="A Hugging Face folder; without one, random weights.")
    ] = None,
    types: Annotated[str, typer.Option(help="Types of ggml, such as Q8_0,Q4_K; default: all.")] = "",
    texts: Annotated[int, typer.Option(min=1, help="Texts that the model writes first.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each.")] = 128,
    as_json: Json = False,
) -> None:
    """Measure how far packed weights lead from float32 ones, beside llama.cpp on the same files.

    llama.cpp (`make judge-llama`) writes the files.
    """
    from infra.bench.llm_accuracy import FILE_TYPES, formatted_accuracy, measure_accuracy

    chosen = _chosen(types.split(",") if types else [], FILE_TYPES, "--types")
    with _err.status("measuring") as status:
        rows = measure_accuracy(model, chosen, num_texts=texts, num_tokens=tokens, progress=status.update)
    typer.echo(json.dumps(rows, indent=2) if as_json else formatted_accuracy(rows))


def _chosen(given: Sequence[str], known: Collection[str], option: str = "--part") -> Sequence[str]:
    """Return the names that were given of the known ones, or all of these. Raises BadParameter for another."""
    if unknown := [name for name in given if name not in known]:
        raise typer.BadParameter(f"{unknown[0]!r}; expected one of {', '.join(known)}", param_hint=option)
    return given or list(known)


def _print_parts(
    takes: str, measured: Iterator[tuple[str, _Rows]], print_part: Callable[[str, _Rows], None], as_json: bool
) -> None:
    """Print each part that is measured when it ends, or all of them as JSON."""
    _err.print(f"measuring: takes {takes}; each part is told when it ends")
    found: dict[str, object] = {}
    for name, rows in measured:
        found[name] = rows
        if not as_json:
            print_part(name, rows)
    if as_json:
        print_json(found)


if __name__ == "__main__":
    app()
