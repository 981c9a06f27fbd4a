"""`python -m infra.plots RESULTS OUT`: the pictures of BENCHMARKS.md from what the benches wrote, and a simulated run.

RESULTS holds what `atelier bench NAME --json > RESULTS/NAME.json` printed (`bench llm -o json`), as many as there are.
The time line of switches needs no measurement: a run of the simulator, the same on every machine.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cluster.placement.state import Components
from deployments.console.output import write_file
from infra.bench.command.plots import PLOTS
from infra.simulator.chart import chart_of
from infra.simulator.running import simulate
from infra.simulator.scenario import Scenario, SimModel, SimWorker, poisson, zipf_shares

GB: Final = 10**9
app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def make_plots(
    results: Annotated[Path, typer.Argument(help="Folder of NAME.json.")],
    out: Annotated[Path, typer.Argument(help="Folder for NAME.svg.")] = Path("docs/figures"),
) -> None:
    """Make the pictures that there are results for."""
    found = {name: results / f"{name}.json" for name in PLOTS}
    for name, file in found.items():
        if not file.exists():
            typer.echo(f"{name}: {file} is not there")
            continue
        write_file(out / f"{name}.svg", PLOTS[name](_read(file)))
        typer.echo(f"{name}: {out / name}.svg")
    write_file(out / "timeline.svg", time_line())
    typer.echo(f"timeline: {out}/timeline.svg, simulated")


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(f"{file}: {error}") from None


def time_line(seed: int = 0) -> str:
    """Return the chart of four workers under the controller, with twelve models that share half of their bytes."""
    parts = [{f"family-{number // 4}": 15 * GB, f"own-{number}": 15 * GB} for number in range(12)]
    models = tuple(SimModel(f"m{number}", Components(sizes), 1.0, 0.6) for number, sizes in enumerate(parts))
    workers = tuple(SimWorker(f"w{number}", "n0", 60 * GB, attach_bytes_per_s=25e9) for number in range(4))
    shares = zipf_shares([model.id for model in models], 1.0)
    requests = tuple(poisson(2.0, shares, 120.0, random.Random(seed)))
    figures, world = simulate(Scenario(models, workers, requests), "latency-first")
    return chart_of(world, f"latency-first: {len(requests)} requests, {figures.switches} switches, simulated")


if __name__ == "__main__":
    app()
