"""A workflow that runs: each node once, one after the other, with a cluster for what needs a device."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.records.errors import ServiceError
from deployments.workflows.backend import Backend, Events
from deployments.workflows.checking import fault, output_nodes
from deployments.workflows.evaluation import Evaluation, Outputs, Ready, outputs_of
from deployments.workflows.records import NodeError, Refused, Workflow
from deployments.workflows.table import KINDS
from deployments.workflows.values import Later, Shown


class NodeFailed(Exception):
    """A node failed while the workflow ran. Its `__cause__` is what it raised."""

    def __init__(self, error: NodeError) -> None:
        super().__init__(error)
        self.error = error

    def __str__(self) -> str:
        return str(self.error)


async def run(
    workflow: Workflow, backend: Backend, events: Events, targets: Sequence[str] | None = None
) -> dict[str, Mapping[str, Any]]:
    """Run the outputs that `check` found good (None: all), and return what nodes show, by their ids.

    Raises NodeFailed at the first fault. Cancelling it cancels what the backend does.
    """
    shown: dict[str, Mapping[str, Any]] = {}
    walk = Evaluation(workflow, KINDS, backend, output_nodes(workflow) if targets is None else targets)
    for ready in walk.ready():
        node = ready.node
        events.executing(node.id)
        try:
            outputs, found = await _run_node(ready, backend, events)
            walk.give(node.id, outputs)
        except (Refused, ServiceError, ValueError, ArithmeticError, MemoryError) as error:
            raise NodeFailed(fault(ready, error)) from error
        if found:
            shown[node.id] = found
        events.executed(node.id, found or None)
    if walk.errors:
        raise NodeFailed(walk.errors[0])
    return shown


async def _run_node(ready: Ready, backend: Backend, events: Events) -> tuple[Outputs, dict[str, Any]]:
    def report(value: int, max: int, preview: npt.NDArray[np.uint8] | None = None) -> None:
        events.progress(ready.node.id, value, max, preview)

    results: list[Outputs] = []
    shown: dict[str, Any] = {}
    for arguments in ready.calls:
        result = await _called(ready, arguments, backend)
        if isinstance(result, Later):
            result = await result.act(backend, report)
        if isinstance(result, Shown):
            for name, value in result.shown.items():
                shown[name] = [*shown.get(name, ()), *value]
            result = result.outputs
        results.append(result)
    return outputs_of(ready.kind, results), shown


async def _called(ready: Ready, arguments: Mapping[str, Any], backend: Backend) -> Any:
    kind = ready.kind
    if kind.reads_catalog:
        return kind.function(backend, **arguments)
    types = {one.type for one in kind.inputs} | {one.type for one in kind.outputs}
    if not types.isdisjoint({"IMAGE", "MASK", "IMAGE,MASK", "LATENT", "STRING"}):
        return await asyncio.to_thread(kind.function, **arguments)  # may take seconds: not on the event loop
    return kind.function(**arguments)
