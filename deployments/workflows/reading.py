"""A document to a workflow: the API's form, or the page's, which a saved file has."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

from deployments.workflows.page_form import read_page_form
from deployments.workflows.records import MAX_INPUTS, MAX_NODES, MAX_TEXT, Link, Node, Workflow, WorkflowError

_MAX_NAME: Final = 512  # characters of an id, a kind or an input's name
_MAX_DEPTH: Final = 32  # of a literal


def read_workflow(document: Any, draws: random.Random | None = None) -> Workflow:
    """Return the nodes of a document of either form.

    In the page's form, `draws` picks among the words of `{a|b}`; without it they are left as they are.
    Raises WorkflowError.
    """
    if not isinstance(document, Mapping):
        raise WorkflowError(f"expected an object with nodes, got {type(document).__name__}", "invalid_prompt")
    if isinstance(document.get("nodes"), list):
        return checked_sizes(read_page_form(document, draws))
    return checked_sizes(_read_api_form(document))


def api_form(workflow: Workflow) -> dict[str, Any]:
    """Return a workflow as a document of the API's form."""
    return {
        node.id: {
            "class_type": node.kind,
            "inputs": {
                name: [value.node, value.output] if isinstance(value, Link) else value
                for name, value in node.inputs.items()
            },
            "_meta": {"title": node.title},
        }
        for node in workflow.nodes.values()
    }


def _read_api_form(document: Mapping[str, Any]) -> Workflow:
    if not document:
        raise WorkflowError("No prompt provided: the workflow has no nodes", "no_prompt")
    if len(document) > MAX_NODES:
        raise WorkflowError(f"{len(document)} nodes: at most {MAX_NODES}", "invalid_prompt")
    nodes = {}
    for id, node in document.items():
        if not isinstance(node, Mapping) or not isinstance(node.get("class_type"), str):
            raise WorkflowError(f"node {id}: expected an object with class_type and inputs", "invalid_prompt")
        inputs = node.get("inputs", {})
        if not isinstance(inputs, Mapping):
            raise WorkflowError(
                f"node {id}: expected inputs as an object, got {type(inputs).__name__}", "invalid_prompt"
            )
        meta = node.get("_meta")
        title = meta.get("title") if isinstance(meta, Mapping) else None
        read = {str(name): _value(id, name, value) for name, value in inputs.items()}
        nodes[str(id)] = Node(
            str(id), node["class_type"], title if isinstance(title, str) else node["class_type"], read
        )
    return Workflow(nodes)


def _value(id: str, name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if (
        len(value) != 2
        or not isinstance(value[0], str | int)
        or isinstance(value[1], bool)
        or not isinstance(value[1], int)
    ):
        raise WorkflowError(f"node {id}, input {name!r}: expected a link as [node, output]", "invalid_prompt")
    return Link(str(value[0]), value[1])


def checked_sizes(workflow: Workflow) -> Workflow:
    """Return the workflow, or raise WorkflowError where something of it is larger than anybody writes."""
    if len(workflow.nodes) > MAX_NODES:
        raise WorkflowError(f"{len(workflow.nodes)} nodes: at most {MAX_NODES}", "invalid_prompt")
    for node in workflow.nodes.values():
        if len(node.inputs) > MAX_INPUTS:
            raise WorkflowError(
                f"{node.shown[:200]}: {len(node.inputs)} inputs, at most {MAX_INPUTS}", "invalid_prompt"
            )
        if max(map(len, (node.id, node.kind, node.title, *node.inputs))) > _MAX_NAME:
            raise WorkflowError(f"node {node.id[:80]}: a name of more than {_MAX_NAME} characters", "invalid_prompt")
        for name, value in node.inputs.items():
            if not _is_small(value, _MAX_DEPTH):
                raise WorkflowError(f"{node.shown}, input {name!r}: the value is too large", "invalid_prompt")
    return workflow


def _is_small(value: Any, depth: int) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    if isinstance(value, Mapping | list):
        inner = value.values() if isinstance(value, Mapping) else value
        return depth > 0 and len(value) <= MAX_TEXT and all(_is_small(one, depth - 1) for one in inner)
    return not isinstance(value, int) or value.bit_length() <= 1024
