"""Config -> plan, or every mistake in it. Pure but for the import of functions.

Two stages, because the kinds of models are known only once they are in the store: `check_functions` when the config
is loaded, `plan_pipeline` when the models are known. Both report what `configs.pipeline` could not know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter

from configs.pipeline import PipelineConfig, PipelineProblem, StepConfig, is_optional
from deployments.pipelines.checking import CheckedPipeline, check_pipeline
from deployments.pipelines.plans import PipelinePlan, SegmentPlan, StepPlan
from deployments.pipelines.ports import KnownModel
from deployments.pipelines.records import Signature
from deployments.pipelines.segmenting import form_units

DEFAULT_MAX_BATCH_SIZE = 32


class PipelineUnusable(ValueError):
    """A pipeline that cannot run as it is written. `problems` say where."""

    def __init__(self, pipeline: str, problems: list[PipelineProblem]) -> None:
        lines = "; ".join(f"{'.'.join(map(str, problem.location))}: {problem.text}" for problem in problems)
        super().__init__(f"pipeline {pipeline!r}: {lines}")
        self.problems = tuple(problems)


def check_functions(config: PipelineConfig) -> list[PipelineProblem]:
    """What is wrong with the pipeline whatever its models turn out to be."""
    return check_pipeline(config, None).problems


def plan_pipeline(
    config: PipelineConfig, models: Mapping[str, KnownModel], max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
) -> PipelinePlan:
    """`models`: all that are known, by id. `max_batch_size`: items that segments have memory planned for.

    Raises PipelineUnusable with all problems.
    """
    checked = check_pipeline(config, models)
    if checked.problems:
        raise PipelineUnusable(config.id, checked.problems)
    by_name = {step.name: _step_plan(checked, step) for step in config.steps}
    order = TopologicalSorter({step.name: step.needs for step in by_name.values()}).static_order()
    steps = [by_name[name] for name in order]
    outputs = {name: checked.edge(reference) for name, reference in config.output_references.items()}
    output_types = {name: checked.type_of(edge) for name, edge in outputs.items()}
    signature = Signature(
        inputs=tuple(
            checked.inputs[name].spec(name, optional=is_optional(text)) for name, text in config.inputs.items()
        ),
        outputs=tuple(type_.spec(name) for name, type_ in output_types.items()),
        description=config.description,
    )
    units = form_units(config.id, steps, list(outputs.values()), max_batch_size)
    return PipelinePlan(config.id, signature, checked.inputs, tuple(units), outputs, output_types)


def plan_segments(
    configs: Iterable[PipelineConfig], models: Mapping[str, KnownModel], max_batch_size: int
) -> list[SegmentPlan]:
    """Of all pipelines that can run with these models: what a replica has to have memory for."""
    segments: list[SegmentPlan] = []
    for config in configs:
        with contextlib.suppress(PipelineUnusable):  # who asks for it is told why
            segments += plan_pipeline(config, models, max_batch_size).segments()
    return segments


def _step_plan(checked: CheckedPipeline, step: StepConfig) -> StepPlan:
    ports = checked.ports[step.name]
    assert ports is not None
    edges = {name: checked.edge(reference) for name, reference in step.references.items()}
    target = step.function or step.tokenizer or step.model or ""
    return StepPlan(step.name, checked.actions[step.name], target, edges, step.literals, dict(ports.outputs))
