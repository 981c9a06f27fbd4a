"""What each kind of model takes and gives in the Open Inference Protocol, and the check of a request against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from deployments.errors import InvalidRequest
from deployments.pipelines.records import Signature, TensorSpec, TensorValue


def _option(name: str, datatype: str) -> TensorSpec:
    return TensorSpec(name, datatype, (-1,), optional=True)  # type: ignore[arg-type]  # literals below


# Optional inputs have one element for all prompts or one for each. Their names are the fields of the records in
# `deployments/records.py`, save `lora` ("name:scale,name") and `chat` (answer the text as one turn of a chat).
DIFFUSION: Final = Signature(
    inputs=(
        TensorSpec("prompt", "BYTES", (-1,)),
        _option("negative_prompt", "BYTES"),
        _option("seed", "INT64"),
        _option("num_inference_steps", "INT32"),
        _option("guidance_scale", "FP32"),
        _option("true_cfg_scale", "FP32"),
        _option("max_sequence_length", "INT32"),
        _option("width", "INT32"),
        _option("height", "INT32"),
        _option("lora", "BYTES"),
    ),
    outputs=(TensorSpec("images", "UINT8", (-1, -1, -1, 3)), TensorSpec("seed", "INT64", (-1,))),
)
# Of `stop`, every element is for every prompt.
LLM: Final = Signature(
    inputs=(
        TensorSpec("text_input", "BYTES", (-1,)),
        _option("max_tokens", "INT32"),
        _option("temperature", "FP32"),
        _option("top_p", "FP32"),
        _option("top_k", "INT32"),
        _option("seed", "INT64"),
        _option("stop", "BYTES"),
        _option("chat", "BOOL"),
    ),
    outputs=(
        TensorSpec("text_output", "BYTES", (-1,)),
        TensorSpec("finish_reason", "BYTES", (-1,)),
        TensorSpec("num_input_tokens", "INT64", (-1,)),
        TensorSpec("num_output_tokens", "INT64", (-1,)),
    ),
)
# Exactly one of the two inputs.
EMBEDDING: Final = Signature(
    inputs=(
        TensorSpec("text", "BYTES", (-1,), optional=True),
        TensorSpec("input_ids", "INT64", (-1, -1), optional=True),
    ),
    outputs=(TensorSpec("embedding", "FP32", (-1, -1)),),
)
HEAD: Final = Signature(
    inputs=(TensorSpec("features", "FP32", (-1, -1)),),
    outputs=(TensorSpec("scores", "FP32", (-1, -1)),),
)
SIGNATURES: Final[Mapping[str, Signature]] = {
    "diffusion": DIFFUSION,
    "llm": LLM,
    "embedding": EMBEDDING,
    "head": HEAD,
}


def described(specs: Sequence[TensorSpec]) -> str:
    """`prompt BYTES [-1], seed INT64 [-1] (optional)`."""
    return ", ".join(
        f"{spec.name} {spec.datatype} {list(spec.shape)}{' (optional)' if spec.optional else ''}" for spec in specs
    )


def check_inputs(model: str, signature: Signature, inputs: Sequence[TensorValue]) -> dict[str, TensorValue]:
    """The inputs by name. Raises InvalidRequest naming what the model takes."""
    takes = f"model {model!r} takes {described(signature.inputs)}"
    specs = {spec.name: spec for spec in signature.inputs}
    given: dict[str, TensorValue] = {}
    for value in inputs:
        spec = specs.get(value.name)
        if spec is None:
            raise InvalidRequest(f"unknown input {value.name!r}; {takes}", value.name)
        if value.name in given:
            raise InvalidRequest(f"input {value.name!r} is given twice", value.name)
        if value.datatype != spec.datatype or not _fits(value.shape, spec.shape):
            raise InvalidRequest(
                f"input {value.name!r} is {value.datatype} {list(value.shape)}, "
                f"expected {spec.datatype} {list(spec.shape)}",
                value.name,
            )
        given[value.name] = value
    missing = [spec.name for spec in signature.inputs if not spec.optional and spec.name not in given]
    if missing:
        raise InvalidRequest(f"missing input {missing[0]!r}; {takes}", missing[0])
    return given


def check_outputs(model: str, signature: Signature, names: Sequence[str]) -> None:
    """Raises InvalidRequest naming what the model gives."""
    known = {spec.name for spec in signature.outputs}
    for position, name in enumerate(names):
        if name not in known:
            gives = described(signature.outputs)
            raise InvalidRequest(f"unknown output {name!r}; model {model!r} gives {gives}", name)
        if name in names[:position]:
            raise InvalidRequest(f"output {name!r} is asked for twice", name)


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(shape) == len(wanted) and all(want in (-1, size) for size, want in zip(shape, wanted, strict=True))
