"""The part that families share whose prompts a language model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, ClassVar, Final

from configs.model import LongText
from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.families.texts import Encoded, EncoderUse, Role, output_of
from deployments.engines.protocol import EngineError, PromptForm

if TYPE_CHECKING:  # the ingress has no torch
    import torch

ENCODER: Final = "text_encoder"


class PromptReader(Family):
    """A family with one text encoder, a language model that reads a prompt in one piece, in the form of `reading`."""

    reading: ClassVar[PromptForm]
    max_tokens: ClassVar[int] = 512
    default_tokens: ClassVar[int] = 512
    refused_text_rules: ClassVar[Mapping[str, str]] = {
        "chunk": "long_text 'chunk' is for CLIP, and a language model reads this pipeline's prompts, in one piece; use "
        "truncate or error"
    }

    def text_encoders(
        self, max_sequence_length: int | None, long_text: LongText, lacking: Set[str] = frozenset()
    ) -> Sequence[EncoderUse]:
        num_tokens = self.default_tokens if max_sequence_length is None else max_sequence_length
        if not 1 <= num_tokens <= self.max_tokens:
            raise EngineError(f"max_sequence_length {num_tokens}: expected 1 to {self.max_tokens}")
        return (EncoderUse(ENCODER, num_tokens + self.reading.num_dropped, long_text, form=self.reading),)

    def join_encodings(self, role: Role, encodings: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
        return {"prompt_embeds": output_of(role, encodings, ENCODER, "hidden").unsqueeze(0)}
