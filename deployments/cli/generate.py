"""The command that makes images."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from deployments.cli.cluster import DEFAULT_CONFIG
from deployments.console.client import Client, ClientError, Images, Key, Url, find_client
from deployments.console.output import Json, OptionError, print_json
from deployments.console.progress import progress_bar

app = typer.Typer()
_out = Console()


@app.command()
def generate(
    prompt: str,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model id; default: the first one that makes images.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG file; several images are numbered.")] = Path(
        "out/image.png"
    ),
    num_images: Annotated[int, typer.Option("-n", help="How many images.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Denoise steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
    clip_skip: Annotated[int | None, typer.Option(help="Layers of its CLIPs that prompts leave out.")] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="A scheduler class of diffusers; default: the model's own.")
    ] = None,
    size: Annotated[str, typer.Option(help="WIDTHxHEIGHT in pixels.")] = "auto",
    negative: Annotated[str | None, typer.Option(help="Negative prompt.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same image.")] = None,
    lora: Annotated[list[str] | None, typer.Option(help="Adapter, as NAME or NAME:SCALE; may be repeated.")] = None,
    image: Annotated[Path | None, typer.Option(help="Image file to begin at.")] = None,
    mask: Annotated[
        Path | None, typer.Option(help="The mask of the part to paint anew: transparent, or else white.")
    ] = None,
    strength: Annotated[float | None, typer.Option(help="How much of the image is made anew, up to 1.")] = None,
    control: Annotated[
        list[str] | None, typer.Option(help="ControlNet and its image, as NAME:FILE[:SCALE[:MODE]].")
    ] = None,
    ip_adapter: Annotated[
        list[str] | None, typer.Option(help="IP-Adapter and its image, as NAME:FILE or NAME:FILE:SCALE.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="In this process, without a cluster.")] = False,
    config: Annotated[Path, typer.Option(help="Cluster YAML, for --local.")] = DEFAULT_CONFIG,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Make images from a prompt, or from images."""
    body = {
        "prompt": prompt,
        "n": num_images,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "scheduler": scheduler,
        "clip_skip": clip_skip,
        "size": size,
        "negative_prompt": negative,
        "seed": seed,
        "lora": [lora_use(text) for text in lora or []],
        "strength": strength,
        "init_image": image and _file(image, "--image"),
        "mask_image": mask and _file(mask, "--mask"),
        "control": [_control_use(text) for text in control or []],
        "ip_adapter": [_with_image(text, "--ip-adapter") for text in ip_adapter or []],
    }
    client = None if local else find_client(url, key)
    body = {name: value for name, value in body.items() if value is not None and value != []}
    body["model"] = model or (_first_model(client) if client else _first_local_model(config))
    images = _generate_in_cluster(body, client) if client else _generate_locally(body, config, quiet=as_json)
    paths = _save(images.files, output)
    details = images.details | {"files": [str(path) for path in paths]}
    details.pop("data", None)
    if as_json:
        print_json(details)
        return
    for path in paths:
        _out.print(f"wrote {path}", markup=False, soft_wrap=True)
    phases = "  ".join(f"{phase} {ms:.0f}" for phase, ms in details["timings_ms"].items())
    seed_used = (
        f"seed {details['seed']}   " if details.get("seed") is not None else ""
    )  # a pipeline has none of its own
    _out.print(f"{seed_used}ms: {phases}")
    for warning in details["warnings"]:
        _out.print(f"[yellow]note:[/yellow] {escape(warning)}", soft_wrap=True)


def _first_model(client: Client) -> str:
    """Return the first model of the cluster that makes images and can be asked. Raises ClientError."""
    makers = [found for found in client.models() if found["kind"] == "diffusion"]
    usable = [found["id"] for found in makers if found["state"] not in ("unavailable", "does_not_fit")]
    if not usable:
        broken = "; ".join(f"{found['id']}: {found['error']}" for found in makers)
        raise ClientError(f"the cluster serves no model that makes images{broken and f' ({broken})'}")
    return str(usable[0])


