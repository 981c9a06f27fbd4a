"""A workflow as it was read, and what is wrong with one. Types of errors are ComfyUI's, since its clients read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

ErrorType = Literal[
    "no_prompt",
    "invalid_prompt",
    "prompt_no_outputs",
    "prompt_outputs_failed_validation",
    "required_input_missing",
    "bad_linked_input",
    "return_type_mismatch",
    "invalid_input_type",
    "value_smaller_than_min",
    "value_bigger_than_max",
    "value_not_in_list",
    "custom_validation_failed",
    "dependency_cycle",
    "missing_node_type",
]

# Bounds of what a client may send; each is far above every workflow that people keep.
MAX_NODES: Final = 5_000
MAX_INPUTS: Final = 256  # of a node
MAX_TEXT: Final = 1_000_000  # characters of a text, read or made


@dataclass(frozen=True, slots=True)
class Link:
    """An input's value where another node gives it: the node's id, and which of its outputs."""

    node: str
    output: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node: `inputs` are links or literals as they were sent, `title` is what the page shows."""

    id: str
    kind: str
    title: str
    inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """Its name for a message to people."""
        named = self.kind if self.title in ("", self.kind) else f"{self.title} ({self.kind})"
        return f"node {self.id}, {named}"


@dataclass(frozen=True, slots=True)
class Workflow:
    """Nodes by their ids. Those of a subgraph have paths as ids: `105:11`."""

    nodes: Mapping[str, Node]


@dataclass(frozen=True, slots=True)
class NodeError:
    """A fault of one node, or of one of its inputs."""

    node: str
    kind: str
    title: str
    type: ErrorType
    message: str
    details: str = ""
    input: str | None = None

    def __str__(self) -> str:
        where = Node(self.node, self.kind, self.title).shown
        named = f", input {self.input!r}" if self.input else ""
        return f"{where}{named}: {self.message}" + (f" ({self.details})" if self.details else "")


class WorkflowError(Exception):
    """A workflow that cannot be read or run. `errors` name its nodes; a fault of the whole document has none."""

    def __init__(
        self,
        message: str,
        type: ErrorType = "prompt_outputs_failed_validation",
        errors: Sequence[NodeError] = (),
    ) -> None:
        super().__init__(message, type, tuple(errors))
        self.message = message
        self.type: ErrorType = type
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return "\n".join([self.message, *map(str, self.errors)])


class Refused(Exception):
    """Raised by a node's function: what it was given cannot be honoured. Who calls it knows the node."""

    def __init__(
        self,
        message: str,
        input: str | None = None,
        type: ErrorType = "custom_validation_failed",
    ) -> None:
        super().__init__(message, input, type)
        self.message = message
        self.input = input
        self.type: ErrorType = type
