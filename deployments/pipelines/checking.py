"""What can be wrong with the edges of a pipeline, once it is known what its steps take and give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from configs.pipeline import (
    PipelineConfig,
    PipelineProblem,
    Reference,
    StepConfig,
    is_optional,
    nearest_name,
    plain_type,
)
from deployments.pipelines.edge_types import EdgeType, edge_type
from deployments.pipelines.plans import PIPELINE_INPUT, Action, Edge
from deployments.pipelines.ports import MODEL_KINDS, TOKENIZER, KnownModel, Parameter, Ports, ports_of
from deployments.pipelines.step_functions import FunctionUnusable, find_function

_ACTIONS: Mapping[str, Action] = {"diffusion": "generate", "llm": "write", "embedding": "embed", "head": "head"}


@dataclass(slots=True)
class CheckedPipeline:
    """What is known of a pipeline. `ports` has None for a step that nothing is known of."""

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
        if edge.step == PIPELINE_INPUT:
            return self.inputs[edge.name]
        ports = self.ports[edge.step]
        assert ports is not None
        return ports.outputs[edge.name]


def check_pipeline(config: PipelineConfig, models: Mapping[str, KnownModel] | None) -> CheckedPipeline:
    """`models` None: not known yet, and nothing said about them. Collects every problem."""
    inputs = {name: edge_type(plain_type(text)) for name, text in config.inputs.items()}
    optional = frozenset(name for name, text in config.inputs.items() if is_optional(text))
    checked = CheckedPipeline(inputs, optional)
    for index, step in enumerate(config.steps):
        try:
            checked.ports[step.name], checked.actions[step.name] = _ports_of_step(step, models)
        except _Unknown as error:
            checked.ports[step.name] = None
            checked.problems.append(PipelineProblem(("steps", index, error.key), f"step {step.name!r}: {error}"))
    for index, step in enumerate(config.steps):
        ports = checked.ports[step.name]
        found = [] if ports is None else [*_parameter_problems(checked, step, ports)]
        found += _output_problems(checked, {("inputs", name): ref for name, ref in step.references.items()})
        checked.problems += [
            PipelineProblem(("steps", index, *problem.location), f"step {step.name!r}: {problem.text}")
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


def _ports_of_step(step: StepConfig, models: Mapping[str, KnownModel] | None) -> tuple[Ports | None, Action]:
    if step.function is not None:
        try:
            return find_function(step.function).ports, "function"
        except FunctionUnusable as error:
            raise _Unknown("function", str(error)) from None
    key = "tokenizer" if step.tokenizer is not None else "model"
    id_ = step.tokenizer or step.model or ""
    if models is None:
        return (TOKENIZER, "tokenize") if step.tokenizer else (None, "generate")
    if id_ not in models:
        raise _Unknown(key, f"unknown model {id_!r}{nearest_name(id_, models)}")
    if models[id_].problem:
        raise _Unknown(key, f"model {id_!r} {models[id_].problem}")
    kind = models[id_].kind
    if step.tokenizer is not None:
        if kind != "embedding":
            raise _Unknown(key, f"model {id_!r} ({kind}) is no embedding model; only those lend their tokenizer")
        return TOKENIZER, "tokenize"
    ports = ports_of(models[id_])
    if ports is None:
        raise _Unknown(key, f"model {id_!r} ({kind}) cannot be a step; kinds that can: {', '.join(MODEL_KINDS)}")
    return ports, _ACTIONS[kind]


def _parameter_problems(checked: CheckedPipeline, step: StepConfig, ports: Ports) -> Iterator[PipelineProblem]:
    target = step.function or step.tokenizer or step.model
    for name in step.inputs:
        parameter = ports.parameters.get(name) or ports.extra
        if parameter is None:
            yield PipelineProblem(
                ("inputs", name), f"{target} has no parameter {name!r}{nearest_name(name, ports.parameters)}"
            )
        elif name in step.literals:
            if not parameter.takes_literal(step.literals[name]):
                yield PipelineProblem(("inputs", name), f"expected {parameter}, got {step.literals[name]!r:.80}")
        else:
            yield from _edge_problems(checked, name, parameter, step.references[name])
    for name, parameter in ports.parameters.items():
        if parameter.required and name not in step.inputs:
            yield PipelineProblem(("inputs",), f"{target} needs {name!r} ({parameter})")
    for name, partner in ports.goes_with.items():
        if name in step.inputs and partner not in step.inputs:
            yield PipelineProblem(("inputs", name), f"{target} takes it with {partner!r} only")
    for group in ports.one_of:
        given = sorted(group & step.inputs.keys())
        if len(given) != 1:
            names = " and ".join(sorted(group))
            yield PipelineProblem(
                ("inputs",), f"{target} needs exactly one of {names}, got {' and '.join(given) or 'none'}"
            )
        elif (source := step.references.get(given[0])) and source.source in checked.optional:
            yield PipelineProblem(("inputs", given[0]), f"it must be there, but {source} may be left out of a request")


def _edge_problems(
    checked: CheckedPipeline, name: str, parameter: Parameter, reference: Reference
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


def _is_known(checked: CheckedPipeline, reference: Reference) -> bool:
    if reference.source in checked.inputs:
        return True
    ports = checked.ports.get(reference.source)
    if ports is None:
        return False
    return reference.output in ports.outputs or (reference.output is None and len(ports.outputs) == 1)


def _output_problems(
    checked: CheckedPipeline, references: Mapping[tuple[str, str], Reference]
) -> Iterator[PipelineProblem]:
    """References to steps that have no such output, or several to choose from."""
    for where, reference in references.items():
        ports = checked.ports.get(reference.source)
        if reference.source in checked.inputs or ports is None or _is_known(checked, reference):
            continue
        names = ", ".join(f"${reference.source}.{name}" for name in ports.outputs)
        if reference.output is None:
            yield PipelineProblem(where, f"step {reference.source!r} has several outputs; choose one of {names}")
        else:
            yield PipelineProblem(
                where, f"step {reference.source!r} has no output {reference.output!r} (known: {names})"
            )
