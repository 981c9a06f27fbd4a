"""The signature of a torch.export program, read from its graph, and what keeps it from being served."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from weights.errors import WeightsError
from weights.programs.signature import SERVED_DTYPES, UNBOUNDED, ProgramSignature, ProgramTensor, named_shapes
from weights.torch_dtypes import DTYPE_NAMES


def read_signature(program: ExportedProgram, mutated: Iterable[str]) -> ProgramSignature:
    """Return the signature. `mutated` are the buffers that the program writes.

    Raises WeightsError, with what is in the way, for a program that is not to be served.
    """
    if written := sorted(mutated):
        raise WeightsError(
            f"it writes its buffers ({', '.join(written[:4])}), so that requests would change each other's answers; "
            "export it in eval mode"
        )
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    given = [spec.arg for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    inputs = [arg.name for arg in given if isinstance(arg, TensorArgument)]
    for arg in given:
        if not isinstance(arg, TensorArgument) and not hasattr(arg, "value"):
            raise WeightsError(f"its input {arg.name!r} is a number, and requests are tensors")
    outputs = _named_outputs(program)
    shapes = {name: _shape(values[name]) for name in inputs}
    names = named_shapes(shapes)
    for name, shape in shapes.items():
        if terms := [size for size in shape if isinstance(size, str) and not size.isidentifier()]:
            raise WeightsError(f"the sizes of its input {name!r} depend on each other ({terms[0]})")
    if not inputs or not outputs:
        raise WeightsError(f"it {'gives' if inputs else 'takes'} no tensors")
    tables = _tables(program)
    return ProgramSignature(
        tuple(
            ProgramTensor(name, _dtype(name, values[name]), _renamed(shapes[name], names), tables.get(name))
            for name in inputs
        ),
        tuple(
            ProgramTensor(name, _dtype(name, values[node]), _renamed(_shape(values[node]), names))
            for name, node in outputs.items()
        ),
        {name: _range(program, symbol, name) for symbol, name in names.items()},
    )


def _named_outputs(program: ExportedProgram) -> dict[str, str]:
    """Return the graph's output nodes by the names that their caller knows: keys, fields or numbers."""
    specs = [spec for spec in program.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    paths = _paths(program.call_spec.out_spec)
    if len(paths) != len(specs):
        paths = [str(number) for number in range(len(specs))]
    found: dict[str, str] = {}
    for path, spec in zip(paths, specs, strict=True):
        if isinstance(spec.arg, TensorArgument):
            name = path if not path[:1].isdigit() else f"output_{path}"
            name = name or "output"
            found[name if name not in found else f"{name}_{len(found)}"] = spec.arg.name
        elif getattr(spec.arg, "value", None) is not None or not hasattr(spec.arg, "value"):
            raise WeightsError(f"its output {path or 'output'!r} is no tensor")
    return found


def _paths(spec: Any, path: str = "") -> list[str]:
    """Return the path of every leaf of what a program gives: `last_hidden_state`, `logits_0`."""
    if spec.is_leaf():
        return [path]
    children = spec.children()
    fields = getattr(spec.context, "_fields", spec.context)
    is_named = isinstance(fields, list | tuple) and len(fields) == len(children)
    keys = [str(key) for key in fields] if is_named else [str(number) for number in range(len(children))]
    return [
        leaf
        for key, child in zip(keys, children, strict=True)
        for leaf in _paths(child, f"{path}_{key}" if path else key)
    ]


def _shape(value: torch.Tensor) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape)


def _renamed(shape: Iterable[int | str], names: dict[str, str]) -> tuple[int | str, ...]:
    """Return a shape with the symbols of its sizes named, in terms of them too."""
    return tuple(
        size if isinstance(size, int) else re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found[0], found[0]), size)
        for size in shape
    )


def _dtype(name: str, value: torch.Tensor) -> str:
    found = DTYPE_NAMES.get(value.dtype, "")
    if found not in SERVED_DTYPES:
        raise WeightsError(f"its tensor {name!r} is of type {value.dtype}, which requests cannot have")
    return found


def _range(program: ExportedProgram, symbol: str, name: str) -> tuple[int, int]:
    found = next((range_ for key, range_ in program.range_constraints.items() if str(key) == symbol), None)
    least = max(1, _bound(found.lower, 1)) if found is not None else 1
    most = _bound(found.upper, UNBOUNDED) if found is not None else UNBOUNDED
    if least > most:
        raise WeightsError(f"its size {name} begins at {least}, more than the {UNBOUNDED} that are served")
    return least, most


def _bound(value: Any, otherwise: int) -> int:
    """Return a bound as a number. Where the program has none, it is infinite."""
    return int(value) if getattr(value, "is_Integer", isinstance(value, int)) else otherwise


def _tables(program: ExportedProgram) -> dict[str, int]:
    """Return the number of rows of the table that an input's values look up, by input: a value beyond ends a GPU."""
    rows: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.embedding.default:
            table, ids = node.args[:2]
            if ids.op == "placeholder":
                num_rows = int(table.meta["val"].shape[0])
                rows[ids.name] = min(num_rows, rows.get(ids.name, num_rows))
    return rows
