"""The inputs and outputs of a workflow that is served as a pipeline: nodes with a plain name for a title.

A plain name is one word, such as `prompt`. What pages write above nodes that nobody has named is none: it is their kind
(`KSampler`), a primitive's type (`Int`), or several words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

from configs.workflow import WorkflowInput, WorkflowOutput
from deployments.workflows.checking import output_nodes
from deployments.workflows.kinds import Input, Kind, flat_inputs
from deployments.workflows.records import ErrorType, Link, Node, NodeError, Workflow, WorkflowError
from deployments.workflows.table import KINDS

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_TYPES: Final[Mapping[str, Literal["text", "int", "float", "BOOL[-1]"]]] = {
    "STRING": "text",
    "COMBO": "text",
    "INT": "int",
    "FLOAT": "float",
    "BOOLEAN": "BOOL[-1]",
}
_SHOWN: Final[Mapping[str, Literal["text", "image"]]] = {"IMAGE": "image", "MASK": "image", "*": "text"}
_READS_FILES: Final[Mapping[str, str]] = {"LoadImage": "image", "LoadImageOutput": "image", "LoadImageMask": "image"}
_READS_VIDEOS: Final = ("LoadVideo",)
_BAD: Final[ErrorType] = "custom_validation_failed"

Ports: TypeAlias = tuple[dict[str, WorkflowInput], dict[str, WorkflowOutput]]


def find_ports(workflow: Workflow) -> Ports:
    """Return the inputs and outputs of a checked workflow, by name. Raises WorkflowError."""
    ends = output_nodes(workflow)
    reached = _reached(workflow, ends)
    errors = [*_foreign_files(reached), *_other_ends(workflow, ends)]
    inputs: dict[str, WorkflowInput] = {}
    for node in reached:
        for name, found in _inputs_of(node) if node.id not in ends else ():
            if not _NAME.fullmatch(name):
                errors.append(_error(node, f"the name {name!r} of its input is too long: at most 64 characters"))
            elif name in inputs:
                errors.append(_error(node, f"{name!r} is the name of node {inputs[name].node} already"))
            inputs[name] = found
    if errors:
        raise WorkflowError("the workflow cannot be a pipeline", "prompt_outputs_failed_validation", errors)
    if not inputs:
        raise WorkflowError(
            "no node is an input of the pipeline: give such a node a title of one word: prompt, or seed"
        )
    return inputs, _outputs_of([workflow.nodes[id_] for id_ in ends])


def with_values(workflow: Workflow, values: Mapping[tuple[str, str], Any]) -> Workflow:
    """Return the workflow with other values, by node and input."""
    nodes = dict(workflow.nodes)
    for (id_, name), value in values.items():
        nodes[id_] = replace(nodes[id_], inputs={**nodes[id_].inputs, name: value})
    return Workflow(nodes)


def _reached(workflow: Workflow, ends: list[str]) -> list[Node]:
    """Return the nodes that lead to the ends, in the order of the document."""
    reached, path = set(ends), list(ends)
    while path:
        links = [one.node for one in workflow.nodes[path.pop()].inputs.values() if isinstance(one, Link)]
        new = {id_ for id_ in links if id_ in workflow.nodes} - reached
        reached |= new
        path += new
    return [node for node in workflow.nodes.values() if node.id in reached]


def _inputs_of(node: Node) -> Iterator[tuple[str, WorkflowInput]]:
    """Yield a named node's values: the only one by the node's name, several by that and their own."""
    kind = KINDS.get(node.kind)
    if kind is None or not _is_named(node):
        return
    typed = [one for one in _fields(node, kind) if one.name in node.inputs and _is_typed_in(node.inputs[one.name])]
    for one in typed:
        name = node.title if len(typed) == 1 else f"{node.title}_{one.name.replace('.', '_')}"
        if _READS_FILES.get(node.kind) == one.name:
            yield name, WorkflowInput(node=node.id, input=one.name, type="image", required=True)
        else:
            yield name, WorkflowInput(node=node.id, input=one.name, type=_TYPES[one.type])


def _fields(node: Node, kind: Kind) -> Iterator[Input]:
    fields = flat_inputs(kind.inputs, lambda one: node.inputs.get(one.name, one.default))
    return (one for one in fields if one.is_widget and one.type in _TYPES)


def _is_typed_in(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _is_named(node: Node) -> bool:
    """Return whether somebody has given the node a plain name."""
    kind = node.kind.lower()
    return _NAME.fullmatch(node.title) is not None and node.title.lower() not in (kind, kind.removeprefix("primitive"))


def _foreign_files(nodes: list[Node]) -> Iterator[NodeError]:
    for node in nodes:
        if node.kind in _READS_VIDEOS:
            yield _error(node, "a pipeline's requests bring images and texts, and this node reads a video")
        if node.kind in _READS_FILES and not _is_named(node):
            yield _error(node, "a pipeline's images come with its requests: give the node a title of one word")


def _other_ends(workflow: Workflow, ends: list[str]) -> Iterator[NodeError]:
    for id_ in ends:
        if _end_type(node := workflow.nodes[id_]) is None:
            yield _error(node, "a pipeline gives images and texts, and this node saves something else")


def _end_type(node: Node) -> Literal["text", "image"] | None:
    """Return the type of what an output node saves or shows."""
    links = [one.type for one in KINDS[node.kind].inputs if one.linked_only]
    return _SHOWN.get(links[0]) if len(links) == 1 else None


def _outputs_of(ends: list[Node]) -> dict[str, WorkflowOutput]:
    """Return the outputs, images first: by their names, and those without one by their type and a number."""
    found: dict[str, WorkflowOutput] = {}
    for node in sorted(ends, key=lambda one: _end_type(one) != "image"):
        type_ = _end_type(node)
        assert type_ is not None
        name, number = node.title if _is_named(node) else type_, 1
        while name in found:
            number += 1
            name = f"{type_}_{number}"
        found[name] = WorkflowOutput(node=node.id, type=type_)
    return found


def _error(node: Node, message: str) -> NodeError:
    return NodeError(node.id, node.kind, node.title, _BAD, message)
