"""A stored program's tensors in the terms of the Open Inference Protocol. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from deployments.pipelines.records import Datatype, Signature, TensorSpec
from weights.programs.signature import ProgramSignature, ProgramTensor

_DATATYPES: Final[Mapping[str, Datatype]] = {
    "BOOL": "BOOL",
    "U8": "UINT8",
    "U16": "UINT16",
    "U32": "UINT32",
    "U64": "UINT64",
    "I8": "INT8",
    "I16": "INT16",
    "I32": "INT32",
    "I64": "INT64",
    "F16": "FP16",
    "BF16": "BF16",
    "F32": "FP32",
    "F64": "FP64",
}


def program_specs(signature: ProgramSignature) -> Signature:
    """Return what the program takes and gives, with -1 for each size that is not fixed."""
    return Signature(
        inputs=tuple(program_spec(one, optional=one.name in signature.may_lack) for one in signature.inputs),
        outputs=tuple(program_spec(one) for one in signature.outputs),
    )


def program_spec(tensor: ProgramTensor, *, optional: bool = False) -> TensorSpec:
    """Return one input or output."""
    shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    return TensorSpec(tensor.name, _DATATYPES[tensor.dtype], shape, optional)
