"""The walk over a workflow, node by node: only what output nodes reach, only chosen branches, each node once.

A check and a run walk the same way. Who walks gives every ready node its outputs, or says that it failed.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deployments.workflows.backend import Catalog
from deployments.workflows.kinds import Input, Kind, flat_inputs, gathered
from deployments.workflows.literals import BadLiteral, literal
from deployments.workflows.records import MAX_TEXT, ErrorType, Link, Node, NodeError, Workflow
from deployments.workflows.values import PENDING, Latent, Video, fits_type

MAX_CALLS: Final = 1_000  # of one node that gets a list
MAX_BYTES: Final = 2**29  # of all values of a run that are kept at once

Array: TypeAlias = npt.NDArray[Any]
Outputs: TypeAlias = "tuple[Any, ...]"


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of values: who takes it runs once for each."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """A node whose inputs are all there; its function is called with each of these arguments."""

    node: Node
    kind: Kind
    calls: tuple[Mapping[str, Any], ...]

    @property
    def is_pending(self) -> bool:
        """Return whether its function has to wait for what only a run computes."""
        hidden = ("IMAGE", "MASK", "LATENT", "VIDEO", "AUDIO") if self.kind.is_opaque else ()
        types = {one.name: one.type for one in self.kind.inputs}
        return any(
            types[name] not in hidden and _holds_pending(value) for call in self.calls for name, value in call.items()
        )


class _Failed:
    """In the place of a node's outputs: it failed, or a node before it did."""


_FAILED: Final = _Failed()


