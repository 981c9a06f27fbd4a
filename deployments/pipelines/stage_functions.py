"""Functions as stages: found by name, typed by their annotations, called item by item, their answers checked.

An annotation is what one item is: str, int, float, bool, `list[int]` (tokens), `NDArray[np.float32]` (a vector),
`NDArray[np.uint8]` (an image). Parameters may be a union of these; `tuple[str, ...]` (int, float) is a list in the
config. `**values: …` takes any further names. A NamedTuple as the return type gives several outputs.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from configs.pipeline import nearest_name
from deployments.pipelines.edge_types import (
    BOOL,
    FLOAT,
    IMAGE,
    INT,
    TEXT,
    TOKENS,
    VECTOR,
    Batch,
    EdgeType,
    Parameter,
    Ports,
    items_of,
    stacked,
)
from deployments.pipelines.functions import SHIPPED
from deployments.records.errors import GenerationFailed, InvalidRequest
from weights.platform.panics import panics_as_errors

_ONLY_OUTPUT: Final = "output"
_EDGES: Final[dict[Any, EdgeType]] = {
    str: TEXT,
    int: INT,
    float: FLOAT,
    bool: BOOL,
    list[int]: TOKENS,
    npt.NDArray[np.float32]: VECTOR,
    npt.NDArray[np.uint8]: IMAGE,
}
_LISTS: Final[dict[Any, type[str] | type[int] | type[float]]] = {
    tuple[str, ...]: str,
    tuple[int, ...]: int,
    tuple[float, ...]: float,
}
_ITEM_TYPES: Final[dict[EdgeType, type | tuple[type, ...]]] = {
    TEXT: str,
    INT: (int, np.integer),
    FLOAT: (int, float, np.floating),
    BOOL: (bool, np.bool_),
}


class FunctionUnusable(ValueError):
    """A name that is no function for a stage; the message says why."""


@dataclass(frozen=True, slots=True)
class StageFunction:
    """A function and its signature. `several`: it returns a tuple, one value per output."""

    name: str
    function: Callable[..., Any]
    ports: Ports
    several: bool

    def __call__(self, arguments: Mapping[str, Batch], literals: Mapping[str, Any], num_items: int) -> dict[str, Batch]:
        """Call the function for all items, one after the other. Blocking.

        Raises InvalidRequest where the function raises ValueError, GenerationFailed for anything else.
        """
        columns = {name: self._items(name, batch) for name, batch in arguments.items()}
        rows = []
        for index in range(num_items):
            item = {name: column[index] for name, column in columns.items()}
            rows.append(self._row(item | dict(literals)))
        return {name: self._stacked(name, [row[name] for row in rows]) for name in self.ports.outputs}

    def _items(self, name: str, batch: Batch) -> Sequence[Any]:
        # A copy: what a function writes into its arguments is not what other stages read.
        items = items_of(batch.copy() if isinstance(batch, np.ndarray) else batch)
        return [list(ids) for ids in items] if self._is_tokens(name) else items

    def _is_tokens(self, name: str) -> bool:
        parameter = self.ports.parameters.get(name) or self.ports.extra
        return parameter is not None and parameter.types == (TOKENS,)

    def _row(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            with panics_as_errors():
                answer = self.function(**arguments)
        except ValueError as error:
            raise InvalidRequest(f"function {self.name}: {error}") from error
        except Exception as error:
            raise GenerationFailed(f"function {self.name} failed: {type(error).__name__}: {error}") from error
        values = dict(zip(self.ports.outputs, answer if self.several else (answer,), strict=True))
        return {name: self._checked(name, value) for name, value in values.items()}

    def _checked(self, name: str, value: Any) -> Any:
        type_ = self.ports.outputs[name]
        if type_ == TOKENS:
            fine = isinstance(value, list | tuple) and all(isinstance(token, int) and token >= 0 for token in value)
            value = tuple(value) if fine else value
        elif type_ in _ITEM_TYPES:
            fine = isinstance(value, _ITEM_TYPES[type_]) and (type_ == BOOL or not isinstance(value, bool))
            # Beyond int64 numpy has no number for it.
            fine = fine and not (type_ == INT and not -(2**63) <= value < 2**63)
        else:
            expected = np.float32 if type_ == VECTOR else np.uint8
            fine = isinstance(value, np.ndarray) and value.dtype == expected and value.ndim == len(type_.shape) - 1
            fine = fine and (type_ != IMAGE or value.shape[-1] == 3)
        if not fine:
            shown = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else f"{value!r:.80}"
            raise GenerationFailed(f"function {self.name}: {name} should be one item of {type_}, got {shown}")
        return value

    def _stacked(self, name: str, values: list[Any]) -> Batch:
        try:
            return stacked(values, self.ports.outputs[name])
        except (ValueError, OverflowError) as error:
            raise GenerationFailed(f"function {self.name}: {name}: {error}") from error


@lru_cache(maxsize=256)
def find_function(name: str) -> StageFunction:
    """Return a shipped function, or that of `module:function`. Raises FunctionUnusable."""
    function = _imported(name) if ":" in name else SHIPPED.get(name)
    if function is None:
        raise FunctionUnusable(f"unknown function {name!r}{nearest_name(name, SHIPPED)}, or module:function")
    if (
        not inspect.isfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
    ):
        raise FunctionUnusable(f"{name} is not a plain function")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # annotations are code
        raise FunctionUnusable(f"{name}: its annotations cannot be read: {error}") from error
    outputs, several = _outputs(name, hints.get("return"))
    parameters = {}
    extra = None
    for parameter in inspect.signature(function).parameters.values():
        port = _parameter(name, parameter, hints.get(parameter.name))
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            extra = port
        else:
            parameters[parameter.name] = port
    return StageFunction(name, function, Ports(parameters, outputs, extra), several)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs code, which may raise anything
        raise FunctionUnusable(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error


def _parameter(function: str, parameter: inspect.Parameter, annotation: Any) -> Parameter:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
        raise FunctionUnusable(f"{function}: parameter {parameter.name!r} cannot be given by name")
    required = parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    if annotation in _LISTS:
        return Parameter(required=required, element=_LISTS[annotation])
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    options = typing.get_args(annotation) if is_union else (annotation,)
    found = tuple(_edge(option) for option in options)
    if None in found or annotation is None:
        raise FunctionUnusable(f"{function}: parameter {parameter.name!r}{_expected(annotation, [*_EDGES, *_LISTS])}")
    return Parameter(tuple(type_ for type_ in found if type_), required=required)


def _outputs(function: str, annotation: Any) -> tuple[dict[str, EdgeType], bool]:
    several = inspect.isclass(annotation) and issubclass(annotation, tuple) and hasattr(annotation, "_fields")
    hints = typing.get_type_hints(annotation) if several else {_ONLY_OUTPUT: annotation}
    outputs = {}
    for name, hint in hints.items():
        type_ = _edge(hint)
        if type_ is None:
            raise FunctionUnusable(f"{function}: its return type{_expected(hint, _EDGES)}")
        outputs[name] = type_
    return outputs, several


def _edge(annotation: Any) -> EdgeType | None:
    try:
        return _EDGES.get(annotation)
    except TypeError:  # an annotation that cannot be hashed
        return None


def _expected(annotation: Any, known: Any) -> str:
    if annotation is None:
        return " has no annotation"
    names = ", ".join(inspect.formatannotation(type_) for type_ in known)
    return f" is annotated {inspect.formatannotation(annotation)}; expected one of {names}"
