"""A pipeline: models and functions chained to one thing that is served under one name (Triton calls it an ensemble).

    pipelines:
      - id: sum-to-digit
        description: Draws the answer of a sum
        inputs:                       # name: type
          prompt: text
          seed: optional int          # may be left out of a request; so is what it feeds then
        stages:                        # in any order: who needs what decides, and what can run side by side does
          - {name: question, function: sum_question, inputs: {text: $prompt}}
          - {name: adder, model: adder, inputs: {message: $question, temperature: 0}}
          - {name: digit, function: single_digit, inputs: {text: $adder}}
          - {name: word, function: number_word, inputs: {number: $digit}}
          - {name: caption, function: fill_template, inputs: {template: "a handwritten {word}", word: $word}}
          - {name: digit_image, model: digits-flux, inputs: {prompt: $caption, seed: $seed}}
        outputs:
          image: $digit_image

A stage is one of `model` (an id), `tokenizer` (of a model) and `function` (a shipped one, or `module:function`). Its
`inputs` map parameters to references or literals. `$name` is an input of the pipeline or the only output of a stage,
`$name.output` one of several; a text that begins with a dollar sign is written `$$…`.

Types are those of *one* item; a request has one or many, and every tensor counts them in its first dimension.

    text    BYTES[-1]      int     INT64[-1]       tokens  INT64[-1,-1], rows padded with -1
    float   FP32[-1]       image   UINT8[-1,-1,-1,3] (height, width, RGB)
    FP32[-1,768]           any other tensor: an Open Inference datatype and the shape, -1 for any size
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from configs.model import ModelId, StrictModel, located_errors

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
Location = tuple[str | int, ...]
_Scalar = str | int | float | bool
Argument = _Scalar | tuple[_Scalar, ...]  # as written: a text may be a reference
_MAX_LISTED = 20  # names in one message
NAMED_TYPES = ("text", "int", "float", "tokens", "image")
_DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BF16", "BYTES"),
)
_OPTIONAL = "optional "
_TENSOR_TYPE = re.compile(r"([A-Z]+[0-9]*)\[\s*(-1\s*(?:,\s*(?:-1|[0-9]{1,9})\s*)*)\]")
_REFERENCE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_-]*)(?:\.([A-Za-z_][A-Za-z0-9_-]*))?")


@dataclass(frozen=True, slots=True)
class Reference:
    """An input of the pipeline, or an output of a stage; `output` None is the only one."""

    source: str
    output: str | None = None

    def __str__(self) -> str:
        return f"${self.source}.{self.output}" if self.output else f"${self.source}"


@dataclass(frozen=True, slots=True)
class PipelineProblem:
    """A mistake in a pipeline: its keys, from the pipeline's own mapping on, and a text."""

    location: Location
    text: str


def parse_tensor_type(text: str) -> tuple[str, tuple[int, ...]] | None:
    """Parse `"FP32[-1,768]"` to ("FP32", (-1, 768)); None for anything else."""
    match = _TENSOR_TYPE.fullmatch(text)
    if match is None or match[1] not in _DATATYPES:
        return None
    return match[1], tuple(int(size) for size in match[2].split(","))


def is_optional(type_: str) -> bool:
    """Return True when an input of this type may be left out."""
    return type_.startswith(_OPTIONAL)


def plain_type(type_: str) -> str:
    """Return the type without the word "optional"."""
    return type_.removeprefix(_OPTIONAL)


