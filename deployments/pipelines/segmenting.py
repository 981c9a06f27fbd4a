"""Which steps of a pipeline run together in one call of the text-encoder service, and in which memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from deployments.pipelines.edge_types import TEXT, TOKENS
from deployments.pipelines.memory_plan import BufferNeed, plan_memory
from deployments.pipelines.plans import IN_ENCODER, Edge, SegmentPlan, StepPlan, Unit
from deployments.pipelines.tensor_values import NUMPY_DTYPES


def form_units(pipeline: str, steps: Sequence[StepPlan], outputs: Sequence[Edge], max_batch_size: int) -> list[Unit]:
    """`steps` in an order in which they can run. The units come in such an order too.

    A step joins the segment that it takes something from when that makes the segment wait for nothing more: what
    can run side by side still does, and no cycle of segments can come to be.
    """
    groups: list[list[StepPlan]] = []
    group_of: dict[str, list[StepPlan]] = {}
    waits_for = _ancestors(steps)
    encoded: set[str] = set()
    for step in steps:
        # A function that takes what an encoder made runs there too: labels are smaller than vectors.
        if step.action in IN_ENCODER or (step.action == "function" and step.needs & encoded):
            encoded.add(step.name)
        group = _joined(step, group_of, waits_for, encoded)
        if group is None:
            group = []
            groups.append(group)
        group.append(step)
        group_of[step.name] = group
    return [_unit(pipeline, group, steps, outputs, max_batch_size, encoded) for group in groups]


def _joined(
    step: StepPlan,
    group_of: Mapping[str, list[StepPlan]],
    waits_for: Mapping[str, frozenset[str]],
    encoded: set[str],
) -> list[StepPlan] | None:
    if step.name not in encoded:
        return None
    for source in sorted(step.needs & encoded):
        group = group_of[source]
        inside = {member.name for member in group}
        awaited = frozenset[str]().union(*(waits_for[name] for name in inside)) - inside
        if step.needs - inside <= awaited:
            return group
    return None


def _ancestors(steps: Sequence[StepPlan]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for step in steps:
        found[step.name] = step.needs.union(*(found[name] for name in step.needs))
    return found


def _unit(
    pipeline: str,
    group: Sequence[StepPlan],
    steps: Sequence[StepPlan],
    outputs: Sequence[Edge],
    max_batch_size: int,
    encoded: set[str],
) -> Unit:
    if group[0].name not in encoded:
        return group[0]
    inside = {step.name for step in group}
    wanted = {edge for step in steps if step.name not in inside for edge in step.edges.values()} | set(outputs)
    results = tuple(sorted(edge for edge in wanted if edge.step in inside))
    buffers = _buffers(group, max_batch_size)
    memory = plan_memory(_needs(group, buffers))
    return SegmentPlan(pipeline, tuple(group), results, max_batch_size, buffers, memory)


def _buffers(group: Sequence[StepPlan], max_batch_size: int) -> dict[Edge, tuple[int, ...]]:
    """Of what models give: texts and token ids are Python's, what functions give is numpy's."""
    shapes = {}
    for step in group:
        if step.action not in ("embed", "head"):
            continue
        for name, type_ in step.outputs.items():
            if type_ not in (TEXT, TOKENS) and -1 not in type_.shape[1:]:
                shapes[Edge(step.name, name)] = (max_batch_size, *type_.shape[1:])
    return shapes


def _needs(group: Sequence[StepPlan], buffers: Mapping[Edge, tuple[int, ...]]) -> list[BufferNeed[Edge]]:
    types = {Edge(step.name, name): type_ for step in group for name, type_ in step.outputs.items()}
    needs = []
    for edge, shape in buffers.items():
        first = next(at for at, step in enumerate(group) if step.name == edge.step)
        last = max((at for at, step in enumerate(group) if edge in step.edges.values()), default=first)
        nbytes = math.prod(shape) * NUMPY_DTYPES[types[edge].datatype].itemsize
        needs.append(BufferNeed(edge, nbytes, first, last))
    return needs
