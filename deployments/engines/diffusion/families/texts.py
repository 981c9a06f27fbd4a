"""The texts of a request in the form for text encoders, and the encoders' outputs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from configs.model import LongText, TextPadding
from deployments.engines.records.protocol import PENULTIMATE, ClipLayer, EngineError, PromptForm

if TYPE_CHECKING:  # the ingress has no torch
    import torch

Role = Literal["prompt", "negative"]
Encoded = Mapping[str, "torch.Tensor"]  # outputs of one text encoder for one text, without batch axis


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """One text for one text encoder, named by its component. `max_length` None is the tokenizer's own.

    `form` is the language model's form of the text; other encoders read the text itself.
    """

    component: str
    text: str
    max_length: int | None
    role: Role
    padding: TextPadding = "stock"
    long_text: LongText = "truncate"
    layer: ClipLayer = PENULTIMATE
    form: PromptForm | None = None


class EncoderUse(NamedTuple):
    """A text encoder of a pipeline: the most tokens that it gets, its rule for longer texts, its layer if a CLIP.

    `form` is that of a language model.
    """

    component: str
    max_length: int | None = None
    long_text: LongText = "truncate"
    layer: ClipLayer = PENULTIMATE
    form: PromptForm | None = None


def lacking_encoders(model_index: Mapping[str, Any]) -> Set[str]:
    """Return the text encoders that the saved pipeline lacks: model_index.json has nulls in their places."""
    return {
        name
        for name, value in model_index.items()
        if name.startswith("text_encoder") and isinstance(value, list) and not any(value)
    }


def output_of(role: Role, encodings: Mapping[str, Encoded], component: str, name: str) -> torch.Tensor:
    """Return one output of one text encoder. Raises EngineError with the present ones."""
    encoded = encodings.get(component, {})
    if name not in encoded:
        raise EngineError(f"the {role} has no {name!r} of {component!r} (given: {', '.join(encoded) or 'nothing'})")
    return encoded[name]
