"""Encodings per GiB of cache, counted in the real cache, filled until it evicts some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.loading import load_text_encoder
from deployments.text.cache import ENTRY_BYTES, TENSOR_BYTES, CacheStats, Encoding, EncodingCache, EncodingKey

GIB: Final = 2**30
XXL_WIDTH: Final = 4096  # of T5-XXL, which FLUX.1 and SD3 read; bf16
STOCK_LENGTH: Final = 512  # what FluxPipeline pads to
FILL_BYTES: Final = {"stock": GIB // 8, "trimmed": GIB // 8, "sentence": GIB // 64}


def live_entries(t5: Path, prompts: Sequence[str], embedding_width: int) -> dict[str, Any]:
    """Return encodings per GiB, of T5-XXL's shapes with the lengths of the `prompts`.

    A narrower T5 of the folder `t5` is really run: its entries have to be as large as `_entry_bytes` says.
    """
    from safetensors.torch import load_file

    encoder = load_text_encoder(t5, "transformers", None, t5, load_file(t5 / "model.safetensors"))
    figures: dict[str, Any] = {}
    for padding in ("trimmed", "stock"):
        texts = encoder.tokenize(prompts, STOCK_LENGTH, padding=padding)
        shapes = [(text.run_length, XXL_WIDTH) for text in texts]
        stats = _filled(FILL_BYTES[padding], lambda index, shapes=shapes: _zeros(shapes[index % len(shapes)]))  # type: ignore[misc]
        figures[padding] = {
            "per_gib": stats.entries_per_gib,
            "live": stats.entries,
            "max_bytes": stats.max_bytes,
            "mean_tokens": sum(length for length, _ in shapes) / len(shapes),
        }
    figures["ratio"] = figures["trimmed"]["per_gib"] / figures["stock"]["per_gib"]
    sentences = _filled(FILL_BYTES["sentence"], lambda _: torch.zeros(embedding_width))
    figures["sentence"] = {"per_gib": sentences.entries_per_gib, "live": sentences.entries, "width": embedding_width}
    return figures | {"run": _really_run(encoder, prompts[:8])}


def _entry_bytes(length: int, width: int, element_bytes: int) -> int:
    """Return what the cache counts for one tensor of (length, width)."""
    return ENTRY_BYTES + TENSOR_BYTES + length * width * element_bytes


def _really_run(encoder: TextEncoder, prompts: Sequence[str]) -> dict[str, Any]:
    """Bytes per entry as the cache counts them, and as the formula does."""
    found = {}
    for padding in ("trimmed", "stock"):
        texts = encoder.tokenize(prompts, STOCK_LENGTH, padding=padding)
        outputs = encoder.encode(texts)
        stats = _filled(GIB, lambda index, outputs=outputs: outputs[index]["hidden"], len(outputs))  # type: ignore[misc]
        width, size = outputs[0]["hidden"].shape[1], outputs[0]["hidden"].element_size()
        counted = sum(_entry_bytes(text.run_length, width, size) for text in texts)
        found[padding] = {"bytes_per_entry": stats.nbytes / stats.entries, "by_formula": counted / len(texts)}
    return found


def _filled(max_bytes: int, tensor: Callable[[int], torch.Tensor], number: int | None = None) -> CacheStats:
    """A cache after `number` entries; None: after it had to let go of as many as it could hold."""

    async def fill() -> CacheStats:
        cache, index = EncodingCache(max_bytes), 0
        while index < number if number else _let_go(cache.cache_stats()) <= cache.cache_stats().entries:

            async def compute_many(_: Sequence[EncodingKey], index: int = index) -> list[Encoding]:
                return [{"hidden": tensor(index)}]

            await cache.get_all([EncodingKey("m", "bfloat16", "none", (index,))], compute_many)
            index += 1
        return cache.cache_stats()

    return asyncio.run(fill())


def _zeros(shape: tuple[int, int]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _let_go(stats: CacheStats) -> int:
    return stats.evicted + stats.refused
