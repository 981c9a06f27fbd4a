"""`atelier bench …`: figures of this machine, beside the peers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deployments.cli.cluster import DEFAULT_CONFIG, ConfigPath
from deployments.console.output import Json, OptionError, check_plot, write_file
from deployments.console.progress import progress_bar

if TYPE_CHECKING:
    from infra.bench.command.llm import Case

app = typer.Typer(no_args_is_help=True, help="Measure on this machine, beside the peers.")
_err = Console(stderr=True)
Plot = Annotated[Path | None, typer.Option("--plot", help="Write a picture of the figures, an SVG file.")]


@app.command("serve")
def bench_serve(
    config: ConfigPath = DEFAULT_CONFIG,
    rounds: Annotated[int, typer.Option(min=1, max=80, help="Every request is made this often, in turn.")] = 15,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure the demo cluster beside stock diffusers and transformers in one process."""
    check_plot(plot)
    from configs.loading import load_cluster_config
    from infra.bench.command.serve import measure_serve, print_serve_figures

    with progress_bar("measuring: a cluster and a stock process, some minutes", "steps") as progress:
        figures = measure_serve(load_cluster_config(config), str(config), rounds, seed, progress)
    _write_plot(plot, "serve", figures)
    print_serve_figures(figures, as_json)


@app.command("load")
def bench_load(
    model: Annotated[Path | None, typer.Option(help="A model folder with safetensors; default: one is made.")] = None,
    shape: Annotated[str, typer.Option(help="Of the one that is made: wide (108 tensors) or deep (1,880).")] = "wide",
    rounds: Annotated[int, typer.Option(min=1, help="Every loader loads this often, in turn.")] = 5,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Beside other loaders.")] = True,
    work_dir: Annotated[Path | None, typer.Option(help="On the disk to be measured; default: temporary.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order in which loaders take turns.")] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure cold and warm loads into shared memory, beside other loaders and the raw disk."""
    check_plot(plot)
    from infra.bench.command.load import measure_load, print_load_figures

    with progress_bar("measuring: writes some 35 GB, some minutes", "steps", console=_err) as progress:
        tell = partial(_err.print, highlight=False, markup=False)
        figures = measure_load(model, shape, rounds, peers, work_dir, seed, progress, tell)
    _write_plot(plot, "load", figures)
    print_load_figures(figures, as_json)


@app.command("switch")
def bench_switch(
    demo: Annotated[Path, typer.Option(help="The folder of the demo models.")] = Path("infra/demo/models"),
    switches: Annotated[int, typer.Option(min=1, help="Random ones, under a budget.")] = 500,
    rounds: Annotated[int, typer.Option(min=1, help="Ours and the peer switch this often, in turn.")] = 9,
    attaches: Annotated[int, typer.Option(min=1, help="In as many new processes.")] = 20,
    work_dir: Annotated[Path | None, typer.Option(help="Where the models are made; default: temporary.")] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure switches among models on one node: time, bytes moved, memory, recovery; beside diffusers."""
    check_plot(plot)
    from infra.bench.command.switch import SwitchRounds, measure_switch, print_switch_figures

    settings = SwitchRounds(num_attaches=attaches, rounds=rounds, num_switches=switches)
    with progress_bar("measuring: writes some 6 GB, some minutes", "steps") as progress:
        figures = measure_switch(demo, settings, work_dir, progress)
    _write_plot(plot, "switch", figures)
    print_switch_figures(figures, as_json)


@app.command("llm")
def bench_llm(
    model: Annotated[Path, typer.Option("-m", "--model", help="A GGUF file, or a model folder.")],
    n_prompt: Annotated[list[str], typer.Option("-p", "--n-prompt", help="Tokens of a prompt.")] = ["512"],  # noqa: B006
    n_gen: Annotated[list[str], typer.Option("-n", "--n-gen", help="Generated tokens.")] = ["128"],  # noqa: B006
    prompt_gen: Annotated[list[str], typer.Option("-pg", help="PROMPT,GENERATED as one test; repeatable.")] = [],  # noqa: B006
    depth: Annotated[list[str], typer.Option("-d", "--n-depth", help="Tokens in the cache before.")] = ["0"],  # noqa: B006
    parallel: Annotated[str, typer.Option("-npl", help="Numbers of streams at once, such as 1,4,8.")] = "1",
    threads: Annotated[int, typer.Option("-t", "--threads", min=1)] = 2,
    threads_batch: Annotated[
        int | None, typer.Option("-tb", "--threads-batch", min=1, help="Of prompts; default: -t.")
    ] = None,
    batch: Annotated[int, typer.Option("-b", "--batch-size", min=1)] = 2048,
    ubatch: Annotated[int, typer.Option("-ub", "--ubatch-size", min=1)] = 512,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1)] = 5,
    output: Annotated[str, typer.Option("-o", "--output", help="md, csv, json or jsonl.")] = "md",
    peer: Annotated[
        bool, typer.Option("--peer/--no-peer", help="Beside llama.cpp on a GGUF file, transformers on a folder.")
    ] = True,
    beside: Annotated[int, typer.Option("--prefill-beside", min=1, help="max_prefill_beside_decode of ours.")] = 512,
    delay: Annotated[float, typer.Option("--max-decode-delay", min=1, help="max_decode_delay of ours.")] = 2.0,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="auto or int8, of our KV cache.")] = "auto",
    decodes: Annotated[
        bool, typer.Option("--decode", help="Ours without scheduler and sampler too, as llama-bench runs llama.cpp.")
    ] = False,
    opening: Annotated[
        bool, typer.Option("--opening", help="Seconds from opening to the first token, and memory, of ours alone.")
    ] = False,
    rate: Annotated[float | None, typer.Option(min=0.01, help="Requests per second: the serving mode.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of the serving mode, each of -p and -n tokens.")] = 50,
    max_ttft_ms: Annotated[float, typer.Option(help="To the first token of a request that is served well.")] = 2000.0,
    max_tpot_ms: Annotated[float, typer.Option(help="For each of its other tokens.")] = 200.0,
    plot: Plot = None,
) -> None:
    """Measure prompt processing and generation as llama-bench does, beside llama.cpp (`make judge-llama`).

    -p, -n and -d take several numbers, as 512,2048 or by being repeated: each is a test of its own. With --rate, the
    serving mode: Poisson arrivals, TTFT, TPOT, goodput, and what prompts cost a running stream. With --opening,
    processes of their own open the model, answer a prompt of -p tokens with -n, and say what that took.
    """
    check_plot(plot)
    _check_language_model(model)
    from infra.bench.command.llm import BenchSettings, formatted, measure_llm, measure_opening, measure_serving
    from infra.bench.command.llm_serving import Serving, formatted_figures

    if output not in ("md", "csv", "json", "jsonl"):
        raise typer.BadParameter(f"{output!r}; expected md, csv, json or jsonl", param_hint="-o")
    prompts, answers, depths = _sizes(n_prompt, "-p"), _sizes(n_gen, "-n"), _sizes(depth, "-d")
    cases = _llm_cases(prompts, answers, prompt_gen, depths, parallel)
    if kv_dtype not in ("auto", "int8"):
        raise typer.BadParameter(f"{kv_dtype!r}; expected auto or int8", param_hint="--kv-dtype")
    settings = BenchSettings(
        tuple(cases),
        threads,
        threads_batch or threads,
        batch,
        ubatch,
        repetitions,
        beside,
        delay,
        kv_dtype,  # type: ignore[arg-type]
        decodes,
    )
    if rate is not None or opening:
        if output not in ("md", "json"):
            raise typer.BadParameter(f"{output!r}; expected md or json with --rate and --opening", param_hint="-o")
        with _err.status("opening" if rate is None else "serving"):
            if rate is None:
                figures = [measure_opening(model, prompts[0], answers[0], threads, repetitions)]
            else:
                serving = Serving(rate, requests, prompts[0], answers[0], max_ttft_ms, max_tpot_ms)
                figures = measure_serving(model, settings, serving)
        _write_plot(plot, "llm", figures)
        typer.echo(json.dumps(figures, indent=2) if output == "json" else formatted_figures(figures))
        return
    with progress_bar("measuring", "steps") as progress:
        rows = measure_llm(model, settings, peer=peer, progress=progress)
    _write_plot(plot, "llm", rows)
    typer.echo(formatted(rows, output))  # type: ignore[arg-type]