def _first_local_model(path: Path) -> str:
    """Return the first pipeline of a config. Raises ClientError without one, and ConfigFileError."""
    from configs.loading import load_cluster_config
    from deployments.preflight import first_of_kind

    found = first_of_kind(load_cluster_config(path), "diffusion")
    if found is None:
        raise ClientError(f"{path} names no model that makes images")
    return found


def _generate_in_cluster(body: dict[str, Any], client: Client) -> Images:
    with _out.status(f"generating with {body['model']}"):
        return client.generate(**body)


def _generate_locally(body: dict[str, Any], path: Path, *, quiet: bool) -> Images:
    from pydantic import ValidationError

    from configs.loading import load_cluster_config

    config = load_cluster_config(path)  # before the imports that take seconds
    from deployments.ingress.openai.image_bodies import GenerationBody
    from deployments.ingress.openai.image_files import describe_image, encode_image
    from deployments.local import LocalModels

    try:
        request = GenerationBody(**body).to_record(config.ingress.limits)
    except ValidationError as error:
        first = error.errors()[0]
        raise ClientError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    with progress_bar(f"denoising with {request.model}", "steps", quiet=quiet) as progress:
        result = LocalModels(config).generate(request, progress)
    details = {
        "model": result.model,
        "seed": result.seed,
        "num_inference_steps": result.num_inference_steps,
        "timings_ms": result.timings_ms,
        "warnings": list(result.warnings),
    }
    files = [
        encode_image(image, "png", description=describe_image(request, result, index))
        for index, image in enumerate(result.images)
    ]
    return Images(files, details)


def _save(files: list[bytes], output: Path) -> list[Path]:
    paths = (
        [output]
        if len(files) == 1
        else [output.with_stem(f"{output.stem}-{number}") for number in range(1, len(files) + 1)]
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for path, data in zip(paths, files, strict=True):
            path.write_bytes(data)
    except OSError as error:
        raise ClientError(f"cannot write {error.filename}: {error.strerror}") from None
    return paths


def _file(path: Path, option: str) -> str:
    """Return a file in base64. Raises OptionError."""
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise OptionError(f"{option} {path}: {error.strerror}") from None


def _with_image(text: str, option: str) -> dict[str, Any]:
    """Return the adapter of NAME:FILE or NAME:FILE:SCALE, in the form of requests. Raises OptionError."""
    name, _, rest = text.partition(":")
    file, _, scale = rest.rpartition(":")
    if not file or not math.isfinite(_scale(scale)):  # a file whose name may have colons
        file, scale = rest, ""
    if not name or not file:
        raise OptionError(f"{option} {text!r}: expected NAME:FILE or NAME:FILE:SCALE")
    return {"name": name, "image": _file(Path(file), option), "scale": _scale(scale)}


def _control_use(text: str) -> dict[str, Any]:
    """Return the ControlNet of NAME:FILE[:SCALE[:MODE]], in the form of requests. Raises OptionError."""
    before, _, mode = text.rpartition(":")
    file, _, scale = before.rpartition(":")
    if not (mode.isdecimal() and scale and ":" in file and math.isfinite(_scale(scale))):
        return _with_image(text, "--control")
    return _with_image(before, "--control") | {"mode": int(mode)}


def lora_use(text: str) -> dict[str, Any]:
    """Return the adapter of NAME or NAME:SCALE, in the form of requests. Raises OptionError."""
    name, _, scale = text.partition(":")
    if not name or not math.isfinite(_scale(scale)):
        raise OptionError(f"--lora {text!r}: expected NAME or NAME:SCALE")
    return {"name": name, "scale": _scale(scale)}


def _scale(text: str) -> float:
    """Return the scale in a text: 1 for an empty one, NaN for any other text than a number."""
    try:
        return float(text) if text else 1.0
    except ValueError:
        return math.nan
