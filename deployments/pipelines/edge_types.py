"""Types and values of the edges of a pipeline, and the ports of models: their parameters and outputs by kind.

A *batch* is the value of one edge: one entry per item of the request. Texts are a list of str and tokens a list of
tuples, because that is what models and functions take; everything else is a numpy array, or a list of arrays where
items differ in size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cluster.registry.directory import ModelRecord
from configs.pipeline import Argument, parse_tensor_type
from configs.workflow import WorkflowConfig
from deployments.pipelines.records import (
    NUMPY_DTYPES,
    Datatype,
    TensorSpec,
    TensorValue,
    fits_shape,
    program_specs,
    text_tensor,
)
from deployments.records.errors import InvalidRequest

Batch: TypeAlias = list[str] | list[tuple[int, ...]] | list[npt.NDArray[Any]] | npt.NDArray[Any]
PADDING: Final = -1  # of token rows in a tensor; no token has this id

MODEL_KINDS: Final = ("diffusion", "llm", "embedding", "reranker", "classifier", "head", "program", "upscaler")


@dataclass(frozen=True, slots=True)
class EdgeType:
    """The type of an edge. `shape` counts the items first; -1 is any size."""

    datatype: Datatype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        names = {type_: name for name, type_ in _NAMED.items()}
        return names.get(self) or f"{self.datatype}[{','.join(str(size) for size in self.shape)}]"

    def accepts(self, other: EdgeType) -> bool:
        """Return whether values of `other` fit this type. Texts and tokens fit no other type."""
        if self == other:
            return True
        if {self, other} & {TEXT, TOKENS} or self.datatype != other.datatype or len(self.shape) != len(other.shape):
            return False
        return all(-1 in (mine, theirs) or mine == theirs for mine, theirs in zip(self.shape, other.shape, strict=True))

    def spec(self, name: str, *, optional: bool = False) -> TensorSpec:
        """Return the tensor of that name that travels along such an edge."""
        return TensorSpec(name, self.datatype, self.shape, optional)


TEXT: Final = EdgeType("BYTES", (-1,))
INT: Final = EdgeType("INT64", (-1,))
FLOAT: Final = EdgeType("FP32", (-1,))
BOOL: Final = EdgeType("BOOL", (-1,))
TOKENS: Final = EdgeType("INT64", (-1, -1))
IMAGE: Final = EdgeType("UINT8", (-1, -1, -1, 3))
VECTOR: Final = EdgeType("FP32", (-1, -1))
_NAMED: Final = {"text": TEXT, "int": INT, "float": FLOAT, "tokens": TOKENS, "image": IMAGE}


def edge_type(text: str) -> EdgeType:
    """Return the type of a name that `configs.pipeline` has checked, without `optional`."""
    parsed = parse_tensor_type(text)
    return _NAMED[text] if parsed is None else EdgeType(cast("Datatype", parsed[0]), parsed[1])


def batch_of(tensor: TensorValue, type_: EdgeType) -> Batch:
    """Return the batch that a request gave for an input of `type_`. Raises InvalidRequest."""
    if tensor.datatype != type_.datatype or not fits_shape(tensor.shape, type_.shape):
        given = f"{tensor.datatype}{list(tensor.shape)}"
        expected = f"{type_.datatype}{list(type_.shape)}"
        raise InvalidRequest(f"input {tensor.name!r}: expected {expected}, got {given}", tensor.name)
    if type_ == TEXT:
        return [_text(element, tensor.name) for element in tensor.data.tolist()]
    if type_ == TOKENS:
        return [_unpadded(row, tensor.name) for row in tensor.data.tolist()]
    return tensor.data


def tensor_of(name: str, batch: Batch, type_: EdgeType) -> TensorValue:
    """Return a batch as a tensor. Shorter arrays are padded with zeros."""
    if type_ == TEXT:
        return text_tensor(name, cast("list[str]", batch))
    if type_ == TOKENS:
        rows = cast("list[tuple[int, ...]]", batch)
        data = np.full((len(rows), max(map(len, rows), default=0)), PADDING, dtype=np.int64)
        for index, row in enumerate(rows):
            data[index, : len(row)] = row
    elif isinstance(batch, list):
        arrays = cast("list[npt.NDArray[Any]]", batch)
        shape = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
        data = np.zeros((len(arrays), *shape), NUMPY_DTYPES[type_.datatype])
        for place, array in zip(data, arrays, strict=True):
            place[tuple(slice(size) for size in array.shape)] = array
    else:
        data = batch
    return TensorValue(name, type_.datatype, data)


def stacked(rows: Sequence[Any], type_: EdgeType) -> Batch:
    """Return one batch of the items' values. Raises ValueError for arrays of different shapes."""
    if type_ in (TEXT, TOKENS):
        return list(rows)
    arrays = [np.asarray(row, dtype=NUMPY_DTYPES[type_.datatype]) for row in rows]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise ValueError(f"items of different shapes do not make one tensor: {', '.join(map(str, shapes))}")
    return np.stack(arrays)


def items_of(batch: Batch) -> list[Any]:
    """Return the items one by one: Python numbers where an item is one number, rows of the array otherwise."""
    if isinstance(batch, np.ndarray):
        return batch.tolist() if batch.ndim == 1 else list(batch)
    return list(batch)


def _text(element: Any, name: str) -> str:
    if isinstance(element, str):
        return element
    try:
        return bytes(element).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input {name!r}: a text that is not UTF-8: {error}", name) from None


