"""Which OpenAI endpoint a pipeline can be a model of, by what it takes and gives. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deployments.pipelines.edge_types import IMAGE, TEXT, EdgeType
from deployments.pipelines.records import Signature


@dataclass(frozen=True, slots=True)
class OpenAiRole:
    """`input` takes the prompt, `output` is what is answered. `options` are inputs that may be left out: those of
    the name of a field of the protocol (`seed`, say) take its value.
    """

    endpoint: Literal["images", "text", "embeddings"]
    input: str
    output: str
    options: tuple[str, ...]


def openai_role(signature: Signature) -> OpenAiRole | None:
    """None unless the only input that must be given is one text. The first output decides."""
    required = [spec for spec in signature.inputs if not spec.optional]
    if len(required) != 1 or EdgeType(required[0].datatype, required[0].shape) != TEXT:
        return None
    output = signature.outputs[0]
    given = EdgeType(output.datatype, output.shape)
    options = tuple(spec.name for spec in signature.inputs if spec.optional)
    if given == IMAGE:
        return OpenAiRole("images", required[0].name, output.name, options)
    if given == TEXT:
        return OpenAiRole("text", required[0].name, output.name, options)
    if given.datatype == "FP32" and len(given.shape) == 2:
        return OpenAiRole("embeddings", required[0].name, output.name, options)
    return None
