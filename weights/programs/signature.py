"""Signatures of programs: names, types and sizes, all that a server has to know without opening one. Pure.

Sizes that may differ from request to request have names: "batch" is that of the rows, which are independent of each
other; others are called by the input and dimension that they are first seen at ("input_ids.1").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter, ValidationError

from weights.records.errors import FormatError
from weights.records.manifest import Component

COMPONENT: Final = "program"  # the only one of a program
SIGNATURE: Final = "signature"  # metadata of a program that can be served: this, as JSON
UNSERVABLE: Final = "unservable"  # metadata of one that cannot: why
BATCH: Final = "batch"
# Those that the Open Inference Protocol has, too.
SERVED_DTYPES: Final = frozenset(
    ("BOOL", "U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64")
)
UNBOUNDED: Final = 8192  # the largest size where the program names none: memory has an end


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """An input or output. `shape` has numbers, names of sizes, and, of an output, terms of these.

    `dtype` is the store's name. The values of an input that looks up rows of a table are from 0 to under `below`.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    below: int | None = None


@dataclass(frozen=True, slots=True)
class UnfitInput:
    """The tensors that a program does not take: the input, and a sentence that says why."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ProgramSignature:
    """The inputs and outputs of a program, and the least and the largest of each size that has a name."""

    inputs: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...]
    ranges: Mapping[str, tuple[int, int]]

    @property
    def has_batch(self) -> bool:
        """Return whether its first dimension counts rows everywhere, and nothing else does: they may be batched."""
        tensors = (*self.inputs, *self.outputs)
        others = {size for tensor in tensors for size in tensor.shape[1:] if isinstance(size, str)}
        is_term_of_it = any(BATCH in size for size in others - self.ranges.keys())
        return all(one.shape[:1] == (BATCH,) for one in tensors) and BATCH not in others and not is_term_of_it

    @property
    def masks(self) -> Mapping[str, str]:
        """The sizes that padding may even out, with the mask of each.

        That is an input (batch, size) by the name of a mask; no output may have a term of that size.
        """
        if not self.has_batch:
            return {}
        masks = [one for one in self.inputs if len(one.shape) == 2 and _is_mask(one.name)]
        terms = [str(size) for one in self.outputs for size in one.shape if size not in self.ranges]
        sizes = {str(one.shape[1]): one.name for one in masks if one.shape[1] in self.ranges}
        return {size: name for size, name in sizes.items() if not any(size in term for term in terms)}

    @property
    def may_lack(self) -> frozenset[str]:
        """The inputs that are made where they are not given: masks of what another input tells the size of."""
        input_sizes = {size for one in self.inputs if not _is_mask(one.name) for size in one.shape}
        return frozenset(name for size, name in self.masks.items() if size in input_sizes)

    def ranges_text(self) -> str:
        """Return `batch 1 to 64, input_ids.1 1 to 128`, "" where all sizes are fixed."""
        return ", ".join(f"{size} {least} to {most}" for size, (least, most) in self.ranges.items())

    def sizes_of(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the named sizes of inputs with these shapes, which `refusal` has found in order."""
        given = [(one.shape, shapes[one.name]) for one in self.inputs if one.name in shapes]
        pairs = (pair for shape, numbers in given for pair in zip(shape, numbers, strict=True))
        return {size: number for size, number in pairs if isinstance(size, str)}

    def refusal(self, shapes: Mapping[str, tuple[int, ...]]) -> UnfitInput | None:
        """Return why the program does not take inputs of these shapes; None where it does.

        A batch smaller than the least is filled up, so it is in order.
        """
        found: dict[str, tuple[int, str]] = {}
        for tensor in self.inputs:
            if tensor.name not in shapes:
                if tensor.name not in self.may_lack:
                    return UnfitInput(tensor.name, f"missing input {tensor.name!r}")
                continue
            if refusal := self._refusal_of(tensor, shapes[tensor.name], found):
                return refusal
        return None

    def _refusal_of(
        self, tensor: ProgramTensor, shape: tuple[int, ...], found: dict[str, tuple[int, str]]
    ) -> UnfitInput | None:
        if len(shape) != len(tensor.shape):
            text = f"{len(shape)} dimensions, the program takes {len(tensor.shape)}"
            return UnfitInput(tensor.name, f"input {tensor.name!r} has {text}")
        for dim, (size, number) in enumerate(zip(tensor.shape, shape, strict=True)):
            where = f"input {tensor.name!r} has size {number} in dimension {dim}"
            if isinstance(size, int):
                if number != size:
                    return UnfitInput(tensor.name, f"{where}, the program takes {size}")
                continue
            least, most = self.ranges[size]
            if not (1 if size == BATCH and self.has_batch else least) <= number <= most:
                return UnfitInput(tensor.name, f"{where}, the program takes {least} to {most} ({size})")
            before, name = found.setdefault(size, (number, tensor.name))
            if before != number:
                return UnfitInput(tensor.name, f"{where}, but {name!r} has {before} of the same ({size})")
        return None

    def to_json(self) -> str:
        """Return it as the metadata of a component has it."""
        return _ADAPTER.dump_json(self).decode()


_ADAPTER: Final = TypeAdapter(ProgramSignature)


def signature_of(component: Component) -> ProgramSignature:
    """Return the signature of a stored program. Raises FormatError with the reason why it cannot be served."""
    if reason := component.metadata.get(UNSERVABLE):
        raise FormatError(reason)
    text = component.metadata.get(SIGNATURE)
    if text is None:
        raise FormatError("it was stored without its signature, by an earlier version; import it again")
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise FormatError(f"metadata of component {component.name}: {SIGNATURE!r}: {error}") from None


def is_program(component: Component) -> bool:
    """Return whether it is a program's."""
    return component.library in ("torch", "onnx")


def named_shapes(shapes: Mapping[str, tuple[int | str, ...]]) -> dict[str, str]:
    """Return a name for each size that is text (a symbol) in the inputs' shapes."""
    names = dict.fromkeys(shape[0] for shape in shapes.values() if shape and isinstance(shape[0], str))
    is_batch = len(names) == 1 and all(shape and isinstance(shape[0], str) for shape in shapes.values())
    found = {str(symbol): BATCH for symbol in names} if is_batch else {}
    for symbol, name in _first_places(shapes):
        found.setdefault(symbol, name)
    return found


def _first_places(shapes: Mapping[str, tuple[int | str, ...]]) -> Iterator[tuple[str, str]]:
    for name, shape in shapes.items():
        for dim, size in enumerate(shape):
            if isinstance(size, str):
                yield size, f"{name}.{dim}"


def _is_mask(name: str) -> bool:
    return name == "mask" or name.endswith("_mask")