def _unpadded(row: list[int], name: str) -> tuple[int, ...]:
    ids = tuple(row[: row.index(PADDING)] if PADDING in row else row)
    if not ids or min(ids) < 0:
        raise InvalidRequest(f"input {name!r}: a row of token ids must have ids from 0 on, then only {PADDING}", name)
    return ids


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter. `types` may come along an edge; `element` is the type in a list, which only the config can give."""

    types: tuple[EdgeType, ...] = ()
    required: bool = True
    element: type[str] | type[int] | type[float] | None = None

    def __str__(self) -> str:
        return f"list of {self.element.__name__}" if self.element else " or ".join(str(type_) for type_ in self.types)

    def takes_literal(self, value: Argument) -> bool:
        """Return whether `value`, written in the config, is of this parameter's type."""
        if self.element is not None:
            return isinstance(value, tuple) and all(_is(item, self.element) for item in value)
        return any(_is(value, _LITERALS[type_]) for type_ in self.types if type_ in _LITERALS)


@dataclass(frozen=True, slots=True)
class Ports:
    """Parameters and outputs of a stage.

    `extra` is the type of any further parameter; of each set in `one_of`, exactly one is given; a key of
    `goes_with` is given only together with its value.
    """

    parameters: Mapping[str, Parameter]
    outputs: Mapping[str, EdgeType]
    extra: Parameter | None = None
    one_of: tuple[frozenset[str], ...] = ()
    goes_with: Mapping[str, str] = field(default_factory=dict)


_LITERALS: Final[dict[EdgeType, type]] = {TEXT: str, INT: int, FLOAT: float, BOOL: bool}


def _is(value: object, type_: type) -> bool:
    if isinstance(value, bool):  # an int to Python, and never meant as one
        return type_ is bool
    return isinstance(value, int | float) if type_ is float else isinstance(value, type_)


def _optional(*types: EdgeType) -> Parameter:
    return Parameter(types, required=False)


TOKENIZER: Final = Ports({"text": Parameter((TEXT,))}, {"tokens": TOKENS})
_DIFFUSION: Final = Ports(
    {
        "prompt": Parameter((TEXT,)),
        "negative_prompt": _optional(TEXT),
        "seed": _optional(INT),
        "num_inference_steps": _optional(INT),
        "guidance_scale": _optional(FLOAT, INT),
        "true_cfg_scale": _optional(FLOAT, INT),
        "width": _optional(INT),
        "height": _optional(INT),
        "max_sequence_length": _optional(INT),
        "clip_skip": _optional(INT),
        "scheduler": _optional(TEXT),
        "init_image": _optional(IMAGE),
        "mask_image": _optional(EdgeType("UINT8", (-1, -1, -1))),
        "strength": _optional(FLOAT, INT),
    },
    {"image": IMAGE},
    goes_with={"mask_image": "init_image", "strength": "init_image"},
)
_LLM: Final = Ports(
    {
        "message": _optional(TEXT),  # the user's turn of a chat
        "system": _optional(TEXT),  # the turn before it
        "prompt": _optional(TEXT),  # a text to go on with, outside of any chat
        "max_tokens": _optional(INT),
        "temperature": _optional(FLOAT, INT),
        "top_p": _optional(FLOAT, INT),
        "top_k": _optional(INT),
        "seed": _optional(INT),
        "stop": Parameter(required=False, element=str),
    },
    {"text": TEXT},
    one_of=(frozenset({"message", "prompt"}),),
    goes_with={"system": "message"},
)


_UPSCALER: Final = Ports({"image": Parameter((IMAGE,))}, {"image": IMAGE})
_RERANKER: Final = Ports({"query": Parameter((TEXT,)), "text": Parameter((TEXT,))}, {"score": FLOAT})


def ports_of(model: ModelRecord) -> Ports | None:
    """Return the ports of a model; None for a kind that pipelines do not use. Unknown sizes are -1."""
    sizes = model.features
    if model.kind == "embedding":
        return Ports(
            {"text": _optional(TEXT), "tokens": _optional(TOKENS)},
            {"embedding": EdgeType("FP32", (-1, sizes.out_features or -1))},
            one_of=(frozenset({"text", "tokens"}),),
        )
    if model.kind == "classifier":
        return Ports({"text": Parameter((TEXT,))}, {"scores": EdgeType("FP32", (-1, sizes.out_features or -1))})
    if model.kind == "head":
        features = EdgeType("FP32", (-1, sizes.in_features or -1))
        return Ports({"features": Parameter((features,))}, {"output": EdgeType("FP32", (-1, sizes.out_features or -1))})
    if model.kind == "program" and model.signature is not None:
        specs = program_specs(model.signature)
        return Ports(
            {one.name: Parameter((EdgeType(one.datatype, one.shape),), not one.optional) for one in specs.inputs},
            {one.name: EdgeType(one.datatype, one.shape) for one in specs.outputs},
        )
    return {"diffusion": _DIFFUSION, "llm": _LLM, "reranker": _RERANKER, "upscaler": _UPSCALER}.get(model.kind or "")


def ports_of_workflow(workflow: WorkflowConfig) -> Ports:
    """Return the ports of a registered workflow."""
    types = {name: edge_type(one.type) for name, one in workflow.inputs.items()}
    return Ports(
        {
            name: Parameter((type_, INT) if type_ == FLOAT else (type_,), workflow.inputs[name].required)
            for name, type_ in types.items()
        },
        {name: edge_type(one.type) for name, one in workflow.outputs.items()},
    )
