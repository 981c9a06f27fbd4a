"""The parts of a pipeline class that only encode its text, found in diffusers' source: they run in another process.

That is safe if `__call__` calls `encode_prompt` before any module runs, and that method needs only its
arguments and the constructor's attributes. Otherwise the pipeline encodes its text itself.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Final

from deployments.engines.stock.known import bodies_of

ENCODE: Final = "encode_prompt"
_READ: Final = frozenset({"config", "dtype", "device"})  # of a module, without running it
_WITHOUT_WEIGHTS: Final = re.compile(r"tokenizer|scheduler|processor|extractor|guider")
_IMAGES: Final = re.compile(r"^(?!num_).*(image|video)")
# Methods of diffusers' base classes: equal in every process, or acting only with loaded LoRAs or inversions.
_OF_BASES: Final = frozenset(
    {"_execution_device", "device", "dtype", "config", "components", "maybe_convert_prompt", "_lora_scale"}
)
_OF_IP_ADAPTERS: Final = "prepare_ip_adapter_image_embeds"  # which no model here has
_TYPING: Final = {"Optional", "Union", "List", "Tuple", "Dict", "Any"}
_Methods = Mapping[str, ast.FunctionDef]


@functools.cache
def text_parts(class_name: str) -> frozenset[str]:
    """Return the components that only `encode_prompt` runs; none if the class encodes itself.

    Raises KeyError for a class that diffusers lacks.
    """
    bodies = list(bodies_of(class_name))
    methods = {node.name: node for body in reversed(bodies) for node in body.body if isinstance(node, ast.FunctionDef)}
    if not {ENCODE, "__call__", "__init__"} <= methods.keys():
        return frozenset()
    parts = [*methods["__init__"].args.args[1:], *methods["__init__"].args.kwonlyargs]
    modules = {one.arg for one in parts if _may_be_module(one)}
    encoding, others = _reached(methods, ENCODE), _reached(methods, "__call__", without=ENCODE)
    made = {one.arg for one in parts} | methods.keys() | _stored(methods["__init__"])
    constants = (node for body in bodies for node in body.body if isinstance(node, ast.Assign | ast.AnnAssign))
    made |= {name.id for node in constants for name in ast.walk(node) if isinstance(name, ast.Name)}
    found = _used(encoding, modules)
    is_sure = not (
        found & _used(others, modules)
        or _run_first(methods, modules)
        or any(_IMAGES.search(one.arg) for one in methods[ENCODE].args.args)
        or _shared(encoding, others, made)
    )
    return frozenset(found) if is_sure else frozenset()


@functools.cache
def asks_once(class_name: str) -> bool:
    """Return whether a call of the pipeline has its text encoded once only."""
    calls = [body.body for body in bodies_of(class_name)]
    method = next(node for body in calls for node in body if getattr(node, "name", "") == "__call__")
    loops = [one for one in ast.walk(method) if isinstance(one, ast.For | ast.While)]
    in_loops = any(own.attr == ENCODE for loop in loops for own in _own(loop))
    return not in_loops and sum(own.attr == ENCODE for own in _own(method)) == 1


def _may_be_module(one: ast.arg) -> bool:
    kinds = set(re.findall(r"\b[A-Z]\w*", ast.unparse(one.annotation))) - _TYPING if one.annotation else {""}
    return bool(kinds) and not _WITHOUT_WEIGHTS.search(one.arg)


def _own(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes of `self` in a piece of code."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
            yield one


def _reached(methods: _Methods, first: str, without: str = "") -> list[ast.FunctionDef]:
    """Return the methods, and properties, that one uses, with itself."""
    found: dict[str, ast.FunctionDef] = {}
    left = [first]
    while left:
        name = left.pop()
        if name in methods and name not in found and name != without:
            found[name] = methods[name]
            left += [one.attr for one in _own(methods[name])]
    return list(found.values())


def _used(methods: list[ast.FunctionDef], modules: set[str]) -> set[str]:
    """Return the modules that methods use beyond their config, their type and their presence."""
    found = set()
    for method in methods:
        parents = {child: parent for parent in ast.walk(method) for child in ast.iter_child_nodes(parent)}
        found |= {one.attr for one in _own(method) if one.attr in modules and not _is_read(one, parents[one])}
    return found


def _is_read(one: ast.Attribute, parent: ast.AST) -> bool:
    if isinstance(parent, ast.Attribute):
        return parent.attr in _READ
    is_test = parent.test is one if isinstance(parent, ast.If | ast.IfExp) else False
    return is_test or isinstance(parent, ast.Compare | ast.BoolOp)


def _run_first(methods: _Methods, modules: set[str]) -> set[str]:
    """Return the modules that `__call__` runs before its last call of `encode_prompt`; all if it has none."""
    call = methods["__call__"]
    last = max((one.lineno for one in _own(call) if one.attr == ENCODE), default=0)
    before = [one for one in ast.walk(call) if isinstance(one, ast.Call) and one.lineno < last]
    names = {one.attr for node in before for one in _own(node)} - {ENCODE, _OF_IP_ADAPTERS}
    left = [node for name in names for node in _reached(methods, name, without=_OF_IP_ADAPTERS) if node.name != ENCODE]
    calls = [*before, *(one for node in left for one in ast.walk(node) if isinstance(one, ast.Call))]
    run = {own.attr for one in calls for own in _own(one.func)} & modules
    return run if last else modules


def _stored(node: ast.AST) -> set[str]:
    return {one.attr for one in _own(node) if isinstance(one.ctx, ast.Store)}


def _shared(encoding: list[ast.FunctionDef], others: list[ast.FunctionDef], made: set[str]) -> set[str]:
    """Return attributes by which encoding depends on the rest of the call, or the rest on it.

    `made` are those that are the same from the constructor on.
    """
    loaded = {one.attr for node in encoding for one in _own(node)}
    changed = {name for node in others for name in _stored(node)}
    stored = {name for node in encoding for name in _stored(node)}
    return (stored | (loaded - made) | (loaded & changed)) - _OF_BASES
