"""Text -> conditioning and embeddings, with an exact cache. Free of Ray: the service and the local runner use it.

A request becomes texts for encoders, a text becomes token ids (in chunks, if it is long and the model says so), and
each (encoder, ids, padding) is computed once. `run_merged` is how what must be computed gets into merged calls.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from configs.model import LongText
from deployments.engines.build import read_config
from deployments.engines.diffusion.families import family_of
from deployments.engines.text.chunks import join_chunks
from deployments.engines.text.tokens import TokenizedText
from deployments.records import CacheUse
from deployments.text.cache import EmbeddingCache, Encoding, EncodingKey, Found
from deployments.text.encode_jobs import EncodeJob
from deployments.text.keyed_encoders import KeyedEncoder
from deployments.text.merged_misses import Compute, MergedMisses, RunMerged
from deployments.text.records import ConditioningRequest, Encoded
from deployments.text.text_items import Text, TextItem, cut_warnings, embedding_items, tokenize_items
from deployments.threads import in_thread

MAX_JOINS = 3
INLINE_CHARACTERS = 20_000  # tokenized on the event loop: about 10 ms. Larger requests go to a thread.


class CachedEncoders:
    """Encodes texts through a cache. Lives on one event loop."""

    def __init__(self, cache: EmbeddingCache, run_merged: RunMerged) -> None:
        """`run_merged(jobs, priority, timeout_s)` gets what one request must compute with one encoder."""
        self._cache = cache
        self._run_merged = run_merged

    async def condition(
        self,
        request: ConditioningRequest,
        class_name: str,
        skeleton: Path,
        encoders: Mapping[str, KeyedEncoder],
    ) -> tuple[dict[str, torch.Tensor], Encoded]:
        """What the pipeline class needs from its encoders (by component name) for this prompt."""
        index = read_config(skeleton / "model_index.json")
        family = family_of(class_name)
        plan = family.plan_texts(
            index,
            request.prompt,
            request.negative_prompt,
            max_sequence_length=request.max_sequence_length,
            use_negative=request.use_negative,
            text_padding=request.text_padding,
            long_text=request.long_text,
        )
        items = [
            TextItem(
                encoders[item.component],
                item.text,
                f"the {'negative ' * (item.role == 'negative')}prompt for {item.component}",
                item.max_length,
                item.padding,
                item.long_text,
                keep=item.role == "negative" or not item.text,
                layer=item.layer,
            )
            for item in plan
        ]
        encoded = await self.encode(items, priority=request.priority, timeout_s=request.timeout_s)
        outputs = dict(zip(plan, encoded.outputs, strict=True))
        return family.assemble_conditioning(index, outputs, use_negative=request.use_negative), encoded

    async def embed(
        self,
        encoder: KeyedEncoder,
        texts: Sequence[Text],
        *,
        long_text: LongText = "truncate",
        first: int = 0,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Encoded:
        """One "embedding" per text: a sentence encoder's, or CLIP's pooled output. See `embedding_items`."""
        encoder.encoder.check_embeds()
        items = embedding_items(encoder, texts, long_text, first)
        return await self.encode(items, priority=priority, timeout_s=timeout_s)

    async def encode(self, items: Sequence[TextItem], *, priority: int = 0, timeout_s: float | None = None) -> Encoded:
        """All items, in calls of one per encoder for what is not in the cache. Raises EngineError for what no encoder
        can take, before anything is computed, and otherwise as `run_merged` does.
        """
        if sum(len(item.text) for item in items) > INLINE_CHARACTERS:
            chunked = await in_thread(tokenize_items, items)
        else:
            chunked = tokenize_items(items)
        parts = [(item, text) for item, texts in zip(items, chunked, strict=True) for text in texts]
        keys = [_key(item.keyed, text) for item, text in parts]
        kept = {key for key, (item, text) in zip(keys, parts, strict=True) if item.keep}
        unique = dict(zip(keys, parts, strict=True))
        misses = MergedMisses(self._run_merged, len(unique), priority=priority, timeout_s=timeout_s)
        lookups = (self._find(misses, key, *part, key in kept) for key, part in unique.items())
        found = dict(zip(unique, await asyncio.gather(*lookups), strict=True))
        sources = Counter[str](value.source for value in found.values())
        sources["repeated"] = len(parts) - len(unique)
        rest = iter(found[key].encoding for key in keys)
        return Encoded(
            outputs=tuple(join_chunks([next(rest) for _ in texts]) for texts in chunked),
            cache=CacheUse(len(parts) - sources["computed"], sources["computed"]),
            num_tokens=sum(len(text.token_ids) for _, text in parts),
            warnings=cut_warnings(items, chunked),
            sources=dict(+sources),
        )

    async def _find(
        self, misses: MergedMisses, key: EncodingKey, item: TextItem, text: TokenizedText, keep: bool
    ) -> Found:
        running = item.keyed.running

        async def get(compute: Compute) -> Found:
            return await self._get_or_compute(key, partial(running.during, compute), keep)

        return await misses.find(EncodeJob(item.keyed.encoder, text), get)

    async def _get_or_compute(self, key: EncodingKey, compute: Compute, keep: bool) -> Found:
        """A computation that was joined may fail by the terms of who began it: its timeout, its place in the queue.
        Then this caller looks again, and in the end goes alone.
        """
        is_own = False

        async def own() -> Encoding:
            nonlocal is_own
            is_own = True
            return await compute()

        for _ in range(MAX_JOINS):
            try:
                return await self._cache.get(key, own, keep=keep)
            except Exception:
                if is_own:
                    raise
        return Found(await compute(), "computed")


def embedding_of(encoding: Encoding) -> torch.Tensor:
    """(D,), of an output of `CachedEncoders.embed`."""
    return encoding["embedding"]


def _key(keyed: KeyedEncoder, text: TokenizedText) -> EncodingKey:
    dtype = str(keyed.encoder.dtype).removeprefix("torch.")
    return EncodingKey(keyed.module_key, dtype, keyed.encoder.variant(text), text.token_ids)
