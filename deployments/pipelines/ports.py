"""Ports of stages: the parameters and outputs of models by kind, with their types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cluster.registry.directory import ModelRecord
from configs.pipeline import Argument
from deployments.pipelines.edge_types import BOOL, FLOAT, IMAGE, INT, TEXT, TOKENS, EdgeType
from deployments.pipelines.program_tensors import program_specs

MODEL_KINDS: Final = ("diffusion", "llm", "embedding", "reranker", "classifier", "head", "program", "upscaler")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter. `types` may come along an edge; `element` is the type in a list, which only the config can give."""

    types: tuple[EdgeType, ...] = ()
    required: bool = True
    element: type[str] | type[int] | type[float] | None = None

    def __str__(self) -> str:
        return f"list of {self.element.__name__}" if self.element else " or ".join(str(type_) for type_ in self.types)

    def takes_literal(self, value: Argument) -> bool:
        """Return whether `value`, written in the config, is of this parameter's type."""
        if self.element is not None:
            return isinstance(value, tuple) and all(_is(item, self.element) for item in value)
        return any(_is(value, _LITERALS[type_]) for type_ in self.types if type_ in _LITERALS)


@dataclass(frozen=True, slots=True)
class Ports:
    """Parameters and outputs of a stage.

    `extra` is the type of any further parameter; of each set in `one_of`, exactly one is given; a key of
    `goes_with` is given only together with its value.
    """

    parameters: Mapping[str, Parameter]
    outputs: Mapping[str, EdgeType]
    extra: Parameter | None = None
    one_of: tuple[frozenset[str], ...] = ()
    goes_with: Mapping[str, str] = field(default_factory=dict)


_LITERALS: Final[dict[EdgeType, type]] = {TEXT: str, INT: int, FLOAT: float, BOOL: bool}


def _is(value: object, type_: type) -> bool:
    if isinstance(value, bool):  # an int to Python, and never meant as one
        return type_ is bool
    return isinstance(value, int | float) if type_ is float else isinstance(value, type_)


def _optional(*types: EdgeType) -> Parameter:
    return Parameter(types, required=False)


TOKENIZER: Final = Ports({"text": Parameter((TEXT,))}, {"tokens": TOKENS})
_DIFFUSION: Final = Ports(
    {
        "prompt": Parameter((TEXT,)),
        "negative_prompt": _optional(TEXT),
        "seed": _optional(INT),
        "num_inference_steps": _optional(INT),
        "guidance_scale": _optional(FLOAT, INT),
        "true_cfg_scale": _optional(FLOAT, INT),
        "width": _optional(INT),
        "height": _optional(INT),
        "max_sequence_length": _optional(INT),
        "clip_skip": _optional(INT),
        "scheduler": _optional(TEXT),
        "init_image": _optional(IMAGE),
        "mask_image": _optional(EdgeType("UINT8", (-1, -1, -1))),
        "strength": _optional(FLOAT, INT),
    },
    {"image": IMAGE},
    goes_with={"mask_image": "init_image", "strength": "init_image"},
)
_LLM: Final = Ports(
    {
        "message": _optional(TEXT),  # the user's turn of a chat
        "system": _optional(TEXT),  # the turn before it
        "prompt": _optional(TEXT),  # a text to go on with, outside of any chat
        "max_tokens": _optional(INT),
        "temperature": _optional(FLOAT, INT),
        "top_p": _optional(FLOAT, INT),
        "top_k": _optional(INT),
        "seed": _optional(INT),
        "stop": Parameter(required=False, element=str),
    },
    {"text": TEXT},
    one_of=(frozenset({"message", "prompt"}),),
    goes_with={"system": "message"},
)


_UPSCALER: Final = Ports({"image": Parameter((IMAGE,))}, {"image": IMAGE})
_RERANKER: Final = Ports({"query": Parameter((TEXT,)), "text": Parameter((TEXT,))}, {"score": FLOAT})


def ports_of(model: ModelRecord) -> Ports | None:
    """Return the ports of a model; None for a kind that a pipeline has no use for. Unknown sizes are -1."""
    sizes = model.features
    if model.kind == "embedding":
        return Ports(
            {"text": _optional(TEXT), "tokens": _optional(TOKENS)},
            {"embedding": EdgeType("FP32", (-1, sizes.out_features or -1))},
            one_of=(frozenset({"text", "tokens"}),),
        )
    if model.kind == "classifier":
        return Ports({"text": Parameter((TEXT,))}, {"scores": EdgeType("FP32", (-1, sizes.out_features or -1))})
    if model.kind == "head":
        features = EdgeType("FP32", (-1, sizes.in_features or -1))
        return Ports({"features": Parameter((features,))}, {"output": EdgeType("FP32", (-1, sizes.out_features or -1))})
    if model.kind == "program" and model.signature is not None:
        specs = program_specs(model.signature)
        return Ports(
            {one.name: Parameter((EdgeType(one.datatype, one.shape),), not one.optional) for one in specs.inputs},
            {one.name: EdgeType(one.datatype, one.shape) for one in specs.outputs},
        )
    return {"diffusion": _DIFFUSION, "llm": _LLM, "reranker": _RERANKER, "upscaler": _UPSCALER}.get(model.kind or "")
