"""torch.export programs with their weights in the store.

The skeleton's graph.pt2 is a stock archive in which every tensor is a placeholder of one element; it contains no
pickle. The archive format is that of torch.export.save (torch 2.13, torch/export/pt2_archive/_package.py).

HAZARD: opening a .pt2 file can run code. torch.export.load unpickles example inputs, tensor subclasses and custom
objects without restriction (`weights_only=True` is tried first, and `False` when that fails), loads compiled code that
lies in the archive, and gives the symbolic expressions of the graph to sympy, which evaluates them. So a foreign file
is opened only with `allow_torch=True`, and who may write into a store decides what `load_program` runs, as with any
program.

A program's signature is read from its graph, and what keeps it from being served.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from weights.formats.tensors import SourceTensor
from weights.loading.provider import ExtentProvider
from weights.loading.views import WARNINGS_LOCK
from weights.platform.torch_dtypes import DTYPE_NAMES
from weights.platform.torch_seam import with_tensors
from weights.programs.signature import (
    SERVED_DTYPES,
    SIGNATURE,
    UNBOUNDED,
    UNSERVABLE,
    ProgramSignature,
    ProgramTensor,
    named_shapes,
)
from weights.programs.storing import (
    MemoryTensor,
    checked_graph,
    noted_names,
    program_tensors,
    published,
    store_program,
    stored_program,
)
from weights.records.errors import FormatError, WeightsError
from weights.records.manifest import Component, Layout, Manifest
from weights.storage.store import WeightStore


def _read_signature(program: ExportedProgram, mutated: Iterable[str]) -> ProgramSignature:
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


_GRAPH_FILE: Final = "graph.pt2"
_MUTATED: Final = "mutated"  # metadata: names of buffers that the program writes, as JSON
_INLINE: Final = "inline"  # metadata: names of tensors that stayed in the graph, as JSON
_MAX_HEADER_BYTES: Final = 2**28
_OPERATOR: Final = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?")
# Classes of outputs that a library registers with torch when it is imported.
_OUTPUT_CLASS: Final = re.compile(r'"type": "((?:transformers|diffusers)(?:\.\w+)+)\.\w+"')
_TENSOR_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def externalize_program(
    store: WeightStore,
    model: str,
    program: ExportedProgram | Path,
    *,
    layout: Layout = "combined",
    allow_torch: bool = False,
) -> Manifest:
    """Bring a program into the store: its graph into the skeleton; parameters, buffers and constants into packs.

    `program` is not changed. A path is a .pt2 file, opened only with `allow_torch` (see the HAZARD above). Tensors of
    a dtype that the store has no name for stay in the graph and are listed in the component's metadata["inline"].
    Example inputs are not kept: only a pickle could hold them. Raises WeightsError for what needs a pickle (custom
    objects, tensor subclasses), FormatError for a file that is no exported program.
    """
    source = "torch.export"
    if isinstance(program, Path):
        source = str(program)
        program = _open(program, allow_torch)
    _refuse_what_needs_pickles(program)
    values: dict[str, torch.Tensor] = {**program.state_dict, **program.constants}
    strides = _traced_strides(program)
    kept = [name for name, value in values.items() if value.dtype not in DTYPE_NAMES]
    tensors: dict[str, SourceTensor] = {
        name: _source_tensor(source, value, strides.get(name)) for name, value in values.items() if name not in kept
    }
    placeholders = {name: _placeholder_of(values[name]) for name in tensors}
    graph = io.BytesIO()
    _save(with_tensors(program, placeholders), graph)
    mutated = _mutated(program)
    metadata = {_MUTATED: json.dumps(mutated), _INLINE: json.dumps(kept), **_signature(program, mutated)}
    contents = (_GRAPH_FILE, graph.getvalue())
    return store_program(store, model, source, contents, tensors, "exported", metadata=metadata, layout=layout)


def load_program(store: WeightStore, model: str, provider: ExtentProvider | None = None) -> ExportedProgram:
    """Load a program with tensors as views of what `provider` gives; buffers it writes are private copies.

    Raises WeightsError when the model is no such program, StoreError and FormatError when its graph is damaged.
    HAZARD: the views are shared and read-only; train or fine-tune a copy.
    """
    component, path, contents = stored_program(store, model, _GRAPH_FILE, "a torch.export program")
    program = _load(path, io.BytesIO(contents))
    for name, tensor in bound_tensors(path, program, component, program_tensors(store, model, provider)).items():
        held = program.state_dict if name in program.state_dict else program.constants
        held[name] = tensor
    return program


def open_graph(component: Component, folder: Path) -> ExportedProgram:
    """Open the graph of a stored program, whose tensors are placeholders. `folder` is the skeleton's.

    Raises StoreError and FormatError when it is damaged, or an operator is missing.
    """
    path = folder / _GRAPH_FILE
    return _load(path, io.BytesIO(checked_graph(component, path)))


def bound_tensors(
    path: Path, program: ExportedProgram, component: Component, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the stored tensors as the graph of `path` takes them: views in its strides, copies of what it writes.

    Raises FormatError when they are not those that the graph takes.
    """
    mutated, strides = noted_names(component, _MUTATED), _traced_strides(program)
    expected = {**program.state_dict, **program.constants}
    bound = {}
    if wrong := set(stored) ^ (set(expected) - noted_names(component, _INLINE)):
        raise FormatError(f"{path}: the graph and the manifest do not have the same tensors: {sorted(wrong)}")
    for name, placeholder in expected.items():
        if name not in stored:
            continue
        tensor = _in_traced_order(stored[name], tuple(placeholder.shape), strides.get(name))
        if tensor.dtype != placeholder.dtype or tensor.shape != placeholder.shape:
            raise FormatError(
                f"{path}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, the graph takes {placeholder.dtype} "
                f"{list(placeholder.shape)}"
            )
        if name in mutated:  # each a copy of its own: equal counters of two layers are one tensor in the store
            tensor = tensor.clone()
        bound[name] = _wrapped_like(placeholder, tensor)
    return bound


