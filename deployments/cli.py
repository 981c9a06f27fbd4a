"""The command `atelier`. Thin: it parses, calls, and prints; exit code 2 is a mistake of the caller's.

Heavy imports (torch, Ray Serve) happen inside the commands that need them, so that the others answer at once.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from configs.errors import ConfigError
from deployments.cli_models import app as models_app
from deployments.cli_options import Json, Url, cluster_client
from deployments.cli_weights import app as weights_app

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
bench_app = typer.Typer(no_args_is_help=True, help="Measure on this machine, beside the peers.")
app.add_typer(bench_app, name="bench")
app.add_typer(weights_app, name="weights")
app.add_typer(models_app)
err = Console(stderr=True)

DEFAULT_CONFIG = Path("configs/clusters/demo.yaml")

ConfigPath = Annotated[Path, typer.Argument(help="Cluster YAML.")]


@app.command()
def up(
    config: ConfigPath = DEFAULT_CONFIG,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the cluster is ready.")] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Instead of the config's http.port.")] = None,
) -> None:
    """Start a cluster and keep it up until Ctrl-C or `atelier down`."""
    from deployments.cli_cluster import run_attached, run_detached

    (run_detached if detach else run_attached)(config, port)


@app.command()
def down(
    name: Annotated[str | None, typer.Argument(help="Cluster name; default: every cluster of yours.")] = None,
) -> None:
    """Stop clusters of this machine, with everything that belongs to them."""
    from deployments.cli_cluster import stop

    stop(name)


@app.command()
def status(url: Url = None, as_json: Json = False) -> None:
    """What is up, and what is resident where."""
    from deployments.cli_status import show_status

    show_status(cluster_client(url), as_json)


@app.command()
def models(url: Url = None, as_json: Json = False) -> None:
    """The models and adapters that the cluster serves."""
    from deployments.cli_status import show_models

    show_models(cluster_client(url), as_json)


@app.command()
def render(config: ConfigPath = DEFAULT_CONFIG) -> None:
    """Print the plain Ray Serve YAML of a cluster config, for `serve deploy`."""
    from deployments.rendering import render_serve_yaml

    sys.stdout.write(render_serve_yaml(_load(config)))


@app.command()
def generate(
    prompt: str,
    model: Annotated[str, typer.Option("--model", "-m", help="Model id.")] = "digits-flux",
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG file; several images are numbered.")] = Path(
        "out/image.png"
    ),
    num_images: Annotated[int, typer.Option("-n", help="How many images.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Denoise steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
    size: Annotated[str, typer.Option(help="WIDTHxHEIGHT in pixels.")] = "auto",
    negative: Annotated[str | None, typer.Option(help="Negative prompt.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same image.")] = None,
    lora: Annotated[list[str] | None, typer.Option(help="Adapter, as NAME or NAME:SCALE; may be repeated.")] = None,
    local: Annotated[bool, typer.Option("--local", help="In this process, without a cluster.")] = False,
    config: Annotated[Path, typer.Option(help="Cluster YAML, for --local.")] = DEFAULT_CONFIG,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Make images from a prompt."""
    from deployments.cli_generate import generate_images

    body = {
        "model": model,
        "prompt": prompt,
        "n": num_images,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "size": size,
        "negative_prompt": negative,
        "seed": seed,
        "lora": [_lora(text) for text in lora or []],
    }
    generate_images(
        body, output, as_json, client=None if local else cluster_client(url), config=_load(config) if local else None
    )


@app.command()
def chat(
    message: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Model id.")] = "adder",
    url: Url = None,
) -> None:
    """Talk to a language model."""
    from deployments.cli_generate import converse

    converse(cluster_client(url), model, message)


@bench_app.command("serve")
def bench_serve(config: ConfigPath = DEFAULT_CONFIG, rounds: int = 15, as_json: Json = False) -> None:
    """The demo cluster beside stock diffusers and transformers in one process."""
    from deployments.bench.report import print_figures
    from deployments.bench.serve import run

    with err.status("measuring: starts a cluster and a stock process, takes some minutes"):
        figures = run(_load(config), str(config), rounds)
    print_figures(figures, as_json)


@bench_app.command("load")
def bench_load(
    model: Annotated[Path | None, typer.Option(help="A model folder with safetensors; default: one is made.")] = None,
    shape: Annotated[str, typer.Option(help="Of the one that is made: wide (108 tensors) or deep (1,880).")] = "wide",
    rounds: Annotated[int, typer.Option(min=1, help="Every loader loads this often, in turn.")] = 5,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Beside other loaders.")] = True,
    work_dir: Annotated[Path | None, typer.Option(help="On the disk to be measured; default: temporary.")] = None,
    as_json: Json = False,
) -> None:
    """Cold and warm loads into shared memory, beside other loaders and the raw disk."""
    from deployments.bench.load import run
    from deployments.bench.report import print_load_figures

    with err.status("measuring: writes some 10 GB and takes some minutes"):
        figures = run(model, shape, rounds, peers, work_dir)
    print_load_figures(figures, as_json)


@bench_app.command("switch")
def bench_switch(
    demo: Annotated[Path, typer.Option(help="The folder of the demo models.")] = Path("infra/demo/models"),
    switches: Annotated[int, typer.Option(min=1, help="Random ones, under a budget.")] = 500,
    rounds: Annotated[int, typer.Option(min=1, help="Ours and the peer switch this often, in turn.")] = 9,
    attaches: Annotated[int, typer.Option(min=1, help="In as many new processes.")] = 20,
    work_dir: Annotated[Path | None, typer.Option(help="Where the models are made; default: temporary.")] = None,
    as_json: Json = False,
) -> None:
    """From one model to another on one node: time, bytes moved, memory, recovery; beside diffusers."""
    from deployments.bench.switch import Effort, run
    from deployments.bench.switch_report import print_switch_figures

    with err.status("measuring: writes some 6 GB and takes some minutes"):
        figures = run(demo, Effort(num_attaches=attaches, rounds=rounds, num_switches=switches), work_dir)
    print_switch_figures(figures, as_json)


def main() -> None:
    """Entry point: errors that people cause are one readable line, never a traceback."""
    from cluster.errors import ClusterError
    from deployments.client import ClientError
    from deployments.errors import ServiceError
    from weights.errors import WeightsError

    try:
        app()
    except ConfigError as error:
        _fail(str(error), 2)
    except (ClientError, ClusterError, ServiceError, WeightsError) as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        os._exit(1)  # the reader of our output is gone; there is nobody to tell


def _fail(message: str, code: int) -> NoReturn:
    err.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(code)


def _load(path: Path) -> Any:
    from configs.loading import load_cluster_config

    return load_cluster_config(path)


def _lora(text: str) -> dict[str, Any]:
    name, _, scale = text.partition(":")
    try:
        strength = float(scale) if scale else 1.0
    except ValueError:
        strength = math.nan
    if not name or not math.isfinite(strength):
        _fail(f"--lora {text!r}: expected NAME or NAME:SCALE", 2)
    return {"name": name, "scale": strength}


if __name__ == "__main__":
    main()
