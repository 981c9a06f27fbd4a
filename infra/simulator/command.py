"""`atelier simulate`: a trace under the controller and under plain queues, by a virtual clock."""

from __future__ import annotations

import random
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deployments.console.output import Column, Json, OptionError, Wide, print_json, print_table, write_file
from infra.simulator.multiplexed import policies_and_multiplexed
from infra.simulator.running import POLICIES, RunFigures, least_workers, recording_of, simulate, why_not_recorded
from infra.simulator.scenario import (
    Scenario,
    SimModel,
    SimWorker,
    bursts,
    diurnal,
    poisson,
    read_trace,
    trace_lines,
    zipf_shares,
)
from infra.simulator.world import World

app = typer.Typer()
_err = Console(stderr=True)
_KNOWN = policies_and_multiplexed()
_IN_PAGE = ("latency-first", "serve.multiplexed")


@app.command("simulate")
def simulate_trace(
    trace: Annotated[
        Path | None, typer.Argument(help="JSON lines; infra/simulator/scenario.py has the fields.")
    ] = None,
    poisson_rate: Annotated[float, typer.Option("--poisson", min=0, help="Requests per second.")] = 0.0,
    diurnal_rate: Annotated[float, typer.Option("--diurnal", min=0, help="Mean rate of a day of --duration.")] = 0.0,
    burst: Annotated[int, typer.Option(min=0, help="Requests per burst, of each model in turn.")] = 0,
    burst_every_s: Annotated[float, typer.Option(min=0.1)] = 10.0,
    duration_s: Annotated[float, typer.Option(min=0.1, max=1e6)] = 300.0,
    zipf: Annotated[float, typer.Option(min=0, max=10, help="Exponent of the models' shares; 0: equal.")] = 1.0,
    models: Annotated[int, typer.Option(min=1, max=10_000)] = 12,
    workers: Annotated[int, typer.Option(min=1, max=10_000)] = 4,
    model_gb: Annotated[float, typer.Option(min=0.001, max=1e5, help="Bytes of a model.")] = 30.0,
    shared: Annotated[float, typer.Option(min=0, max=1, help="Share of them that four models each share.")] = 0.0,
    per_worker: Annotated[float, typer.Option(min=1, max=1e4, help="Models that a worker has room for.")] = 1.0,
    gb_per_s: Annotated[float, typer.Option(min=0.001, max=1e6, help="From the node's memory to a worker.")] = 25.0,
    service_s: Annotated[float, typer.Option(min=0.0001, max=1e5, help="Of a request alone.")] = 1.0,
    batch_growth: Annotated[float, typer.Option(min=0, max=1, help="1: a batch gains nothing.")] = 0.6,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Requests that a worker runs at once.")] = 4,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"One or more of {', '.join(_KNOWN)}; all but the last.")
    ] = None,
    target_s: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e6, help="Latency that requests should keep; default: their class's."),
    ] = None,
    sizing: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="Find the workers that keep this share in target, at most --workers."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals.")] = 0,
    chart: Annotated[Path | None, typer.Option(help="SVG of the first policy's run.")] = None,
    html: Annotated[
        Path | None,
        typer.Option(help=f"One page of the runs beside each other; without --policy: {' and '.join(_IN_PAGE)}."),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write the scenario as a trace file.")] = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Simulate a trace under the controller's own functions, and beside them plain queues."""
    policies, chance = _policies(policy or (list(_IN_PAGE) if html else None)), random.Random(seed)
    read, problems = _read(trace) if trace is not None else (Scenario((), (), ()), [])
    made = read.models or _models(_names(read, models), model_gb, shared, service_s, batch_growth)
    if target_s is not None:
        made = tuple(replace(model, slo=replace(model.slo, target_s=target_s)) for model in made)
    shares = zipf_shares([model.id for model in made], zipf)
    requests = [
        *read.requests,
        *(poisson(poisson_rate, shares, duration_s, chance) if poisson_rate else ()),
        *(diurnal(diurnal_rate, 0.8, duration_s, shares, duration_s, chance) if diurnal_rate else ()),
        *(bursts(burst, burst_every_s, list(shares), duration_s, chance) if burst else ()),
    ]
    if not requests:
        raise OptionError("nothing to simulate: name a trace file, or give --poisson, --diurnal or --burst")
    requests.sort(key=attrgetter("at_s"))
    budget, bytes_per_s = int(model_gb * 1e9 * per_worker), gb_per_s * 1e9
    found = read.workers or tuple(
        SimWorker(f"w{number:03d}", f"n{number // 8}", budget, slots, attach_bytes_per_s=bytes_per_s)
        for number in range(workers)
    )
    scenario = Scenario(made, found, tuple(requests), read.faults)
    if record is not None:
        write_file(record, "".join(trace_lines(scenario)))
    if sizing is not None:
        _print_sizing(scenario, policies, sizing, as_json)
        return
    if html is not None and (reason := why_not_recorded(scenario)):
        raise OptionError(f"--html {html}: {reason}")
    worlds = [_run(scenario, name, chart if name == policies[0] else None) for name in policies]
    if html is not None:
        _write_page(html, worlds)
    runs = [figures for figures, _ in worlds]
    if as_json:
        print_json({"problems": problems, "runs": [figures.as_record() for figures in runs]})
    else:
        _print_figures(runs, wide=wide)


def _run(scenario: Scenario, policy: str, chart: Path | None) -> tuple[RunFigures, World]:
    """Simulate a scenario, and draw it into the file `chart`."""
    num_requests = len(scenario.requests)
    with _err.status(f"simulating {num_requests} requests under {policy}"):
        figures, world = simulate(scenario, policy, _KNOWN)
    if chart is not None:
        from infra.simulator.chart import chart_of

        write_file(chart, chart_of(world, f"{policy}: {num_requests} requests, {figures.switches} switches"))
    return figures, world


def _write_page(path: Path, runs: list[tuple[RunFigures, World]]) -> None:
    """Write the runs into a page that needs no server."""
    from deployments.ingress.web_pages import simulated_page

    num_requests, num_models = runs[0][0].requests, len(runs[0][1].models)
    title = f"{num_requests} requests for {num_models} models, simulated"
    write_file(path, simulated_page(title, [recording_of(world, figures) for figures, world in runs]))


def _print_sizing(scenario: Scenario, policies: list[str], share: float, as_json: bool) -> None:
    """Print the number of the scenario's workers that suffice, by policy."""
    found = {}
    for name in policies:
        with _err.status(f"sizing under {name}"):
            found[name] = least_workers(
                lambda num: replace(scenario, workers=scenario.workers[:num]),
                name,
                share,
                len(scenario.workers),
                _KNOWN,
            )
    if as_json:
        print_json({"share": share, "workers": found})
        return
    rows = [[name, str(num or f"more than {len(scenario.workers)}")] for name, num in found.items()]
    print_table([Column("policy", fit="name"), Column(f"workers for {share:.0%} in target", align="right")], rows)


def _print_figures(found: list[RunFigures], *, wide: bool) -> None:
    """Print runs beside each other, one row each."""
    names = ("served", "mean s", "p50 s", "p95 s", "p99 s", "goodput/s", "in target", "switches", "GB moved", "Jain")
    less_asked = {"p50 s", "p99 s", "goodput/s", "GB moved", "Jain"}
    columns = [Column(name, align="right", only_wide=name in less_asked) for name in names]
    rows = [
        [
            each.policy,
            f"{each.served}/{each.requests}",
            *(f"{value:.2f}" for value in (each.mean_s, each.p50_s, each.p95_s, each.p99_s, each.goodput)),
            f"{each.slo_attainment:.1%}",
            str(each.switches),
            f"{each.moved_bytes / 1e9:.1f}",
            f"{each.jain:.2f}",
        ]
        for each in found
    ]
    print_table([Column("policy", fit="name"), *columns], rows, wide=wide)


def _policies(asked: list[str] | None) -> list[str]:
    unknown = [name for name in asked or () if name not in _KNOWN]
    if unknown:
        raise OptionError(f"unknown policy {unknown[0]!r}; known: {', '.join(_KNOWN)}")
    return [name for name in _KNOWN if name in (asked or POLICIES)]


def _models(names: list[str], gb: float, shared: float, service_s: float, growth: float) -> tuple[SimModel, ...]:
    from cluster.placement.state import Components

    made = []
    for number, name in enumerate(names):
        sizes = {f"own-{name}": int(gb * 1e9 * (1 - shared))}
        if shared:
            sizes[f"family-{number // 4}"] = int(gb * 1e9 * shared)
        made.append(SimModel(name, Components(sizes), service_s, growth))
    return tuple(made)


def _names(trace: Scenario, num_models: int) -> list[str]:
    """Return the models of a trace; without a trace, as many as wanted."""
    return list(dict.fromkeys(request.model for request in trace.requests)) or [f"m{n:03d}" for n in range(num_models)]


def _read(path: Path) -> tuple[Scenario, list[str]]:
    """Read a trace file, and print the lines left out. Raises OptionError for a file without requests."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            trace, problems = read_trace(lines)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}") from None
    for problem in problems:
        _err.print(f"{path}: {problem}; left out", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if not trace.requests:
        raise OptionError(f"{path}: no line is a request that can be used")
    return trace, problems
