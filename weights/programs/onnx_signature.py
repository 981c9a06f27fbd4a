"""The signature of an ONNX model, read from its graph, and what keeps it from being served.

ONNX names sizes that may differ, and has no ranges for them: they are 1 to `UNBOUNDED` where the model's metadata_props
name none. Format: onnx.proto.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from weights.errors import WeightsError
from weights.formats.untrusted import shown
from weights.programs.signature import SERVED_DTYPES, UNBOUNDED, ProgramSignature, ProgramTensor, named_shapes

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

RANGES: Final = "ranges"  # of metadata_props: {"length": [1, 512]} as JSON, by the names of sizes

_Shapes = dict[str, tuple[int | str, ...]]


def read_onnx_signature(model: ModelProto, dtypes: Mapping[int, str]) -> ProgramSignature:
    """Return the signature. `dtypes` has the store's names of ONNX's types.

    Raises WeightsError, with what is in the way, for a model that is not to be served.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    if not inputs or not model.graph.output:
        raise WeightsError(f"it {'gives' if inputs else 'takes'} no tensors")
    shapes: _Shapes = {value.name: _shape("input", value) for value in inputs}
    names, tables = named_shapes(shapes), _tables(model)
    return ProgramSignature(
        tuple(
            ProgramTensor(
                value.name,
                _dtype(value, dtypes),
                tuple(names.get(size, size) if isinstance(size, str) else size for size in shapes[value.name]),
                tables.get(value.name),
            )
            for value in inputs
        ),
        tuple(
            ProgramTensor(
                value.name,
                _dtype(value, dtypes),
                tuple(_output_size(size, names) for size in _shape("output", value)),
            )
            for value in model.graph.output
        ),
        _ranges(model, names),
    )


def _shape(role: str, value: ValueInfoProto) -> tuple[int | str, ...]:
    """Return numbers and names; a size of which the model says nothing has a name of its own."""
    if value.type.WhichOneof("value") != "tensor_type":
        raise WeightsError(f"its {role} {shown(value.name)} is no tensor")
    if not value.type.tensor_type.HasField("shape"):
        raise WeightsError(f"its {role} {shown(value.name)} has no shape; onnx.shape_inference may find it")
    return tuple(
        dim.dim_value if dim.dim_value > 0 else dim.dim_param or f"{value.name}?{number}"
        for number, dim in enumerate(value.type.tensor_type.shape.dim)
    )


def _output_size(size: int | str, names: Mapping[str, str]) -> int | str:
    """Return an output's size by the names of the inputs', or a term of them.

    HAZARD: one that no input has may follow from any of them, so that its rows are no rows and nothing is cut: such
    a term has all names.
    """
    if isinstance(size, int) or size in names:
        return size if isinstance(size, int) else names[size]
    known = set(re.findall(r"[A-Za-z_]\w*", size))
    if known and known <= names.keys():
        return re.sub(r"[A-Za-z_]\w*", lambda found: names[found[0]], size)
    return f"of {', '.join(names.values())}"


def _dtype(value: ValueInfoProto, dtypes: Mapping[int, str]) -> str:
    number = value.type.tensor_type.elem_type
    if (found := dtypes.get(number, "")) not in SERVED_DTYPES:
        raise WeightsError(f"its tensor {shown(value.name)} is of type {found or number}, which requests cannot have")
    return found


def _ranges(model: ModelProto, names: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    text = next((entry.value for entry in model.metadata_props if entry.key == RANGES), "{}")
    try:
        told = json.loads(text)
        bounds = {size: (int(least), int(most)) for size, (least, most) in told.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        bounds = {"": (1, 0)}
    if not all(size in names and 1 <= least <= most for size, (least, most) in bounds.items()):
        raise WeightsError(
            f"{RANGES!r} of its metadata_props are {shown(text)}, expected the least and the largest of sizes by name "
            f"({', '.join(names) or 'it has none'}), as JSON"
        )
    return {name: bounds.get(size, (1, UNBOUNDED)) for size, name in names.items()}


def _tables(model: ModelProto) -> dict[str, int]:
    """Return the number of rows of the table that an input's values look up, by input."""
    rows = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if tensor.dims}
    found: dict[str, int] = {}
    for node in model.graph.node:
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if node.op_type == "Gather" and not node.domain and len(node.input) == 2 and axis == 0:
            table, ids = node.input
            if table in rows:
                found[ids] = min(rows[table], found.get(ids, rows[table]))
    return found
