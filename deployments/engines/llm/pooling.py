"""One vector of a prompt's hidden states, from the last layer after its norm, noted chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from deployments.engines.libraries.embedding_rules import Prompts, check_dimensions, read_pooling_rule, read_prompts
from deployments.engines.llm.models.gguf_config import gguf_headers
from deployments.engines.records.protocol import EngineError, Pooling
from weights.formats.untrusted import shown

_POOLINGS: Final[dict[str, Pooling]] = {"mean": "mean", "lasttoken": "last"}  # by sentence-transformers' names
_GGUF_POOLINGS: Final[dict[int, Pooling]] = {1: "mean", 3: "last"}  # enum llama_pooling_type
_GGUF_NONE: Final = 0


@dataclass(frozen=True, slots=True)
class EmbeddingRules:
    """The size of a model's embeddings, its pooling in training, and the config with other sizes.

    `prompts` stand before texts to embed.
    """

    size: int
    pooling: Pooling
    config: Any
    prompts: Prompts = field(default_factory=Prompts)

    def shorten(self, vector_C: npt.NDArray[np.float32], dimensions: int | None) -> npt.NDArray[np.float32]:
        """Return the first `dimensions` of an embedding, of length 1; all of them as they are."""
        if dimensions in (None, self.size):
            return vector_C
        part = torch.from_numpy(vector_C[:dimensions])
        return F.normalize(part, dim=0).numpy()

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise EngineError for dimensions that the model was not trained for."""
        if dimensions is not None:
            check_dimensions(dimensions, self.size, self.config)


def load_embedding_rules(folder: Path, config: Any) -> EmbeddingRules:
    """Read the rules of the model's embeddings: the last token's state, unless sentence-transformers' files or GGUF's
    `pooling_type` say otherwise. Raises EngineError for a pooling that is not supported.
    """
    pooling: Pooling = "last"
    if headers := gguf_headers(folder):
        metadata = headers[0].metadata
        key = f"{metadata['general.architecture']}.pooling_type"
        if (given := metadata.get(key, _GGUF_NONE)) != _GGUF_NONE:
            if type(given) is not int or given not in _GGUF_POOLINGS:
                raise EngineError(f"GGUF key {key} is {shown(given)}; supported are 0 (none), 1 (mean), 3 (last)")
            pooling = _GGUF_POOLINGS[given]
    elif (rule := read_pooling_rule(folder, _POOLINGS)) is not None and rule.modes:
        if len(rule.modes) > 1:
            raise EngineError(f"{folder}: pooling {' and '.join(rule.modes)}; a language model has one of them")
        pooling = _POOLINGS[rule.modes[0]]
    return EmbeddingRules(config.get_text_config().hidden_size, pooling, config, read_prompts(folder))
