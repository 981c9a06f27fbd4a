"""Rows of many requests through one program: stacked, padded where a mask tells, and cut apart again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from deployments.engines.costs.memory_limits import is_out_of_memory
from deployments.engines.programs.bound import ServedProgram
from deployments.engines.records.protocol import EngineError
from deployments.engines.text.forward_plan import plan_forwards
from weights.platform.torch_dtypes import TORCH_DTYPES
from weights.programs.signature import BATCH, ProgramTensor

Tensors = Mapping[str, torch.Tensor]
# What torch raises for values that a graph cannot take: an index beyond a table, a size that an assertion forbids.
_OF_VALUES: Final = (IndexError, ValueError, RuntimeError, AssertionError)


@dataclass(frozen=True, slots=True, eq=False)
class ProgramJob:
    """A row of a request, without its batch dimension; of a program that is not batched, the whole request.

    `sizes` are what the sizes that have names are here.
    """

    program: ServedProgram
    inputs: Tensors
    sizes: Mapping[str, int]

    @property
    def group(self) -> tuple[object, ...]:
        """Return the key that jobs share which may run together. It knows the program by number, and holds no weights.

        Sizes that a mask evens out may differ.
        """
        masks = self.program.signature.masks
        fixed = [item for item in self.sizes.items() if item[0] not in masks and item[0] != BATCH]
        return (id(self.program), *sorted(fixed))

    @property
    def length(self) -> int:
        """Return the number of positions under a mask: the tokens of a text, 1 where there is no mask."""
        return max(1, sum(self.sizes[size] for size in self.program.signature.masks))

    def row(self, tensor: ProgramTensor) -> torch.Tensor:
        """Return its row of an input; of a mask that was not given, ones."""
        dtype = TORCH_DTYPES[tensor.dtype]
        if tensor.name in self.inputs:
            return self.inputs[tensor.name].to(dtype)
        return torch.ones([self.sizes[str(size)] for size in tensor.shape[1:]], dtype=dtype)


def tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor of its own: what comes from Ray is read-only."""
    owned = np.array(array)
    if owned.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(owned.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(owned)


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor of any device as an array of the same type."""
    here = tensor.contiguous().cpu()
    if here.dtype == torch.bfloat16:
        return here.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return here.numpy()


def answer_of(program: ServedProgram, found: Sequence[Tensors]) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs of a request from those of its jobs."""
    if not program.signature.has_batch:
        return {name: array_of(tensor) for name, tensor in found[0].items()}
    names = [one.name for one in program.signature.outputs]
    return {name: array_of(torch.stack([row[name] for row in found])) for name in names}


def jobs_of(program: ServedProgram, inputs: Tensors) -> list[ProgramJob]:
    """Return the jobs of one request: one for each row, or one alone. Raises EngineError for what does not fit."""
    signature = program.signature
    if unknown := sorted(inputs.keys() - {one.name for one in signature.inputs}):
        raise EngineError(f"unknown input {unknown[0]!r}")
    if refusal := signature.refusal({name: tuple(tensor.shape) for name, tensor in inputs.items()}):
        raise EngineError(refusal.text)
    for one in signature.inputs:
        if one.below is not None and one.name in inputs and inputs[one.name].numel():
            least, most = (int(bound) for bound in inputs[one.name].aminmax())
            if least < 0 or most >= one.below:
                found = least if least < 0 else most
                raise EngineError(f"input {one.name!r} has {found}, the program looks up 0 to {one.below - 1}")
    sizes = signature.sizes_of({name: tuple(tensor.shape) for name, tensor in inputs.items()})
    if not signature.has_batch:
        return [ProgramJob(program, inputs, sizes)]
    rows = range(sizes[BATCH])
    return [ProgramJob(program, {name: tensor[at] for name, tensor in inputs.items()}, sizes) for at in rows]


def jobs_of_rows(
    program: ServedProgram, rows: Mapping[str, Sequence[torch.Tensor]], first: int = 0
) -> list[ProgramJob]:
    """Return a job for each item, whose sizes may differ, of a program of rows. `first` is the number of the first one.

    Raises EngineError as `jobs_of` does, with the number of the item.
    """
    jobs = []
    for number, inputs in enumerate(zip(*rows.values(), strict=True)):
        try:
            jobs += jobs_of(program, {name: row[None] for name, row in zip(rows, inputs, strict=True)})
        except EngineError as error:
            raise EngineError(f"item {first + number}: {error}") from None
    return jobs


def run_jobs(jobs: Sequence[ProgramJob]) -> list[dict[str, torch.Tensor]]:
    """Return the outputs of each job of one group, on the program's device. Blocks.

    Rows share as few calls as pay off and the program's range allows. Raises EngineError when the program refuses
    values, which may be those of one job only.
    """
    signature = jobs[0].program.signature
    if not signature.has_batch:
        return [_called(job.program, job.inputs) for job in jobs]
    found: dict[int, dict[str, torch.Tensor]] = {}
    most = signature.ranges[BATCH][1]
    for group in plan_forwards([job.length for job in jobs]):
        for numbers in _parts(group, most):
            found |= zip(numbers, _run_rows([jobs[number] for number in numbers]), strict=True)
    return [found[number] for number in range(len(jobs))]


def _parts(group: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(group), most):
        yield group[start : start + most]


def _run_rows(jobs: Sequence[ProgramJob]) -> list[dict[str, torch.Tensor]]:
    """Run rows in one call, filled up to the least that the program takes."""
    program = jobs[0].program
    signature = program.signature
    padded = {size: max(job.sizes[size] for job in jobs) for size in signature.masks}
    filled = [*jobs, *[jobs[-1]] * (signature.ranges[BATCH][0] - len(jobs))]
    given = {one.name: _stacked([job.row(one) for job in filled]) for one in signature.inputs}
    outputs = _called(program, given)
    cuts = {
        one.name: [(dim, str(size)) for dim, size in enumerate(one.shape[1:]) if size in padded]
        for one in signature.outputs
    }
    return [
        {name: _cut(outputs[name][at], places, job.sizes) for name, places in cuts.items()}
        for at, job in enumerate(jobs)
    ]


def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack rows, each with zeros behind it up to the largest sizes."""
    shape = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    if all(list(row.shape) == shape for row in rows):
        return torch.stack(list(rows))
    stacked = rows[0].new_zeros([len(rows), *shape])
    for place, row in zip(stacked, rows, strict=True):
        place[tuple(slice(size) for size in row.shape)] = row
    return stacked


def _cut(row: torch.Tensor, places: Sequence[tuple[int, str]], sizes: Mapping[str, int]) -> torch.Tensor:
    for dim, size in places:
        row = row.narrow(dim, 0, sizes[size])
    return row


def _called(program: ServedProgram, given: Tensors) -> dict[str, torch.Tensor]:
    try:
        return program({name: tensor.to(program.device) for name, tensor in given.items()})
    except _OF_VALUES as error:
        if is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EngineError(f"the program refuses these values: {reason[:300]}") from None