@dataclass(slots=True)
class Evaluation:
    """A walk over a workflow. `errors` are the faults that were found on the way, none twice."""

    workflow: Workflow
    kinds: Mapping[str, Kind]
    catalog: Catalog | None
    targets: Sequence[str]
    max_bytes: int = MAX_BYTES
    errors: list[NodeError] = field(default_factory=list)
    _outputs: dict[str, Outputs | _Failed] = field(default_factory=dict)
    _waiting: dict[str, set[str]] = field(default_factory=dict)  # the nodes that have yet to read a node's outputs
    _held: int = 0
    _keepers: Counter[int] = field(default_factory=Counter)  # by the ids of arrays and texts, as long as one is there

    def __post_init__(self) -> None:
        reached, path = set(self.targets), list(self.targets)
        while path:
            node = self.workflow.nodes[path.pop()]
            for source in _sources(node):
                self._waiting.setdefault(source, set()).add(node.id)
                if source not in reached and source in self.workflow.nodes:
                    reached.add(source)
                    path.append(source)

    def ready(self) -> Iterator[Ready]:
        """Yield each node when its turn is there; before the next one, `give` or `fail` has been called."""
        for target in self.targets:
            path, on_path = [target], {target}
            while path:
                node = self.workflow.nodes[path[-1]]
                if node.id not in self._outputs:
                    before = self._next_before(node)
                    if before is not None and before.node in on_path:
                        self._refuse(node, "dependency_cycle", "The workflow goes in a circle", before.node)
                    elif before is not None:
                        path.append(before.node)
                        on_path.add(before.node)
                        continue
                    elif node.id not in self._outputs and (found := self._prepared(node)) is not None:
                        yield found
                self._forget_read(node)
                on_path.discard(path.pop())

    def give(self, node: str, outputs: Outputs) -> None:
        """Keep the outputs of a node that was ready."""
        for one in _kept(outputs):
            if not self._keepers[id(one)]:
                self._held += _num_bytes(one)
            self._keepers[id(one)] += 1
        if self._held > self.max_bytes:
            raise MemoryError(f"images and latents of a workflow may take {self.max_bytes / 2**30:g} GiB together")
        self._outputs[node] = outputs

    def fail(self, node: Node, error: NodeError | None) -> None:
        """Say that a node gives nothing: all that need it are left out."""
        self._outputs[node.id] = _FAILED
        if error is not None:
            self.errors.append(error)

    def has_failed(self, node: str) -> bool:
        """Return whether a node, or one before it, failed."""
        return self._outputs.get(node) is _FAILED

    def _forget_read(self, node: Node) -> None:
        """Let go of values that only this node had yet to read."""
        for source in _sources(node):
            waiting = self._waiting.get(source, set())
            waiting.discard(node.id)
            outputs = self._outputs.get(source)
            if not waiting and isinstance(outputs, tuple) and outputs:
                for one in _kept(outputs):
                    self._keepers[id(one)] -= 1
                    if not self._keepers[id(one)]:
                        self._held -= _num_bytes(one)
                self._outputs[source] = ()

    def _refuse(self, node: Node, type: ErrorType, message: str, details: str = "", input: str | None = None) -> None:
        self.fail(node, NodeError(node.id, node.kind, node.title, type, message, details, input))

    def _inputs(self, node: Node, kind: Kind) -> Iterator[Input]:
        """Yield the inputs that a node has, as its dynamic choices are."""

        def choose(one: Input) -> Any:
            given = node.inputs.get(one.name, one.default)
            if isinstance(given, Link):
                given = self._value(given)
            return given

        return flat_inputs(kind.inputs, choose)

    def _value(self, source: Link) -> Any:
        outputs = self._outputs.get(source.node)
        if outputs is None or isinstance(outputs, _Failed) or source.output >= len(outputs):
            return None
        return outputs[source.output]

    def _next_before(self, node: Node) -> Link | None:
        """Return a link to a node that has to be there before this one; faults of links are told here."""
        kind = self.kinds.get(node.kind)
        if kind is None:
            self._refuse(node, "missing_node_type", f"no node {node.kind!r} is known here", "custom nodes never run")
            return None
        wanted: tuple[str, ...] | None = None
        # A choice decides over the inputs behind it, and those that are not lazy over those that are.
        lazy = kind.wants is not None
        for is_second in (False, True) if lazy else (True,):
            if lazy and is_second:
                assert kind.wants is not None
                wanted = kind.wants({one: self._known(node, one) for one in node.inputs})
            for one in self._inputs(node, kind):
                given = node.inputs.get(one.name)
                if not isinstance(given, Link) or (wanted is not None and one.name not in wanted):
                    continue
                if lazy and not is_second and not one.is_widget:
                    continue
                if (fault := self._fault(one, given)) is not None:
                    self._refuse(node, *fault, one.name)
                    return None
                if given.node not in self._outputs:
                    return given
        return None

    def _known(self, node: Node, name: str) -> Any:
        given = node.inputs[name]
        return self._value(given) if isinstance(given, Link) else given

    def _fault(self, one: Input, given: Link) -> tuple[ErrorType, str, str] | None:
        source = self.workflow.nodes.get(given.node)
        if source is None:
            return "bad_linked_input", "Bad linked input, no such node", f"node {given.node}"
        kind = self.kinds.get(source.kind)
        if kind is None:
            return None  # told where it stands
        if not 0 <= given.output < len(kind.outputs):
            return "bad_linked_input", "Bad linked input, no such output", f"output {given.output} of {source.shown}"
        if not one.takes(offered := kind.outputs[given.output].type):
            details = f"{one.name}, received_type({offered}) mismatch input_type({one.type})"
            return "return_type_mismatch", "Return type mismatch between linked nodes", details
        return None

    def _prepared(self, node: Node) -> Ready | None:
        """Return the node with its arguments, or None where one is bad."""
        kind = self.kinds[node.kind]
        wanted = kind.wants({name: self._known(node, name) for name in node.inputs}) if kind.wants else None
        values: dict[str, Any] = {}
        is_good = True
        for one in self._inputs(node, kind):
            may_be_none = one.is_widget or one.type == "*"
            if one.name not in node.inputs or (node.inputs[one.name] is None and not may_be_none):
                if one.required and (wanted is None or one.name in wanted or one.is_widget):
                    self._refuse(node, "required_input_missing", "Required input is missing", one.name, one.name)
                    is_good = False
                elif not one.required and one.default is not None:
                    values[one.name] = one.default
                continue
            given = node.inputs[one.name]
            if isinstance(given, Link):
                if wanted is not None and one.name not in wanted and not one.is_widget:
                    continue
                if self.has_failed(given.node):
                    self.fail(node, None)
                    is_good = False
                    continue
                value = self._value(given)
                if value is None and one.type != "*":  # of a switch without this branch
                    if one.required:
                        self._refuse(node, "required_input_missing", "Required input is missing", one.name, one.name)
                        is_good = False
                    continue
            elif one.linked_only and one.type != "*":
                details = f"{one.name}, got {type(given).__name__}"
                self._refuse(node, "bad_linked_input", "expected a link to another node", details, one.name)
                is_good = False
                continue
            else:
                value = given
            try:
                values[one.name] = self._fitted(one, value)
            except BadLiteral as error:
                self._refuse(node, error.type, error.message, error.details, one.name)
                is_good = False
        if not is_good:
            return None
        try:
            return Ready(node, kind, _calls(kind, values))
        except ValueError as error:
            self._refuse(node, "custom_validation_failed", str(error))
            return None

    def _fitted(self, one: Input, value: Any) -> Any:
        if isinstance(value, Listed):
            return Listed(tuple(self._fitted(one, each) for each in value.values))
        if value is PENDING:
            return value
        if isinstance(value, Latent) and value.decoded is not None and not one.takes_decoded:
            why = "these latents can only be decoded: diffusers' own code runs their model, from noise to images"
            raise BadLiteral("custom_validation_failed", why, one.name)
        if isinstance(value, Latent) and value.frames and not one.takes_videos:
            raise BadLiteral("custom_validation_failed", "latents of a video are sampled and decoded only", one.name)
        if not fits_type(one.type, value):  # came through an output of any type
            found = f"{one.name}, received {type(value).__name__} for {one.type}"
            raise BadLiteral("return_type_mismatch", "Return type mismatch between linked nodes", found)
        if isinstance(value, np.ndarray) and value.dtype == np.uint8 and "IMAGE" in one.type and not one.takes_bytes:
            return value.astype(np.float32) / np.float32(255)
        return literal(one, value, self.catalog)


