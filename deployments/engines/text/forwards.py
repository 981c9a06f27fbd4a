"""The forward of each family of encoders, over texts of several lengths at once.

Texts are padded at the end to the longest of the forward. What keeps the padding out of their outputs:

- CLIP is causal, so a token never sees what comes after it; it needs no mask. Its positions count from the first
  token. It pools at the first end token: the filler must not be taken for one (`filler_id`).
- T5 attends both ways, under a mask. Its relative positions are differences, which padding at the end leaves alone.
- BERT and its relatives attend both ways, under a mask. Positions count from the first token; RoBERTa counts tokens
  that are not padding.

Outputs equal those of each text alone up to rounding (measured: 2e-6 of the largest value in float32, 2 units in the
last place in bfloat16). Bitwise equality is not to be had in a batch, not even of equal lengths: torch chooses the
kernel of a matrix product by its number of rows. Sources: transformers 5.23, `modeling_clip.py`, `modeling_t5.py`,
`modeling_bert.py`, `modeling_roberta.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deployments.engines.text.bert_layers import has_bert_layers, token_vectors
from deployments.engines.text.sentence_layers import Pooling

PER_TOKEN = ("hidden", "penultimate")  # outputs with a row per token; the others have one per text


class _Forward(Protocol):
    def __call__(
        self, module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, pooling: Pooling | None
    ) -> dict[str, torch.Tensor]:
        """Ids and a 0/1 mask, both (B, L), to outputs with a leading batch axis."""


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family of text encoders: how one is `run`, and the names of its `outputs`, whatever it pools."""

    run: _Forward
    outputs: tuple[str, ...]
    is_clip: bool = False


def encoder_family_of(class_name: str) -> EncoderFamily:
    """Return the family of a class; an unknown one is taken for one that gives token vectors, as BERT does."""
    return FAMILIES.get(class_name, SENTENCES)


def filler_id(family: EncoderFamily, config: Any, pad_id: int) -> int:
    """Return the filler of shorter texts. CLIP pools at the first end token, by old configs at the highest id."""
    if not family.is_clip:
        return pad_id
    return 0 if config.eos_token_id != 0 else 1


def _run_clip(
    module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, pooling: Pooling | None
) -> dict[str, torch.Tensor]:
    out = module(ids_BL, output_hidden_states=True)
    pooled = out.text_embeds if hasattr(out, "text_embeds") else out.pooler_output
    return {"pooled": pooled, "penultimate": out.hidden_states[-2], "hidden": out.last_hidden_state}


def _run_t5(
    module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, pooling: Pooling | None
) -> dict[str, torch.Tensor]:
    hidden_BLD = module(ids_BL, attention_mask=mask_BL).last_hidden_state
    return {"hidden": hidden_BLD} | ({"embedding": pooling(hidden_BLD, mask_BL)} if pooling else {})


def _run_sentences(
    module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, pooling: Pooling | None
) -> dict[str, torch.Tensor]:
    if has_bert_layers(module):
        hidden_BLD = token_vectors(module, ids_BL, mask_BL)
    else:
        hidden_BLD = module(ids_BL, attention_mask=mask_BL).last_hidden_state
    return {"embedding": (pooling or Pooling())(hidden_BLD, mask_BL)}


CLIP = EncoderFamily(_run_clip, ("pooled", "penultimate"), is_clip=True)
FAMILIES: Mapping[str, EncoderFamily] = {
    "CLIPTextModel": CLIP,
    "CLIPTextModelWithProjection": CLIP,
    "T5EncoderModel": EncoderFamily(_run_t5, ("hidden",)),
}
SENTENCES = EncoderFamily(_run_sentences, ("embedding",))