def _write_plot(path: Path | None, name: str, figures: Any) -> None:
    from infra.bench.command.plots import PLOTS

    if path is not None:
        write_file(path, PLOTS[name](figures))


def _check_language_model(path: Path) -> None:
    """Raise OptionError for what the engine does not run. FormatError is what it is for other commands."""
    from deployments.engines.servable import why_unservable
    from weights.formats.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(path)
    if checkpoint.kind != "llm":
        raise OptionError(f"-m {path}: a model of kind {checkpoint.kind!r}, expected a language model")
    if reason := why_unservable(checkpoint):
        raise OptionError(f"-m {reason}")


def _llm_cases(
    prompts: list[int], answers: list[int], prompt_gen: list[str], depths: list[int], parallel: str
) -> list[Case]:
    """Return the tests that the options ask for: each size at each depth with each number of streams."""
    from infra.bench.command.llm import Case

    pairs = []
    for text in prompt_gen:
        pair = _sizes([text], "-pg")
        if len(pair) != 2:
            raise typer.BadParameter(f"{text!r}; expected two numbers such as 512,128", param_hint="-pg")
        pairs.append((pair[0], pair[1]))
    streams = _sizes([parallel], "-npl")
    if not all(1 <= number <= 256 for number in streams):
        raise typer.BadParameter(f"{parallel!r}; expected numbers from 1 to 256 such as 1,4,8", param_hint="-npl")
    sizes = [*((n, 0) for n in prompts if n), *((0, n) for n in answers if n), *pairs]
    cases = [Case(*size, before, number) for number in streams for before in depths for size in sizes]
    if not cases:
        raise typer.BadParameter("nothing to measure", param_hint="-p, -n, -pg")
    return cases


def _sizes(texts: list[str], option: str) -> list[int]:
    """Return the numbers of an option, which may be repeated and may have several each time. Raises BadParameter."""
    numbers = ",".join(texts).split(",")
    if not all(number.isdecimal() for number in numbers):
        raise typer.BadParameter(f"{','.join(texts)!r}; expected numbers such as 512 or 512,2048", param_hint=option)
    return [int(number) for number in numbers]