def self_contained(program: ExportedProgram, target: Path) -> None:
    """Write `program` as a stock .pt2 that torch.export.load opens anywhere.

    Every tensor gets memory of its own first (tied ones together): torch saves whole storages, and here a storage
    is an extent with tensors of many types. So the weights are in memory twice more while this runs.
    Raises StoreError when the disk refuses.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {**program.state_dict, **program.constants}
    owned = {}
    for name, value in values.items():
        if value.untyped_storage().nbytes() == value.nbytes:
            owned[name] = value
            continue
        place = (value.data_ptr(), value.dtype, value.shape, value.stride(), isinstance(value, torch.nn.Parameter))
        if place not in copies:
            copies[place] = _wrapped_like(value, value.detach().clone())
        owned[name] = copies[place]
    buffer = io.BytesIO()
    _save(with_tensors(program, owned), buffer)
    with published(target, buffer.getbuffer().nbytes) as partial:
        partial.write_bytes(buffer.getbuffer())


def _open(path: Path, allow_torch: bool) -> ExportedProgram:
    if not allow_torch:
        raise WeightsError(
            f"{path}: opening an exported program can run code that it contains; pass allow_torch=True to open a file "
            f"whose origin you trust"
        )
    return _load(path, str(path))


def _load(path: Path, file: str | io.BytesIO) -> ExportedProgram:
    _check_archive(path, Path(file) if isinstance(file, str) else io.BytesIO(file.getbuffer()))
    try:
        program = torch.export.load(file)
    except Exception as error:  # the archive's reader, JSON and the graph's verifier have errors of their own
        raise FormatError(f"{path}: not a torch.export program: {type(error).__name__}: {error}") from error
    return program


def _check_archive(path: Path, file: Path | io.BytesIO) -> None:
    """Import what the archive's outputs are classes of. Raises FormatError for no archive, and for a missing operator.

    Its header is read as JSON before torch opens it: torch.export.load says of a file that it cannot read no more than
    "check the warnings above". Only modules of transformers and diffusers are imported, by a name that lies in them.
    """
    header = _archive_header(path, file)
    module = header.get("graph_module")
    graph = module.get("graph") if isinstance(module, dict) else None
    if not isinstance(module, dict) or not isinstance(graph, dict) or not isinstance(graph.get("nodes"), list):
        raise FormatError(f"{path}: not a torch.export program: its header has no graph")
    targets = {str(node.get("target")) for node in graph["nodes"] if isinstance(node, dict)}
    if missing := sorted(target for target in targets if not _is_known_operator(target)):
        version = header.get("torch_version", "an unknown torch")
        raise FormatError(
            f"{path}: operator {missing[0]!r} is missing in torch {torch.__version__} (exported with {version})"
        )
    for name in sorted(set(_OUTPUT_CLASS.findall(_output_specs(module)))):
        with contextlib.suppress(ImportError):  # torch will say that it does not know the class
            importlib.import_module(name)


def _archive_header(path: Path, file: Path | io.BytesIO) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            infos = [info for info in archive.infolist() if re.fullmatch(r"[^/]+/models/[^/]+\.json", info.filename)]
            if len(infos) != 1:
                raise FormatError(f"{path}: not a torch.export program: {len(infos)} models, expected one")
            if infos[0].file_size > _MAX_HEADER_BYTES:
                raise FormatError(
                    f"{path}: a header of {infos[0].file_size} bytes, at most {_MAX_HEADER_BYTES} are read"
                )
            header = json.loads(archive.read(infos[0]))
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a torch.export program: {type(error).__name__}: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: not a torch.export program: its header is a {type(header).__name__}")
    return header


def _is_known_operator(target: str) -> bool:
    """Return whether torch has the operator; what is none (a Python function, say) is for torch to judge."""
    found = _OPERATOR.fullmatch(target)
    if found is None:
        return True
    namespace, name, overload = found.groups()
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet is not None and (overload is None or namespace == "higher_order" or hasattr(packet, overload))


def _output_specs(module: dict[str, Any]) -> str:
    calls = module.get("module_call_graph")
    signatures = [call.get("signature") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return "\n".join(str(one.get("out_spec")) for one in signatures if isinstance(one, dict))


def _save(program: ExportedProgram, target: io.BytesIO) -> None:
    with WARNINGS_LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No complete tensor found in the group")  # placeholders
        torch.export.save(program, target)


def _refuse_what_needs_pickles(program: ExportedProgram) -> None:
    for name, value in (*program.state_dict.items(), *program.constants.items()):
        if not isinstance(value, torch.Tensor) or type(value.data) is not torch.Tensor:
            raise WeightsError(f"exported program: {name!r} is a {type(value).__name__}, which only a pickle can hold")
        if value.layout != torch.strided or value.is_meta:
            raise WeightsError(
                f"exported program: {name!r} is a {value.layout} tensor on {value.device}, without bytes"
            )


def _mutated(program: ExportedProgram) -> list[str]:
    """Return the names of the tensors that the program writes in place.

    The graph of an export still has its in-place operations, and batch_norm does not even say that it is one: only
    the functional form of the graph knows. Where torch cannot make that, every buffer is taken for written.
    """
    try:
        signature = program.run_decompositions({}).graph_signature
    except Exception:  # of the compiler's own many kinds
        return sorted(program.graph_signature.buffers)
    return sorted({*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()})


def _signature(program: ExportedProgram, mutated: Collection[str]) -> dict[str, str]:
    """Return the metadata that says what the program takes and gives, or why it cannot be served."""
    try:
        return {SIGNATURE: _read_signature(program, mutated).to_json()}
    except WeightsError as error:
        return {UNSERVABLE: str(error)}


def _source_tensor(source: str, value: torch.Tensor, strides: Sequence[int] | None) -> MemoryTensor:
    """Return the bytes in memory order: a shared view can then have the strides that were traced."""
    dense = value.detach().resolve_conj().resolve_neg().permute(_memory_order(value.shape, strides)).contiguous().cpu()
    data = dense.reshape(-1).view(torch.uint8).numpy().data
    return MemoryTensor(Path(source), DTYPE_NAMES[value.dtype], tuple(dense.shape), data)


def _traced_strides(program: ExportedProgram) -> dict[str, tuple[int, ...]]:
    """Return the strides of every input tensor as the graph was traced (channels_last for a convolution)."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return {
        spec.target: nodes[spec.arg.name].meta["val"].stride()
        for spec in program.graph_signature.input_specs
        if spec.target is not None and spec.kind in _TENSOR_KINDS
    }


