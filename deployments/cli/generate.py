"""The commands that make images and talk to language models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from configs.cluster import ClusterConfig
from deployments.cli.client import Client, ClientError, Images

out = Console()


def generate_images(
    body: dict[str, Any], output: Path, as_json: bool, *, client: Client | None, config: ClusterConfig | None
) -> None:
    """Through the cluster of `client`, or in this process with the models of `config`."""
    if client is not None:
        with out.status(f"generating with {body['model']}"):
            images = client.generate(**body)
    elif config is not None:
        images = _generate_locally(body, config, quiet=as_json)
    paths = _save(images.files, output)
    details = images.details | {"files": [str(path) for path in paths]}
    details.pop("data", None)
    if as_json:
        sys.stdout.write(json.dumps(details) + "\n")
        return
    for path in paths:
        out.print(f"wrote {path}", markup=False, soft_wrap=True)
    stages = "  ".join(f"{stage} {ms:.0f}" for stage, ms in details["timings_ms"].items())
    out.print(f"seed {details['seed']}   ms: {stages}")
    for warning in details["warnings"]:
        out.print(f"[yellow]note:[/yellow] {escape(warning)}")


def converse(client: Client, model: str, message: str | None) -> None:
    """One answer, or a conversation until the end of input."""
    history: list[dict[str, str]] = []
    while True:
        text = message if message is not None else _ask()
        if text is None:
            return
        history.append({"role": "user", "content": text})
        answer = ""
        for piece in client.chat_stream(model=model, messages=history):
            answer += piece
            out.print(piece, end="", markup=False, highlight=False)
        out.print()
        if message is not None:
            return
        history.append({"role": "assistant", "content": answer})


def _generate_locally(body: dict[str, Any], config: ClusterConfig, *, quiet: bool) -> Images:
    from pydantic import ValidationError

    from deployments.ingress.openai.images import ImagesBody, encode_image
    from deployments.local import LocalModels

    try:
        request = ImagesBody(**{key: value for key, value in body.items() if value is not None}).record()
    except ValidationError as error:
        first = error.errors()[0]
        raise ClientError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task(f"denoising with {request.model}", total=None)
        result = LocalModels(config).generate(
            request, lambda done, total: progress.update(task, completed=done, total=total)
        )
    details = {
        "model": result.model,
        "seed": result.seed,
        "num_inference_steps": result.num_inference_steps,
        "timings_ms": result.timings_ms,
        "warnings": list(result.warnings),
    }
    return Images([encode_image(image, "png") for image in result.images], details)


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


def _ask() -> str | None:
    try:
        text = input("> ")
    except (EOFError, KeyboardInterrupt):
        return None
    return text or None
