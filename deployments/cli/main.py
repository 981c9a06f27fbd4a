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
from deployments.cli.bench import app as bench_app
from deployments.cli.models import app as models_app
from deployments.cli.options import DEFAULT_CONFIG, ConfigPath, Json, Url, cluster_client
from deployments.cli.weights import app as weights_app

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(bench_app, name="bench")
app.add_typer(weights_app, name="weights")
app.add_typer(models_app)
err = Console(stderr=True)


@app.command()
def up(
    config: ConfigPath = DEFAULT_CONFIG,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the cluster is ready.")] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Instead of the config's http.port.")] = None,
) -> None:
    """Start a cluster and keep it up until Ctrl-C or `atelier down`."""
    from deployments.cli.cluster import run_attached, run_detached

    (run_detached if detach else run_attached)(config, port)


@app.command()
def down(
    name: Annotated[str | None, typer.Argument(help="Cluster name; default: every cluster of yours.")] = None,
) -> None:
    """Stop clusters of this machine, with everything that belongs to them."""
    from deployments.cli.cluster import stop

    stop(name)


@app.command()
def status(url: Url = None, as_json: Json = False) -> None:
    """What is up, and what is resident where."""
    from deployments.cli.status import show_status

    show_status(cluster_client(url), as_json)


@app.command()
def models(url: Url = None, as_json: Json = False) -> None:
    """The models and adapters that the cluster serves."""
    from deployments.cli.status import show_models

    show_models(cluster_client(url), as_json)


@app.command()
def render(config: ConfigPath = DEFAULT_CONFIG) -> None:
    """Print the plain Ray Serve YAML of a cluster config, for `serve deploy`."""
    from deployments.cli.rendering import render_serve_yaml

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
    from deployments.cli.generate import generate_images

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
    from deployments.cli.generate import converse

    converse(cluster_client(url), model, message)


def main() -> None:
    """Entry point: errors that people cause are one readable line, never a traceback."""
    from cluster.errors import ClusterError
    from deployments.cli.client import ClientError
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
