"""Text -> conditioning and embeddings, with an exact cache. Free of Ray: the service and the local runner use it.

A request becomes encode items (which encoder, which text), an item becomes token ids, and each (encoder, ids) is
computed once. `run_merged` is how a computation gets into a batch: the service gives its `@serve.batch` method.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from deployments.embedding_cache import EmbeddingCache, Encoding
from deployments.engines.build import read_config
from deployments.engines.protocol import EngineError
from deployments.engines.skeletons import SkeletonPool, structure_key
from deployments.engines.text.conditioning import assemble_conditioning, plan_conditioning
from deployments.engines.text.encoder import OPTIONAL_PARTS, TextEncoder, load_text_encoder
from deployments.records import CacheUse
from weights.manifest import Component


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """One text for one encoder: what a batch consists of."""

    encoder: TextEncoder
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Running:
    """Computations under way: those go on that nobody waits for any more."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class KeyedEncoder:
    """A built encoder and the identity of its weights, which cached encodings are filed under."""

    module_key: str
    encoder: TextEncoder
    running: Running


@dataclass(frozen=True, slots=True)
class ConditioningRequest:
    """The text half of an image request. `use_negative`: whether guidance will be run."""

    model: str
    prompt: str
    negative_prompt: str | None
    use_negative: bool
    max_sequence_length: int | None
    model_version: str | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """Outputs in the order asked, how many came from the cache, and what the caller should be told."""

    outputs: tuple[Encoding, ...]
    cache: CacheUse
    num_tokens: int
    warnings: tuple[str, ...]


RunMerged = Callable[[EncodeJob], Awaitable[Encoding]]
Text = str | tuple[int, ...]


def is_text_encoder(component: Component) -> bool:
    """What the embedding service builds of a pipeline; the worker builds the rest."""
    return component.library == "transformers"


class TextEncoderBuilder:
    """Makes text encoders; their modules come from `skeletons` where one of their structure is kept."""

    def __init__(self) -> None:
        self.skeletons = SkeletonPool()

    def __call__(self, component: Component, skeleton: Path, tensors: dict[str, torch.Tensor]) -> KeyedEncoder:
        """The tokenizer of `text_encoder_2` is in `tokenizer_2`; a single model has its own in the same folder."""
        encoder = load_text_encoder(
            skeleton / component.folder,
            component.library,
            component.class_name,
            skeleton / component.folder.replace("text_encoder", "tokenizer"),
            tensors,
            build=partial(self.skeletons.build_module, structure_key(component)),
        )
        return KeyedEncoder(component.module_key, encoder, Running())

    def prepare(self, component: Component, skeleton: Path) -> None:
        """Make its structure before it is needed. Raises EngineError."""
        self.skeletons.prepare(component, skeleton / component.folder, OPTIONAL_PARTS)

    def retire(self, thing: KeyedEncoder) -> None:
        """Nobody leases it any more. If it still computes for somebody who left, its module ends with that."""
        if not thing.running.count:
            self.skeletons.retire(thing.encoder.module)


def encode_jobs(jobs: Sequence[EncodeJob]) -> list[Encoding | Exception]:
    """Run a batch: one call per encoder in it. When a merged call fails, its jobs run one by one. Blocking."""
    results: dict[int, Encoding | Exception] = {}
    for encoder in {id(job.encoder): job.encoder for job in jobs}.values():
        places = [index for index, job in enumerate(jobs) if job.encoder is encoder]
        results |= zip(places, _encode_or_retry(encoder, [jobs[index].token_ids for index in places]), strict=True)
    return [results[index] for index in range(len(jobs))]


def _encode_or_retry(encoder: TextEncoder, token_ids: list[tuple[int, ...]]) -> list[Encoding | Exception]:
    try:
        return list(encoder.encode(token_ids))
    except Exception as error:
        if len(token_ids) == 1:
            return [error]
        return [_encode_or_retry(encoder, [ids])[0] for ids in token_ids]


class CachedEncoders:
    """Encodes texts through a cache. Lives on one event loop."""

    def __init__(self, cache: EmbeddingCache, run_merged: RunMerged) -> None:
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
        plan = plan_conditioning(
            class_name,
            index,
            request.prompt,
            request.negative_prompt,
            max_sequence_length=request.max_sequence_length,
            use_negative=request.use_negative,
        )
        encoded = await self.encode([(encoders[item.component], item.text, item.max_length) for item in plan])
        outputs = dict(zip(plan, encoded.outputs, strict=True))
        tensors = assemble_conditioning(class_name, index, outputs, use_negative=request.use_negative)
        return tensors, encoded

    async def embed(self, encoder: KeyedEncoder, texts: Sequence[Text]) -> Encoded:
        """One vector per text: a sentence encoder's embedding, or CLIP's pooled output."""
        encoded = await self.encode([(encoder, text, None) for text in texts])
        if not {"embedding", "pooled"} & encoded.outputs[0].keys():
            raise EngineError(f"this encoder gives {', '.join(encoded.outputs[0])} per token, but no embedding")
        return encoded

    async def encode(self, items: Sequence[tuple[KeyedEncoder, Text, int | None]]) -> Encoded:
        """`items`: encoder, text or token ids, length limit in tokens (None: the model's)."""
        jobs, warnings = [], []
        for keyed, text, max_length in items:
            ids, warning = _token_ids(keyed.encoder, text, max_length)
            jobs.append((keyed, EncodeJob(keyed.encoder, ids)))
            warnings.extend([warning] if warning else [])
        found = await asyncio.gather(*(self._cached(key, job) for key, job in jobs))
        hits = sum(hit for _, hit in found)
        return Encoded(
            outputs=tuple(encoding for encoding, _ in found),
            cache=CacheUse(hits, len(found) - hits),
            num_tokens=sum(len(job.token_ids) for _, job in jobs),
            warnings=tuple(dict.fromkeys(warnings)),
        )

    async def _cached(self, keyed: KeyedEncoder, job: EncodeJob) -> tuple[Encoding, bool]:
        async def compute() -> Encoding:
            keyed.running.count += 1
            try:
                return await self._run_merged(job)
            finally:
                keyed.running.count -= 1

        return await self._cache.get((keyed.module_key, job.token_ids), compute)


def embedding_of(encoding: Encoding) -> torch.Tensor:
    return encoding["embedding"] if "embedding" in encoding else encoding["pooled"]


def _token_ids(encoder: TextEncoder, text: Text, max_length: int | None) -> tuple[tuple[int, ...], str | None]:
    if not isinstance(text, str):
        return text, None
    cut = encoder.num_truncated([text], max_length)[0]
    limit = max_length or encoder.max_tokens
    warning = f"the text was cut to {limit} tokens; {cut} more were ignored" if cut else None
    return encoder.tokenize([text], max_length)[0], warning