def _memory_order(shape: Sequence[int], strides: Sequence[int] | None) -> list[int]:
    """Return the dimensions in the order in which dense memory has them; C order for what is not dense."""
    identity = list(range(len(shape)))
    for order in (identity, sorted(identity, key=lambda dim: -strides[dim]) if strides else identity):
        expected = 1
        for dim in reversed(order):
            if strides and shape[dim] != 1 and strides[dim] != expected:
                break
            expected *= shape[dim]
        else:
            return order
    return identity


def _in_traced_order(stored: torch.Tensor, shape: Sequence[int], strides: Sequence[int] | None) -> torch.Tensor:
    """View a tensor stored in memory order with the `shape` and `strides` that the graph takes."""
    order = _memory_order(shape, strides)
    if stored.dim() != len(order):
        return stored
    return stored.permute([order.index(dim) for dim in range(len(order))])


def _placeholder_of(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same type and shape with the memory of one element."""
    if value.numel() == 0:  # torch.export.save cannot write an empty view of memory that is not empty
        return _wrapped_like(value, torch.empty(value.shape, dtype=value.dtype))
    return _wrapped_like(value, torch.zeros((), dtype=value.dtype).expand(value.shape))


def _wrapped_like(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, as a parameter if `value` is one."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=value.requires_grad)
    return tensor
