"""Plans of pipelines from their configs, or every mistake in them. Pure but for the import of functions.

Checked twice, because the kinds of models are known for sure once they are in the store: by `check_pipeline` when the
config is loaded, by `plan_pipeline` when the models are known. Both report what `configs.pipeline` could not know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

from cluster.registry.directory import ModelRecord
from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config, located_problems
from configs.pipeline import (
    PipelineConfig,
    PipelineProblem,
    Reference,
    StageConfig,
    is_optional,
    nearest_name,
    plain_type,
)
from deployments.pipelines.edge_types import (
    MODEL_KINDS,
    TOKENIZER,
    EdgeType,
    Parameter,
    Ports,
    edge_type,
    ports_of,
    ports_of_workflow,
)
from deployments.pipelines.functions import fill_template, missing_fields
from deployments.pipelines.plans import PIPELINE_INPUT, Action, Edge, PipelinePlan, SegmentPlan, StagePlan, form_units
from deployments.pipelines.records import Signature
from deployments.pipelines.stage_functions import FunctionUnusable, find_function

DEFAULT_MAX_BATCH_SIZE = 32


class PipelineUnusable(ValueError):
    """A pipeline has mistakes; `problems` locate them."""

    def __init__(self, pipeline: str, problems: list[PipelineProblem]) -> None:
        lines = "; ".join(f"{'.'.join(map(str, problem.location))}: {problem.text}" for problem in problems)
        super().__init__(f"pipeline {pipeline!r}: {lines}")
        self.problems = tuple(problems)


def check_pipeline(
    config: PipelineConfig, models: Mapping[str, ModelRecord | None] | None = None
) -> list[PipelineProblem]:
    """Return the mistakes that a pipeline has for any kind of its unknown models.

    `models` maps ids to models, None for an unknown one; without it, all are unknown.
    """
    return _check_pipeline(config, models).problems


def plan_pipeline(
    config: PipelineConfig, models: Mapping[str, ModelRecord], max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
) -> PipelinePlan:
    """Return the plan of a pipeline. `models` are all known ones, by id.

    Segments have memory planned for `max_batch_size` items. Raises PipelineUnusable with all problems.
    """
    checked = _check_pipeline(config, models)
    if checked.problems:
        raise PipelineUnusable(config.id, checked.problems)
    by_name = {stage.name: _stage_plan(checked, stage) for stage in config.stages}
    order = TopologicalSorter({stage.name: stage.needs for stage in by_name.values()}).static_order()
    stages = [by_name[name] for name in order]
    outputs = {name: checked.edge(reference) for name, reference in config.output_references.items()}
    output_types = {name: checked.type_of(edge) for name, edge in outputs.items()}
    signature = Signature(
        inputs=tuple(
            checked.inputs[name].spec(name, optional=is_optional(text)) for name, text in config.inputs.items()
        ),
        outputs=tuple(type_.spec(name) for name, type_ in output_types.items()),
        description=config.description,
    )
    units = form_units(config.id, stages, list(outputs.values()), max_batch_size)
    return PipelinePlan(config.id, signature, checked.inputs, tuple(units), outputs, output_types)


def plan_segments(
    configs: Iterable[PipelineConfig], models: Mapping[str, ModelRecord], max_batch_size: int
) -> list[SegmentPlan]:
    """Return the segments of all pipelines that run with these models, for a replica to reserve their memory."""
    segments: list[SegmentPlan] = []
    for config in configs:
        with contextlib.suppress(PipelineUnusable):  # who asks for it is told why
            segments += plan_pipeline(config, models, max_batch_size).segments()
    return segments


def _stage_plan(checked: _CheckedPipeline, stage: StageConfig) -> StagePlan:
    ports = checked.ports[stage.name]
    assert ports is not None
    edges = {name: checked.edge(reference) for name, reference in stage.references.items()}
    target = stage.function or stage.tokenizer or stage.model or ""
    return StagePlan(stage.name, checked.actions[stage.name], target, edges, stage.literals, dict(ports.outputs))


_ACTIONS: Mapping[str, Action] = {
    "diffusion": "generate",
    "llm": "write",
    "embedding": "embed",
    "reranker": "score",
    "classifier": "score",
    "head": "head",
    "program": "program",
    "upscaler": "upscale",
}


@dataclass(slots=True)
class _CheckedPipeline:
    """A pipeline with the types of its edges. `ports` has None for a stage of unknown ports."""

    inputs: dict[str, EdgeType]
    optional: frozenset[str]
    ports: dict[str, Ports | None] = field(default_factory=dict)
    actions: dict[str, Action] = field(default_factory=dict)
    problems: list[PipelineProblem] = field(default_factory=list)

    def edge(self, reference: Reference) -> Edge:
        if reference.source in self.inputs:
            return Edge(PIPELINE_INPUT, reference.source)
        ports = self.ports[reference.source]
        assert ports is not None
        return Edge(reference.source, reference.output or next(iter(ports.outputs)))

    def type_of(self, edge: Edge) -> EdgeType:
        if edge.stage == PIPELINE_INPUT:
            return self.inputs[edge.name]
        ports = self.ports[edge.stage]
        assert ports is not None
        return ports.outputs[edge.name]


def _check_pipeline(
    config: PipelineConfig, models: Mapping[str, ModelRecord | None] | Mapping[str, ModelRecord] | None
) -> _CheckedPipeline:
    """Check all stages and edges, and collect every problem. `models` None: not known yet, nothing is said of them."""
    inputs = {name: edge_type(plain_type(text)) for name, text in config.inputs.items()}
    optional = frozenset(name for name, text in config.inputs.items() if is_optional(text))
    checked = _CheckedPipeline(inputs, optional)
    for index, stage in enumerate(config.stages):
        try:
            checked.ports[stage.name], checked.actions[stage.name] = _ports_of_stage(stage, models)
        except _Unknown as error:
            checked.ports[stage.name] = None
            checked.problems.append(PipelineProblem(("stages", index, error.key), f"stage {stage.name!r}: {error}"))
    for index, stage in enumerate(config.stages):
        ports = checked.ports[stage.name]
        found = [] if ports is None else [*_parameter_problems(checked, stage, ports)]
        found += _output_problems(checked, {("inputs", name): ref for name, ref in stage.references.items()})
        checked.problems += [
            PipelineProblem(("stages", index, *problem.location), f"stage {stage.name!r}: {problem.text}")
            for problem in found
        ]
    checked.problems += _output_problems(
        checked, {("outputs", name): ref for name, ref in config.output_references.items()}
    )
    return checked


class _Unknown(Exception):
    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def _ports_of_stage(stage: StageConfig, models: Mapping[str, ModelRecord | None] | None) -> tuple[Ports | None, Action]:
    if stage.function is not None:
        try:
            return find_function(stage.function).ports, "function"
        except FunctionUnusable as error:
            raise _Unknown("function", str(error)) from None
    key = "tokenizer" if stage.tokenizer is not None else "model"
    id_ = stage.tokenizer or stage.model or ""
    if models is not None and id_ not in models:
        raise _Unknown(key, f"unknown model {id_!r}{nearest_name(id_, models)}")
    model = models[id_] if models else None
    if model is None:
        return (TOKENIZER, "tokenize") if stage.tokenizer else (None, "generate")
    if model.workflow is not None and stage.tokenizer is None:
        return ports_of_workflow(model.workflow), "workflow"
    if model.kind is None:
        raise _Unknown(key, f"model {id_!r} is {model.state}{model.error and ': '}{model.error}")
    if stage.tokenizer is not None:
        if model.kind != "embedding":
            raise _Unknown(
                key,
                f"model {id_!r} ({model.kind}) is no embedding model; only their tokenizers can be used",
            )
        return TOKENIZER, "tokenize"
    if model.signature is not None and not model.signature.has_batch:
        raise _Unknown(key, f"program {id_!r} has no rows of any number in its first dimension, one for each item")
    ports = ports_of(model)
    if ports is None:
        raise _Unknown(key, f"model {id_!r} ({model.kind}) cannot be a stage; kinds that can: {', '.join(MODEL_KINDS)}")
    return ports, _ACTIONS[model.kind]


def _parameter_problems(checked: _CheckedPipeline, stage: StageConfig, ports: Ports) -> Iterator[PipelineProblem]:
    target = stage.function or stage.tokenizer or stage.model
    for name in stage.inputs:
        parameter = ports.parameters.get(name) or ports.extra
        if parameter is None:
            yield PipelineProblem(
                ("inputs", name), f"{target} has no parameter {name!r}{nearest_name(name, ports.parameters)}"
            )
        elif name in stage.literals:
            if not parameter.takes_literal(stage.literals[name]):
                yield PipelineProblem(("inputs", name), f"expected {parameter}, got {stage.literals[name]!r:.80}")
        else:
            yield from _edge_problems(checked, name, parameter, stage.references[name])
    if stage.function == fill_template.__name__ and isinstance(template := stage.literals.get("template"), str):
        values = stage.inputs.keys() - {"template"}
        for name in missing_fields(template, values):
            yield PipelineProblem(("inputs",), f"the template wants {name!r}{nearest_name(name, sorted(values))}")
    for name, parameter in ports.parameters.items():
        if parameter.required and name not in stage.inputs:
            yield PipelineProblem(("inputs",), f"{target} needs {name!r} ({parameter})")
    for name, partner in ports.goes_with.items():
        if name in stage.inputs and partner not in stage.inputs:
            yield PipelineProblem(("inputs", name), f"{target} takes it with {partner!r} only")
    for group in ports.one_of:
        given = sorted(group & stage.inputs.keys())
        if len(given) != 1:
            names = " and ".join(sorted(group))
            yield PipelineProblem(
                ("inputs",), f"{target} needs exactly one of {names}, got {' and '.join(given) or 'none'}"
            )
        elif (source := stage.references.get(given[0])) and source.source in checked.optional:
            yield PipelineProblem(("inputs", given[0]), f"it must be there, but {source} may be left out of a request")


def _edge_problems(
    checked: _CheckedPipeline, name: str, parameter: Parameter, reference: Reference
) -> Iterator[PipelineProblem]:
    where = ("inputs", name)
    if parameter.element is not None:
        yield PipelineProblem(where, f"expected a {parameter} in the config, got the reference {reference}")
        return
    if parameter.required and reference.source in checked.optional:
        yield PipelineProblem(where, f"it must be there, but {reference} may be left out of a request")
    if not _is_known(checked, reference):
        return
    given = checked.type_of(checked.edge(reference))
    if not any(type_.accepts(given) for type_ in parameter.types):
        yield PipelineProblem(where, f"expected {parameter}, but {reference} is {given}")


def _is_known(checked: _CheckedPipeline, reference: Reference) -> bool:
    if reference.source in checked.inputs:
        return True
    ports = checked.ports.get(reference.source)
    if ports is None:
        return False
    return reference.output in ports.outputs or (reference.output is None and len(ports.outputs) == 1)


def _output_problems(
    checked: _CheckedPipeline, references: Mapping[tuple[str, str], Reference]
) -> Iterator[PipelineProblem]:
    """Yield references to stages that have no such output, or several to choose from."""
    for where, reference in references.items():
        ports = checked.ports.get(reference.source)
        if reference.source in checked.inputs or ports is None or _is_known(checked, reference):
            continue
        names = ", ".join(f"${reference.source}.{name}" for name in ports.outputs)
        if reference.output is None:
            yield PipelineProblem(where, f"stage {reference.source!r} has several outputs; choose one of {names}")
        else:
            yield PipelineProblem(
                where, f"stage {reference.source!r} has no output {reference.output!r} (known: {names})"
            )


def load_checked_config(path: str | Path) -> ClusterConfig:
    """Load a cluster config, and import the functions that its pipelines name.

    Raises ConfigFileError with every problem that was found.
    """
    config = load_cluster_config(path)
    problems = [
        (("pipelines", index, *problem.location), problem.text)
        for index, pipeline in enumerate(config.pipelines)
        for problem in check_pipeline(pipeline)
    ]
    if problems:
        raise located_problems(Path(path), problems)
    return config
