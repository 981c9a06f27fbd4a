"""Graphs of torch.export compiled by AOTInductor, on the node that runs them, of what lies in the store.

What is compiled takes weights as it takes the tensors of a request. So a package has none, fine-tunes of a program
share it, and a switch between them is another list of tensors. A process of its own compiles, at the lowest priority:
it takes minutes and hundreds of MB, and a compiler may crash. It ends with its replica, and so do the C++ compilers
that it starts. Before a package is used, it has given there what the
graph gives, at both ends of the range.

HAZARD: a package is machine code. Only those are opened that this user's process has made, in a folder of this user
alone: what a file or another node brings is never one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from weights.platform.private_folder import private_folder
from weights.platform.processor import processor_flags
from weights.platform.torch_seam import compile_graph, open_compiled
from weights.programs.exported import open_graph
from weights.programs.signature import ProgramSignature, signature_of
from weights.records.manifest import Component

COMPILE_TIMEOUT_S: Final = 1800
NICENESS: Final = 19  # of the compiling process: requests come first
MAX_PACKAGES: Final = 64  # of a node, a few MB each
_MODULE: Final = __name__
_COMPILERS: Final = ("g++", "c++", "clang++")
_VERSION: Final = 1  # of what is checked before a graph is compiled, and how it is
_OPTIONS: Final[Mapping[str, Any]] = {}  # of inductor, beside its own
_TRIED_SIZE: Final = 128  # the largest that a package is tried at
_CLOSE: Final = {"rtol": 1e-3, "atol": 1e-4}

# Operators by the beginning of their names: of a tensor's shape alone, and those that divide.
_OF_SHAPES: Final = ("sym_size.", "new_", "zeros_like.", "ones_like.", "full_like.", "empty_like.", "rand", "_assert")
_DIVIDING: Final = ("div", "floor_divide", "remainder", "fmod", "true_divide")
_LOOKING_UP: Final = ("index", "gather", "scatter", "embedding", "take", "put", "one_hot", "bincount", "bucket", "nll")

Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
logger = logging.getLogger(__name__)


class NotCompiled(Exception):
    """A graph that runs as it is, and why."""


@dataclass(slots=True, eq=False)
class CompiledGraph:
    """The result of compiling a graph: `run` once there is one, or the `reason` why not; then it has `ended`."""

    run: Run | None = None
    reason: str = ""
    ended: threading.Event = field(default_factory=threading.Event)


def begin_compiling(component: Component, folder: Path, device: torch.device, packages: Path) -> CompiledGraph:
    """Return the graph of the skeleton `folder`, which a thread compiles, or finds in the node's folder `packages`.

    What is compiled runs on as many threads as torch does now. Why it is not is logged, once.
    """
    compiled = CompiledGraph()
    arguments = compiled, component, folder, device, packages
    threading.Thread(target=_compile, args=arguments, name="compile", daemon=True).start()
    return compiled


def _compile(compiled: CompiledGraph, component: Component, folder: Path, device: torch.device, packages: Path) -> None:
    try:
        if device.type != "cpu":
            raise NotCompiled(f"compiled programs run on the CPU, the text encoders' device is {device}")
        compiled.run = open_compiled(_find_package(component, folder, packages))
    except (NotCompiled, OSError, RuntimeError) as error:
        compiled.reason = " ".join(str(error).split())[-300:] or type(error).__name__
        logger.warning("program %s runs as it is, not compiled: %s", component.config_hash[:16], compiled.reason)
    finally:
        compiled.ended.set()


def _find_package(component: Component, folder: Path, packages: Path) -> Path:
    """Return the package of a graph in `packages`, compiled if it is not there, or not as it was written.

    One at a time on a node; the others wait. Raises NotCompiled, and OSError for a folder that others may write to.
    """
    target = private_folder(packages) / f"{_key(component)}.pt2"
    with (packages / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(target):
            _run_compiler(component, folder, target)
            _remove_oldest(packages)
        target.touch()
    return target


def _is_whole(package: Path) -> bool:
    """Return whether a package is there, and its bytes are those that were written."""
    try:
        return hashlib.sha256(package.read_bytes()).hexdigest() == _digest_file(package).read_text()
    except OSError:
        return False


def _key(component: Component) -> str:
    """Return the name of all that a package depends on."""
    machine = platform.machine(), sorted(processor_flags()), torch.get_num_threads()
    facts = [_VERSION, component.config_hash, torch.__version__, machine, _OPTIONS]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _digest_file(package: Path) -> Path:
    return package.with_suffix(".sha256")


def _remove_oldest(packages: Path) -> None:
    for package in sorted(packages.glob("*.pt2"), key=lambda one: one.stat().st_mtime)[:-MAX_PACKAGES]:
        package.unlink()
        _digest_file(package).unlink(missing_ok=True)


def _check_compiler() -> None:
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    if not any(map(shutil.which, named or _COMPILERS)):
        raise NotCompiled(f"no C++ compiler: none of {', '.join(named or _COMPILERS)} is on the PATH")


def _run_compiler(component: Component, folder: Path, target: Path) -> None:
    """Compile in a process of its own. Raises NotCompiled with its last line."""
    _check_compiler()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made, described, errors = (Path(scratch) / name for name in (target.name, "component.json", "errors"))
        described.write_text(component.model_dump_json())
        changes = {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TORCHINDUCTOR_CACHE_DIR": scratch,  # its own is one that others could have made
            "TMPDIR": scratch,
        }
        arguments = str(described), str(folder), str(made), str(torch.get_num_threads()), str(NICENESS)
        with (
            errors.open("wb") as stderr,
            subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, *arguments],
                stdin=subprocess.PIPE,  # nothing is written there: when it is closed, the whole group ends
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=os.environ | changes,
                process_group=0,
            ) as process,
        ):
            try:
                code = process.wait(COMPILE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise NotCompiled(f"it took more than {COMPILE_TIMEOUT_S} s") from None
        if code or not made.is_file():
            lines = errors.read_text(errors="replace").strip().splitlines()
            raise NotCompiled(lines[-1] if lines and code >= 0 else f"the compiling process ended with {code}")
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        made.replace(target)
        _digest_file(target).write_text(digest)


def has_traced_strides(program: ExportedProgram, arguments: Sequence[Any]) -> bool:
    """Return whether weights lie in memory as the graph was traced: nothing that was compiled of it looks."""
    nodes = program.graph.find_nodes(op="placeholder")
    return all(
        value.stride() == node.meta["val"].stride()
        for node, value in zip(nodes, arguments, strict=True)
        if isinstance(value, torch.Tensor)
    )


# What follows runs in the process that compiles.


def _flat_graph(program: ExportedProgram) -> fx.GraphModule:
    """Return a graph that takes all tensors of `program`, weights and inputs, as it lists them, and gives its outputs.

    Raises NotCompiled for a program that takes or gives something else.
    """
    graph = fx.Graph()
    output = graph.graph_copy(program.graph, {})
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in graph.find_nodes(op="placeholder"):
        spec = kinds[node.name]
        if not isinstance(spec.arg, TensorArgument):
            if node.users or spec.kind != InputKind.USER_INPUT:
                raise NotCompiled(f"its input {node.name!r} is no tensor")
            graph.erase_node(node)
        elif not node.meta["val"].is_contiguous() and spec.kind == InputKind.USER_INPUT:
            raise NotCompiled(f"its input {node.name!r} was exported with other strides than requests have")
    assert isinstance(output, tuple | list)
    specs = program.graph_signature.output_specs
    kept = [one for one, spec in zip(output, specs, strict=True) if is_output(spec)]
    graph.output(tuple(kept))
    return fx.GraphModule(program.graph_module, graph)


def _check_values(program: ExportedProgram, signature: ProgramSignature) -> None:
    """Check that no value of a request ends the process. Raises NotCompiled with the operator that might.

    HAZARD: compiled code looks up rows and divides within its threads, where an error cannot be caught. Only ids that a
    request is checked for may be looked up.
    """
    given = {one.name: one.below for one in signature.inputs}
    dependent: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in given:
            dependent.add(node)
        if node.op != "call_function" or not any(one in dependent for one in node.all_input_nodes):
            continue
        name = str(node.target).removeprefix("aten.")
        is_checked = name.startswith("embedding.") and given.get(getattr(node.args[1], "name", "")) is not None
        if not is_checked and any(one in dependent for one in _named_by(node, name)):
            raise NotCompiled(f"its operator {node.target} takes positions or divisors from a request, unchecked")
        if not name.startswith(_OF_SHAPES):
            dependent.add(node)


def _named_by(node: fx.Node, name: str) -> list[fx.Node]:
    """Return the arguments of an operator that are positions or whole divisors."""
    others: list[fx.Node] = []
    fx.map_arg((node.args[1:], node.kwargs), others.append)
    if any(one.op == "get_attr" for one in node.all_input_nodes):  # graphs of its own, which nobody looks at here
        return list(node.all_input_nodes)
    if name.startswith(_DIVIDING):
        return [] if node.meta["val"].is_floating_point() else others
    return others if any(part in name.partition(".")[0] for part in _LOOKING_UP) else []


def is_output(spec: Any) -> bool:
    """Return whether an output of a graph is one of those that its signature names."""
    return spec.kind == OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument)


def _compile_here(component: Component, folder: Path, made: Path) -> None:
    """Compile the graph of the skeleton `folder` into the file `made`. Raises what torch does, and NotCompiled."""
    program, signature = open_graph(component, folder), signature_of(component)
    _check_values(program, signature)
    module = _flat_graph(program)
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    compile_graph(module, values, made, _OPTIONS)
    plain, run = _flat_graph(program), open_compiled(made)
    for sizes in _trial_sizes(signature):
        tensors = _made_up(program, signature, sizes)
        with torch.no_grad():
            expected = plain(*tensors)
        for one, other in zip(run(tensors), expected, strict=True):
            if one.shape != other.shape or not torch.allclose(one, other, **_CLOSE, equal_nan=True):
                raise NotCompiled(f"the compiled graph gives other results at the sizes {sizes}")


def _trial_sizes(signature: ProgramSignature) -> Iterator[dict[str, int]]:
    """Yield sizes at both ends of the range, and uneven ones between."""
    for part in (0.0, 0.3, 1.0):
        yield {
            size: least + int(part * (max(least, min(most, _TRIED_SIZE)) - least))
            for size, (least, most) in signature.ranges.items()
        }


def _made_up(program: ExportedProgram, signature: ProgramSignature, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    """Return random tensors for all that the flat graph takes."""
    given = {one.name: one for one in signature.inputs}
    tensors = []
    for node in _flat_graph(program).graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if (one := given.get(node.name)) is None:
            tensors.append(_random(torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype), 1))
            continue
        shape = [sizes[size] if isinstance(size, str) else size for size in one.shape]
        tensors.append(_random(torch.empty(shape, dtype=value.dtype), one.below or 2))
    return tensors


def _random(tensor: torch.Tensor, below: int) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor.uniform_(0.01, 0.1)
    return tensor.random_(0, below) if tensor.dtype != torch.bool else tensor.fill_(True)


def _end_with_stdin() -> None:
    """Have the kernel end this process and its group, the compilers, when the other end of stdin is closed.

    That is when the replica ends, however it does. The compilers have the same stdin, so it holds as well for those
    that this process leaves behind.
    """
    fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # it was closed before
        os._exit(1)


def _main(described: str, folder: str, made: str, num_threads: str, niceness: str) -> None:
    """Compile the component that is described in a file; why it cannot be is the last line of stderr."""
    _end_with_stdin()
    os.nice(int(niceness))
    torch.set_num_threads(int(num_threads))
    try:
        _compile_here(Component.model_validate_json(Path(described).read_text()), Path(folder), Path(made))
    except Exception as error:  # of the compiler's many kinds
        text = " ".join(str(error).split())
        sys.exit(f"{type(error).__name__}: {text[:280]}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
