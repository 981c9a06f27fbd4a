"""`atelier workflow …`: ComfyUI's workflows, in the API's form or as its page saves them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deployments.console.client import ClientError, Key, Url, find_client
from deployments.console.output import Json, OptionError, print_json
from deployments.console.workflows import WorkflowClient, read_document

if TYPE_CHECKING:
    from deployments.workflows.records import Workflow

app = typer.Typer(no_args_is_help=True, help="ComfyUI's workflows: check a file, run it in the cluster.")
_out = Console()

File = Annotated[Path, typer.Argument(help="A workflow: in the API's form, or as the page saves it.")]


@app.command()
def check(file: File, as_json: Json = False) -> None:
    """Tell which nodes of a workflow are not known, and which values are wrong. No cluster is asked: models are taken
    to be there. Exit code 1 where something is wrong."""
    from deployments.workflows.checking import check as check_nodes
    from deployments.workflows.records import WorkflowError

    workflow = _read(file)
    try:
        found = check_nodes(workflow, None)
        outputs, faults = found.outputs, [str(error) for error in found.errors]
    except WorkflowError as error:
        outputs, faults = (), [error.message, *map(str, error.errors)]
    if as_json:
        print_json({"nodes": len(workflow.nodes), "outputs": list(outputs), "errors": faults})
    else:
        for line in faults:
            _out.print(line, markup=False, soft_wrap=True)
        can_run = ", ".join(outputs) or "none"
        _out.print(f"{len(workflow.nodes)} nodes; outputs that can run: {can_run}", markup=False, soft_wrap=True)
    if faults:
        raise typer.Exit(1)


@app.command()
def run(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for saved images.")] = Path("out"),
    values: Annotated[
        list[str] | None, typer.Option("--set", help="NODE.INPUT=VALUE, the node by id or title; may be repeated.")
    ] = None,
    images: Annotated[
        list[str] | None, typer.Option("--image", help="NODE=FILE: an image for LoadImage; may be repeated.")
    ] = None,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Run a workflow in the cluster, and fetch what it saves."""
    from deployments.workflows.reading import api_form

    client = WorkflowClient(find_client(url, key).url, key)
    workflow = _read(file)
    prompt = api_form(workflow)
    for text in values or []:
        place, value = _parted(text, "--set", "NODE.INPUT=VALUE")
        name, dot, input_name = place.rpartition(".")
        if not dot:
            raise OptionError(f"--set {text}: expected NODE.INPUT=VALUE")
        prompt[_node(workflow, name, "--set")]["inputs"][input_name] = _value(value)
    for text in images or []:
        name, picture = _parted(text, "--image", "NODE=FILE")
        prompt[_node(workflow, name, "--image")]["inputs"]["image"] = client.upload(Path(picture))
    prompt_id, faults = client.begin(prompt, {"extra_pnginfo": {"workflow": read_document(file)}})
    for line in faults:
        _out.print(f"left out: {line}", markup=False, soft_wrap=True)
    try:
        with _out.status(f"running {file.name}"):
            shown = client.ended(prompt_id)
    except KeyboardInterrupt:
        client.interrupt(prompt_id)
        raise
    written = _fetched(client, shown, output)
    if as_json:
        print_json({"prompt_id": prompt_id, "outputs": shown, "files": list(map(str, written))})
        return
    for found in shown.values():
        for line in found.get("text", ()):
            _out.print(str(line), markup=False, soft_wrap=True)
    for path in written:
        _out.print(f"wrote {path}", markup=False, soft_wrap=True)


def _read(file: Path) -> Workflow:
    from deployments.workflows.reading import read_workflow
    from deployments.workflows.records import WorkflowError

    try:
        return read_workflow(read_document(file), random.Random())
    except WorkflowError as error:
        raise ClientError(f"{file}: {error}") from None


def _parted(text: str, option: str, form: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise OptionError(f"{option} {text}: expected {form}")
    return name, value


def _node(workflow: Workflow, name: str, option: str) -> str:
    """Return the id of a node, by its id or its title."""
    if name in workflow.nodes:
        return name
    found = [node.id for node in workflow.nodes.values() if node.title == name]
    if len(found) != 1:
        known = ", ".join(f"{node.id} ({node.title})" for node in list(workflow.nodes.values())[:30])
        raise OptionError(f"{option} {name}: {len(found) or 'no'} nodes have that name; there are {known}")
    return found[0]


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return {"__value__": value} if isinstance(value, list) else value


def _fetched(client: WorkflowClient, shown: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the images that nodes saved, else those that they show, into a folder; names are the server's, no paths."""
    images = [image for found in shown.values() for image in found.get("images", ())]
    written = []
    for image in [image for image in images if image.get("type") == "output"] or images:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / Path(str(image.get("filename", ""))).name
        path.write_bytes(client.file(image))
        written.append(path)
    return written
