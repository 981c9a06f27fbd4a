"""The check whether a workflow can be honoured, before anything runs.

Every node that makes small values is computed, and those of a device are planned over what will be there: so a sampler
refuses what its model does not do by what is linked to it, not by its own words alone. Images and patterns are not
computed: what follows from them is known only when the workflow runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deployments.records.errors import ServiceError
from deployments.workflows.backend import Catalog
from deployments.workflows.evaluation import Evaluation, Outputs, Ready, outputs_of
from deployments.workflows.records import Link, NodeError, Refused, Workflow, WorkflowError
from deployments.workflows.table import KINDS
from deployments.workflows.values import PENDING, PENDING_LATENT, Later, Shown

_MAX_BYTES: Final = 2**28  # of texts at once
_PIXELS: Final = ("IMAGE", "MASK", "IMAGE,MASK")  # computing them takes a run's time and memory


@dataclass(frozen=True, slots=True)
class Checked:
    """The findings of a check: the output nodes that can run, and the faults of others."""

    outputs: tuple[str, ...]
    errors: tuple[NodeError, ...]


def check(workflow: Workflow, catalog: Catalog | None, targets: Sequence[str] | None = None) -> Checked:
    """Return which outputs can run, and what is wrong with nodes that they reach. `targets` are outputs; None is all.

    Without a catalog, files and samplers are taken to be good. Raises WorkflowError where there is none that could.
    """
    found = output_nodes(workflow) if targets is None else [one for one in targets if one in output_nodes(workflow)]
    unknown = _unknown_ends(workflow) if targets is None else []
    if not found:
        raise WorkflowError("Prompt has no outputs", "prompt_no_outputs", unknown)
    walk = Evaluation(workflow, KINDS, catalog, found, _MAX_BYTES)
    for ready in walk.ready():
        try:
            outputs = planned(ready, catalog)
            walk.give(ready.node.id, outputs)
        except (Refused, ServiceError, ValueError, ArithmeticError, MemoryError) as error:
            walk.fail(ready.node, fault(ready, error))
    return Checked(tuple(one for one in found if not walk.has_failed(one)), (*walk.errors, *unknown))


def output_nodes(workflow: Workflow) -> list[str]:
    """Return the nodes that save or show something."""
    return [node.id for node in workflow.nodes.values() if node.kind in KINDS and KINDS[node.kind].is_output]


def _unknown_ends(workflow: Workflow) -> list[NodeError]:
    """Return an error for each node of an unknown kind that nothing follows: it may save or show something."""
    taken = {
        value.node for node in workflow.nodes.values() for value in node.inputs.values() if isinstance(value, Link)
    }
    return [
        NodeError(one.id, one.kind, one.title, "missing_node_type", f"no node {one.kind!r} is known here")
        for one in workflow.nodes.values()
        if one.kind not in KINDS and one.id not in taken
    ]


def dependent_outputs(workflow: Workflow, node: str) -> list[str]:
    """Return the output nodes that a node leads to."""
    after: dict[str, list[str]] = {}
    for one in workflow.nodes.values():
        for value in one.inputs.values():
            if isinstance(value, Link):
                after.setdefault(value.node, []).append(one.id)
    reached, waiting = {node}, [node]
    while waiting:
        new = [one for one in after.get(waiting.pop(), ()) if one not in reached]
        reached.update(new)
        waiting += new
    return [one for one in output_nodes(workflow) if one in reached]


def planned(ready: Ready, catalog: Catalog | None) -> Outputs:
    """Return the values that stand for a node's outputs before it runs."""
    kind = ready.kind
    makes_pixels = any(one.type in _PIXELS for one in kind.outputs)
    lacks_catalog = kind.reads_catalog and catalog is None
    if ready.is_pending or lacks_catalog or kind.is_costly or (makes_pixels and not kind.is_opaque):
        return tuple(PENDING_LATENT if one.type == "LATENT" else PENDING for one in kind.outputs)
    results: list[Outputs] = []
    for arguments in ready.calls:
        result = kind.function(catalog, **arguments) if kind.reads_catalog else kind.function(**arguments)
        results.append(result.outputs if isinstance(result, Later | Shown) else result)
    return outputs_of(kind, results)


def fault(ready: Ready, error: BaseException) -> NodeError:
    """Return the exception of a node's function as an error of the node."""
    node = ready.node
    if isinstance(error, Refused):
        return NodeError(node.id, node.kind, node.title, error.type, error.message, "", error.input)
    if isinstance(error, ServiceError):
        return NodeError(node.id, node.kind, node.title, "custom_validation_failed", error.message, error.param or "")
    return NodeError(node.id, node.kind, node.title, "custom_validation_failed", str(error) or type(error).__name__)
