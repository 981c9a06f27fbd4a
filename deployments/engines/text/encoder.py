"""One text encoder: strings -> token ids -> embeddings, many texts in one forward.

The two halves are apart because token ids are what an embedding cache is keyed on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AutoTokenizer

from deployments.engines.build import IMPORT_LOCK, build_module, read_config
from deployments.engines.protocol import EngineError
from deployments.engines.text.pooling import Pooling, load_pooling

TokenIds = tuple[int, ...]
# What tokenizers without a limit of their own get: the length that the stock Flux pipeline pads T5 to.
DEFAULT_MAX_TOKENS = 512
OPTIONAL_PARTS = ("pooler",)  # of a BERT: not every checkpoint has one, and no embedding needs it


class _Forward(Protocol):
    """A merged forward: ids and 0/1 mask, both (B, L), to outputs with a leading batch axis."""

    def __call__(self, module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> dict[str, torch.Tensor]: ...


class TextEncoder:
    """A CLIP, CLIP-with-projection, T5 or BERT-family encoder and its tokenizer.

    `encode` belongs to one thread at a time; `tokenize` and `num_truncated` may be called from any.
    """

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        *,
        max_tokens: int | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        """`max_tokens` limits every text (None: what tokenizer and model allow). `pooling` is for
        sentence encoders.
        """
        self.module = module
        self._tokenizer = tokenizer
        # HAZARD: a fast tokenizer is reconfigured by each call (padding, truncation), so calls must not
        # overlap.
        self._tokenizer_lock = threading.Lock()
        self._forward: _Forward = _FORWARDS.get(type(module).__name__) or partial(
            _encode_sentences, pooling=pooling or Pooling()
        )
        self.fixed_length = type(module).__name__ in _FORWARDS
        self.max_tokens = min(max_tokens or sys.maxsize, _token_limit(module, tokenizer))
        self._vocabulary_size = module.get_input_embeddings().num_embeddings  # type: ignore[operator]

    @property
    def dtype(self) -> torch.dtype:
        """Of the outputs."""
        return next(self.module.parameters()).dtype

    def tokenize(self, texts: Sequence[str], max_length: int | None = None) -> list[TokenIds]:
        """Token ids per text, truncated to `max_length` (None: the model's limit).

        CLIP and T5 pad to `max_length` as the stock pipelines do; sentence encoders do not pad.
        """
        length = self._check_length(max_length)
        padding = "max_length" if self.fixed_length else False
        return [tuple(ids) for ids in self._ids(texts, padding=padding, truncation=True, max_length=length)]

    def num_truncated(self, texts: Sequence[str], max_length: int | None = None) -> list[int]:
        """How many tokens `tokenize` cuts off each text."""
        length = self._check_length(max_length)
        return [max(0, len(ids) - length) for ids in self._ids(texts, padding=False, truncation=False)]

    def encode(self, token_ids: Sequence[TokenIds]) -> list[dict[str, torch.Tensor]]:
        """Embeddings per text, without batch axis: one forward for all texts (CLIP, T5: one per length).

        CLIP gives "pooled" (P,) and "penultimate" (L, D), with projection "pooled" is the projected one;
        T5 gives "hidden" (L, D); sentence encoders "embedding" (D,). Raises EngineError for ids that the
        model cannot take.
        """
        for ids in token_ids:
            self._check_ids(ids)
        outputs: list[dict[str, torch.Tensor]] = [{} for _ in token_ids]
        for positions in self._groups(token_ids):
            batch = self._run([token_ids[position] for position in positions])
            for row, position in enumerate(positions):
                # A slice would keep the whole batch alive in a cache that holds one text of it.
                outputs[position] = {
                    name: value[row].clone() if len(positions) > 1 else value[row] for name, value in batch.items()
                }
        return outputs

    def _groups(self, token_ids: Sequence[TokenIds]) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for position, ids in enumerate(token_ids):
            groups.setdefault(len(ids) if self.fixed_length else 0, []).append(position)
        return list(groups.values())

    def _run(self, token_ids: Sequence[TokenIds]) -> dict[str, torch.Tensor]:
        longest = max(len(ids) for ids in token_ids)
        pad = self._tokenizer.pad_token_id or 0
        device = next(self.module.parameters()).device
        ids_BL = torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids in token_ids], device=device)
        lengths_B = torch.tensor([len(ids) for ids in token_ids], device=device)
        mask_BL = (torch.arange(longest, device=device) < lengths_B[:, None]).long()
        with torch.no_grad():
            outputs = self._forward(module=self.module, ids_BL=ids_BL, mask_BL=mask_BL)
        # Embeddings are cached and sent to other processes, and a card's memory is for weights.
        return {name: output.cpu() for name, output in outputs.items()}

    def _ids(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise EngineError(f"texts to tokenize must be a sequence of strings, got {texts!r:.100}")
        for text in texts:
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise EngineError(f"text {text!r:.100} has half of a surrogate pair, which is no character")
        if not texts:
            return []
        with self._tokenizer_lock:
            ids: list[list[int]] = self._tokenizer(list(texts), verbose=False, **options)["input_ids"]
        return ids

    def _check_length(self, max_length: int | None) -> int:
        if max_length is None:
            return self.max_tokens
        limit = _position_limit(self.module)
        if max_length < 1 or (limit is not None and max_length > limit):
            raise EngineError(f"max_length {max_length}: expected 1 to {limit or 'any number of'} tokens")
        return max_length

    def _check_ids(self, ids: TokenIds) -> None:
        limit = _position_limit(self.module)
        if not ids or (limit is not None and len(ids) > limit):
            raise EngineError(f"a text of {len(ids)} tokens: expected 1 to {limit or 'any number of'} tokens")
        if not 0 <= min(ids) <= max(ids) < self._vocabulary_size:
            raise EngineError(f"token ids {min(ids)} to {max(ids)}: expected 0 to {self._vocabulary_size - 1}")


def load_text_encoder(
    folder: Path,
    library: str,
    class_name: str | None,
    tokenizer_folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    build: Callable[..., nn.Module] = build_module,
) -> TextEncoder:
    """The encoder of `folder` around `tensors` (not copied). Reads the sentence-transformers files if
    there are any. `build` makes the module as `build_module` does.
    """
    class_name = class_name or next(iter(read_config(folder / "config.json").get("architectures") or ()), "")
    if not (class_name in _FORWARDS or class_name.endswith("Model")):  # BertModel has them, BertForMaskedLM not
        known = ", ".join(_FORWARDS)
        raise EngineError(f"{folder}: {class_name} gives no token vectors, expected {known} or another …Model")
    module = build(library, class_name, folder, tensors, optional_parts=OPTIONAL_PARTS)
    try:
        with IMPORT_LOCK:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    except Exception as error:  # many kinds, by tokenizer class
        raise EngineError(f"{tokenizer_folder}: no tokenizer can be loaded: {error}") from error
    if class_name in _FORWARDS:
        return TextEncoder(module, tokenizer)
    sentence_config = folder / "sentence_bert_config.json"
    max_tokens = read_config(sentence_config).get("max_seq_length") if sentence_config.exists() else None
    return TextEncoder(module, tokenizer, max_tokens=max_tokens, pooling=load_pooling(folder))


def _position_limit(module: nn.Module) -> int | None:
    """Longest text that the model has positions for; None for relative positions (T5)."""
    limit = getattr(module.config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    table = getattr(getattr(module, "embeddings", None), "position_embeddings", None)
    padding_index = getattr(table, "padding_idx", None)  # RoBERTa counts from behind it
    return limit if padding_index is None else limit - padding_index - 1


def _token_limit(module: nn.Module, tokenizer: Any) -> int:
    limit = min(tokenizer.model_max_length, _position_limit(module) or tokenizer.model_max_length)
    return limit if limit < 10**9 else DEFAULT_MAX_TOKENS  # transformers writes "no limit" as 10**30


def _encode_clip(module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> dict[str, torch.Tensor]:
    # No mask: the stock pipelines let CLIP and T5 attend to the padding too.
    out = module(ids_BL, output_hidden_states=True)
    return {"pooled": out.pooler_output, "penultimate": out.hidden_states[-2]}


def _encode_clip_with_projection(module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> dict[str, torch.Tensor]:
    out = module(ids_BL, output_hidden_states=True)
    return {"pooled": out.text_embeds, "penultimate": out.hidden_states[-2]}


def _encode_t5(module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"hidden": module(ids_BL).last_hidden_state}


def _encode_sentences(
    module: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, pooling: Pooling
) -> dict[str, torch.Tensor]:
    return {"embedding": pooling(module(ids_BL, attention_mask=mask_BL).last_hidden_state, mask_BL)}


_FORWARDS: Mapping[str, _Forward] = {
    "CLIPTextModel": _encode_clip,
    "CLIPTextModelWithProjection": _encode_clip_with_projection,
    "T5EncoderModel": _encode_t5,
}