def _type_name(value: Any) -> str:
    plain = plain_type(value) if isinstance(value, str) else ""
    if plain not in NAMED_TYPES and parse_tensor_type(plain) is None:
        nearest = difflib.get_close_matches(plain, NAMED_TYPES, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        names = ", ".join(NAMED_TYPES)
        raise ValueError(f"unknown type{hint} (known: {names}, or a datatype and a shape such as FP32[-1,768])")
    return str(value)


def _parse_reference(text: Any) -> Reference | None:
    """Parse `"$stage.output"` to a Reference; None for anything else, `$$…` included."""
    match = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
    return Reference(match[1], match[2]) if match else None


def _reference_text(value: Any) -> str:
    if _parse_reference(value) is None:
        raise ValueError("expected a reference: $name or $name.output")
    return str(value)


def _argument(value: Any) -> Argument:
    if isinstance(value, str) and value.startswith("$") and not value.startswith("$$"):
        return _reference_text(value)
    if isinstance(value, list | tuple) and all(isinstance(item, _Scalar) for item in value):
        return tuple(value)
    if isinstance(value, _Scalar):
        return value
    raise ValueError("expected a reference ($name), a text, a number, a boolean or a list of these")


class StageConfig(StrictModel):
    """One model or function, and where its parameters come from."""

    name: Name
    model: ModelId | None = None
    tokenizer: ModelId | None = Field(None, description="a model whose tokenizer is wanted alone")
    function: str | None = Field(None, min_length=1, description="a shipped one or module:function")
    inputs: dict[Name, Annotated[Any, AfterValidator(_argument)]] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        given = [key for key in ("model", "tokenizer", "function") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"expected one of model, tokenizer and function, got {' and '.join(given) or 'none'}")
        return self

    @property
    def references(self) -> dict[str, Reference]:
        """References to other stages, by parameter."""
        found = {name: _parse_reference(value) for name, value in self.inputs.items()}
        return {name: reference for name, reference in found.items() if reference is not None}

    @property
    def literals(self) -> dict[str, Argument]:
        """Literal values by parameter, with `$$` read as one dollar sign."""
        given = {name: value for name, value in self.inputs.items() if _parse_reference(value) is None}
        return {name: _unescaped(value) for name, value in given.items()}


class PipelineConfig(StrictModel):
    """One pipeline; the module's docstring has an example. What models and functions take is checked where they are
    known (`deployments/pipelines/planning.py`); everything else here.
    """

    id: ModelId
    description: str = ""
    inputs: dict[Name, Annotated[Any, AfterValidator(_type_name)]] = Field(min_length=1)
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    outputs: dict[Name, Annotated[Any, AfterValidator(_reference_text)]] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _has_no_steps(cls, data: Any) -> Any:
        if isinstance(data, dict) and "steps" in data:
            text = "unknown key; the stages of a pipeline are listed under 'stages'"
            raise located_errors(cls.__name__, [(("steps",), text)])
        return data

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        problems = [*_naming_problems(self), *_reference_problems(self)]
        problems = problems or [*_cycles(self)] or [*_unused(self)]  # the later ones make sense without the earlier
        if problems:
            raise located_errors(type(self).__name__, [(problem.location, problem.text) for problem in problems])
        return self

    @property
    def output_references(self) -> dict[str, Reference]:
        """References to stages, by output."""
        found = {name: _parse_reference(text) for name, text in self.outputs.items()}
        return {name: reference for name, reference in found.items() if reference is not None}

    @property
    def dependencies(self) -> dict[str, set[str]]:
        """The stages that each stage depends on."""
        stages = {stage.name for stage in self.stages}
        return {stage.name: {ref.source for ref in stage.references.values()} & stages for stage in self.stages}


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'? (known: x, y)"`, the end of a report of an unknown name."""
    known = list(known)
    listed = ", ".join(known[:_MAX_LISTED]) + ", …" * (len(known) > _MAX_LISTED)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{hint} (known: {listed or 'none'})"


def _unescaped(value: Argument) -> Argument:
    return value[1:] if isinstance(value, str) and value.startswith("$$") else value


def _naming_problems(config: PipelineConfig) -> Iterator[PipelineProblem]:
    seen: set[str] = set()
    for index, stage in enumerate(config.stages):
        if stage.name in config.inputs:
            yield PipelineProblem(("stages", index, "name"), f"{stage.name!r} is an input of the pipeline already")
        if stage.name in seen:
            yield PipelineProblem(("stages", index, "name"), f"{stage.name!r} is the name of an earlier stage already")
        seen.add(stage.name)


def _reference_problems(config: PipelineConfig) -> Iterator[PipelineProblem]:
    stages = dict.fromkeys(stage.name for stage in config.stages)
    for index, stage in enumerate(config.stages):
        for parameter, reference in stage.references.items():
            where = ("stages", index, "inputs", parameter)
            if reference.source in config.inputs and reference.output:
                yield PipelineProblem(where, f"{reference}: an input has no outputs; write ${reference.source}")
            elif reference.source not in stages and reference.source not in config.inputs:
                yield PipelineProblem(where, _unknown(reference, [*config.inputs, *stages]))
    for name, reference in config.output_references.items():
        if reference.source in config.inputs:
            yield PipelineProblem(("outputs", name), f"{reference} is an input; an output comes from a stage")
        elif reference.source not in stages:
            yield PipelineProblem(("outputs", name), _unknown(reference, stages))


def _unknown(reference: Reference, known: Iterable[str]) -> str:
    return f"{reference}: unknown name {reference.source!r}{nearest_name(reference.source, known)}"


def _cycles(config: PipelineConfig) -> Iterator[PipelineProblem]:
    try:
        TopologicalSorter(config.dependencies).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        place = next(index for index, stage in enumerate(config.stages) if stage.name in circle)
        yield PipelineProblem(("stages", place), f"the stages wait for each other: {' -> '.join(circle)}")


def _unused(config: PipelineConfig) -> Iterator[PipelineProblem]:
    needed = _ancestors({ref.source for ref in config.output_references.values()}, config.dependencies)
    for index, stage in enumerate(config.stages):
        if stage.name not in needed:
            yield PipelineProblem(
                ("stages", index), f"no output needs stage {stage.name!r}; remove it, or name it in outputs"
            )
    used = {ref.source for stage in config.stages for ref in stage.references.values()}
    for name in config.inputs.keys() - used:
        yield PipelineProblem(("inputs", name), "no stage takes this input")


def _ancestors(names: set[str], dependencies: Mapping[str, set[str]]) -> set[str]:
    found, open_ = set(names), list(names)
    while open_:
        fresh = dependencies[open_.pop()] - found
        found |= fresh
        open_.extend(fresh)
    return found
