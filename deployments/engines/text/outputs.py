"""A text's outputs of an encoder's forward: token vectors of a layer, one vector, a classifier's logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from configs.model import TextPadding
from deployments.engines.records.protocol import LAST, PENULTIMATE, ComputationFailed, EngineError
from deployments.engines.text.forwards import PER_TEXT, EncoderFamily, clip_layer_name, layer_name
from deployments.engines.text.sentence_layers import Pooling
from deployments.engines.text.tokens import TextTokenizer, TokenizedText


@dataclass(frozen=True, slots=True)
class TextOutputs:
    """Outputs of the encoder `name`. `pooling` makes one vector of many, the tokenizer defines the padding."""

    name: str
    family: EncoderFamily
    pooling: Pooling | None
    tokenizer: TextTokenizer

    def check_embeds(self) -> None:
        """Raise EngineError when a text gives no single vector."""
        given = self.family.outputs
        if "embedding" not in given and not (self.pooling or "pooled" in given):
            raise EngineError(f"this encoder gives {', '.join(given)} per token, but no embedding")

    def as_asked(
        self, text: TokenizedText, max_length: int | None, padding: TextPadding, *, as_embedding: bool
    ) -> TokenizedText:
        """Return the text with its wanted padding, or as one to embed."""
        if as_embedding or "embedding" in self.family.outputs:
            return replace(text, as_embedding=True)
        if padding == "trimmed":
            return text
        return replace(text, padded_length=self.tokenizer.check_length(max_length))

    def variant(self, text: TokenizedText) -> str:
        """Return the name that distinguishes encodings of the same weights and ids: padding, layer, or pooling."""
        if self.family.is_classifier:
            return f"logits:{','.join(map(str, text.type_ids))}"
        if text.form:
            what = text.padded_length and (text.padded_length, self.tokenizer.pad_id, self.tokenizer.pads_left)
            seen = "".join(f":{image.digest.hex()}" for image in text.images)
            return f"layers:{text.form.layers}:{text.form.num_dropped}:{what}{seen}"
        if text.as_embedding:
            pooling = self.pooling or Pooling()
            how = "pooled" if self.family.is_clip else "+".join((*pooling.modes, *["unit"] * pooling.normalize))
            return f"embedding:{how}"
        if text.padded_length is None:
            return "trimmed"
        # Tokenizers of the same weights may pad with other ids.
        side = "left:" if self.tokenizer.pads_left else ""
        layer = (
            "" if text.layer == PENULTIMATE else "last:" if text.layer == LAST else f"{clip_layer_name(text.layer)}:"
        )
        return f"{layer}stock:{text.padded_length}:{side}{self.tokenizer.pad_id}"

    def sources_of(self, text: TokenizedText) -> dict[str, str]:
        """Return the names of a text's outputs, and of the family's outputs that they are made of."""
        if text.form:
            return {layer_name(layer): layer_name(layer) for layer in text.form.layers}
        if text.as_embedding:
            return {"embedding": "pooled" if self.family.is_clip else "embedding"}
        if self.family.is_clip:
            return {
                "pooled": "pooled",
                "hidden" if text.layer.is_normed else "penultimate": clip_layer_name(text.layer),
            }
        return {name: name for name in self.family.outputs}

    def of_row(
        self, text: TokenizedText, row: int, outputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | ComputationFailed:
        """Return the output of the text in a row of a forward, or its error."""
        own = {name: _own_rows(outputs[source][row], text, source) for name, source in self.sources_of(text).items()}
        if text.form:
            own = {"hidden": torch.cat(list(own.values()), dim=-1)}
        if not all(output.isfinite().all() for output in own.values()):  # cached, they would spoil every image
            return ComputationFailed(f"the {self.name} made numbers of the text that are not finite")
        return own


def _own_rows(output: torch.Tensor, text: TokenizedText, name: str) -> torch.Tensor:
    """Return rows without the filler, in their own memory: a view in a cache would keep the whole batch alive."""
    is_per_token = name not in PER_TEXT
    own = output[text.num_dropped : text.run_length] if is_per_token else output
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