def _sources(node: Node) -> set[str]:
    return {value.node for value in node.inputs.values() if isinstance(value, Link)}


def outputs_of(kind: Kind, results: Sequence[Outputs]) -> Outputs:
    """Return a node's outputs from those of its calls: as they are, or lists where it was called for several."""
    outputs: list[Any] = []
    for place, declared in enumerate(kind.outputs):
        values = [result[place] for result in results]
        if any(isinstance(value, str) and len(value) > MAX_TEXT for value in values):
            raise ValueError(f"a text of more than {MAX_TEXT} characters")
        if declared.is_list:
            values = [each for value in values for each in (value if isinstance(value, list | tuple) else (value,))]
            if len(values) > MAX_CALLS:
                raise ValueError(f"a list of {len(values)} values: at most {MAX_CALLS}")
        outputs.append(Listed(tuple(values)) if declared.is_list or len(values) != 1 else values[0])
    return tuple(outputs)


def _calls(kind: Kind, values: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    lists = {name: value.values for name, value in values.items() if isinstance(value, Listed)}
    if kind.takes_lists or not lists:
        plain = {name: list(value.values) if isinstance(value, Listed) else value for name, value in values.items()}
        return (gathered(kind.inputs, plain),)
    number = max(map(len, lists.values()))
    if number > MAX_CALLS:
        raise ValueError(f"a list of {number} values: a node runs for at most {MAX_CALLS}")
    if not all(lists.values()):
        return ()
    return tuple(
        gathered(
            kind.inputs,
            {
                name: lists[name][min(place, len(lists[name]) - 1)] if name in lists else value
                for name, value in values.items()
            },
        )
        for place in range(number)
    )


def _holds_pending(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_pending, value.values()))
    return value is PENDING


def _kept(values: Sequence[Any]) -> Iterator[Array | str]:
    """Yield the arrays and texts in values: what several nodes hand on is one."""
    for value in values:
        if isinstance(value, np.ndarray | str):
            yield value
        elif isinstance(value, Listed):
            yield from _kept(value.values)
        elif isinstance(value, Video):
            yield from _kept([value.frames])
        elif isinstance(value, Latent):
            yield from _kept([value.samples, value.decoded])


def _num_bytes(value: Array | str) -> int:
    """Return the bytes that a value takes: what is repeated by a view is there once."""
    if isinstance(value, str):
        return sys.getsizeof(value)
    own = [side for side, stride in zip(value.shape, value.strides, strict=True) if stride]
    return math.prod(own) * value.itemsize
