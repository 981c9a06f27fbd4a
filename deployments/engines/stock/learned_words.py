"""Textual inversions on pipelines that diffusers runs: words of one request's tokenizers, and their vectors.

What `load_textual_inversion` does, without a change of any weight: words get ids behind the tokenizer's own, and the
table of the encoder is asked for none of them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from diffusers.loaders import TextualInversionLoaderMixin

from deployments.engines.nn.learned_rows import reading_rows
from deployments.engines.records.protocol import AdapterUse, EngineError
from weights.operations.adapters import LoraAdapter


@contextlib.contextmanager
def reading_words(pipeline: Any, uses: Sequence[AdapterUse], known: Mapping[str, LoraAdapter]) -> Iterator[None]:
    """Let a pipeline of one request read the textual inversions among its adapters within the block.

    Raises EngineError for an encoder that the pipeline has not, or that reads other vectors.
    """
    words = {use.name: known[use.name].words for use in uses if known[use.name].words}
    with contextlib.ExitStack() as stack:
        for name in sorted({encoder for own in words.values() for encoder in own}):
            vectors = {word: own[name] for word, own in words.items() if name in own}
            stack.enter_context(_reading(pipeline, name, vectors))
        yield


def takes_words(pipeline: type[Any]) -> bool:
    """Return whether pipelines of this class read textual inversions."""
    return issubclass(pipeline, TextualInversionLoaderMixin)


@contextlib.contextmanager
def _reading(pipeline: Any, component: str, words: Mapping[str, torch.Tensor]) -> Iterator[None]:
    place = component.replace("text_encoder", "tokenizer")
    encoder, tokenizer = getattr(pipeline, component, None), getattr(pipeline, place, None)
    if not takes_words(type(pipeline)) or encoder is None or tokenizer is None:
        raise EngineError(f"a {type(pipeline).__name__} reads no textual inversions of a {component}")
    table: Any = encoder.get_input_embeddings()
    for word, vectors in words.items():
        if vectors.shape[1] != table.embedding_dim:
            raise EngineError(
                f"{word!r} has vectors of {vectors.shape[1]} numbers, and the {component} reads {table.embedding_dim}"
            )
    own = copy.deepcopy(tokenizer)
    first = len(own)
    for word, vectors in words.items():
        # Several are the word and more, which diffusers puts behind it.
        added = own.add_tokens([word, *(f"{word}_{place}" for place in range(1, len(vectors)))])
        if added != len(vectors):
            raise EngineError(f"{word!r} is a word of the model's tokenizer")
    setattr(pipeline, place, own)
    with reading_rows(table, first, torch.cat([vectors.float() for vectors in words.values()])):
        yield
