"""Texts -> encodings, through the cache. Ray-free: the service, the worker's fallback and the local runner use it.

A request becomes texts for encoders, a text becomes token ids (in chunks, if it is long and the model says so), and
each (encoder, ids, padding) is computed once. What a request must compute goes as one batch per encoder.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from configs.model import LongText, TextPadding
from deployments.engines.build import read_config
from deployments.engines.diffusion.families import family_of
from deployments.engines.nn.lora import AdaptedSpan, applied_adapters
from deployments.engines.protocol import ClipLayer, EngineError
from deployments.engines.text.forward_plan import EncodeCounter
from deployments.engines.text.tokens import TokenizedText, join_chunks, level_chunks
from deployments.modules.cache import ModuleCache
from deployments.modules.lease import Lease
from deployments.records import CacheUse
from deployments.tasks import in_thread
from deployments.text.cache import Encoding, EncodingCache, EncodingKey
from deployments.text.encoders import EncoderLora, EncoderLoras, KeyedEncoder
from deployments.text.requests import Conditioning, ConditioningRequest, pack
from weights.manifest import Component

INLINE_CHARACTERS = 20_000  # tokenized on the event loop: about 10 ms. Larger requests go to a thread.

Text = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextItem:
    """One text, or the token ids of one, for one encoder. Warnings and errors call it `name`.

    `max_length` None is the encoder's limit. `keep` asks the cache not to evict the encoding. One `alone` shares no
    forward, and its encoding is another to the cache.
    """

    keyed: KeyedEncoder
    text: Text
    name: str
    max_length: int | None = None
    padding: TextPadding = "stock"
    long_text: LongText = "truncate"
    as_embedding: bool = False
    keep: bool = False
    layer: ClipLayer = "penultimate"
    loras: tuple[EncoderLora, ...] = ()
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """The outputs in the order of the items, how many came from the cache, and warnings for the caller.

    `num_tokens` counts the tokens of the texts, without padding. `sources` counts encodings by where they came from:
    the cache's "local", "joined", "shared" and "computed", and "repeated" within the request.
    """

    outputs: tuple[Encoding, ...]
    cache: CacheUse
    num_tokens: int
    warnings: tuple[str, ...]
    sources: Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """One text for one encoder: an item of a batch."""

    keyed: KeyedEncoder
    text: TokenizedText
    loras: tuple[EncoderLora, ...] = ()
    alone: bool = False

    @property
    def num_tokens(self) -> int:
        """Its cost: tokens that a forward works on, with the stock padding."""
        return self.text.run_length


# One batch of jobs for one encoder, the request's priority and its timeout in seconds -> encodings in order.
RunBatch = Callable[[Sequence[EncodeJob], int, float | None], Awaitable[Sequence[Encoding]]]
_Parts = Mapping[EncodingKey, tuple[TextItem, TokenizedText]]


class CachedEncoders:
    """Text encoding through a cache. Lives on one event loop."""

    def __init__(self, cache: EncodingCache, run_batch: RunBatch) -> None:
        self._cache = cache
        self._run_batch = run_batch
        self._loras = EncoderLoras()

    async def condition(
        self, module_cache: ModuleCache, request: ConditioningRequest, wanted: Callable[[Component], bool]
    ) -> Conditioning:
        """Return the conditioning of a prompt, by the parts of its model in `module_cache` that are `wanted`.

        Raises as `ModuleCache.lease` and `encode` do, and EngineError for an adapter that does not fit.
        """
        start = time.perf_counter()
        async with module_cache.lease(
            request.model,
            wanted,
            tuple(request.adapters),
            version=request.model_version,
            adapter_versions=request.adapter_versions,
        ) as lease:
            tensors, encoded = await self._encode_prompt(request, lease)
        encode_ms = (time.perf_counter() - start) * 1e3
        return Conditioning(pack(tensors), encode_ms, encoded.cache, encoded.warnings)

    async def _encode_prompt(
        self, request: ConditioningRequest, lease: Lease
    ) -> tuple[dict[str, torch.Tensor], Encoded]:
        """Return what the pipeline class needs from its encoders, with the adapters that change one."""
        family, encoders, adapters = family_of(lease.manifest.class_name or ""), lease.modules, lease.adapters
        index = read_config(lease.skeleton / "model_index.json")
        plan = family.plan_texts(
            index,
            request.prompt,
            request.negative_prompt,
            max_sequence_length=request.max_sequence_length,
            use_negative=request.use_negative,
            text_padding=request.text_padding,
            long_text=request.long_text,
        )
        loras: dict[str, tuple[EncoderLora, ...]] = {}
        for name in {item.component for item in plan} if adapters else ():
            encoder = encoders[name].encoder
            loras[name] = await in_thread(
                self._loras.loras_of, family, name, encoder, adapters, lease.adapter_keys, request.adapters
            )
        items = [
            TextItem(
                encoders[item.component],
                item.text,
                f"the {'negative ' * (item.role == 'negative')}prompt for {item.component}",
                item.max_length,
                item.padding,
                item.long_text,
                keep=(item.role == "negative" or not item.text) and not loras.get(item.component),
                layer=item.layer,
                loras=loras.get(item.component, ()),
                alone=request.encodes_alone,
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
        """Return one "embedding" per text: a sentence encoder's, or CLIP's pooled output. See `embedding_items`."""
        encoder.encoder.check_embeds()
        items = embedding_items(encoder, texts, long_text, first)
        return await self.encode(items, priority=priority, timeout_s=timeout_s)

    async def encode(self, items: Sequence[TextItem], *, priority: int = 0, timeout_s: float | None = None) -> Encoded:
        """Return the encodings of all items; what nobody has is computed in one batch per encoder.

        Raises EngineError for what no encoder can take, before anything is computed, and otherwise as `run_batch` does.
        """
        if sum(len(item.text) for item in items) > INLINE_CHARACTERS:
            chunked = await in_thread(tokenize_items, items)
        else:
            chunked = tokenize_items(items)
        parts = [(item, text) for item, texts in zip(items, chunked, strict=True) for text in texts]
        keys = [_key(item, text) for item, text in parts]
        unique = dict(zip(keys, parts, strict=True))
        kept = {key for key, (item, _) in zip(keys, parts, strict=True) if item.keep}
        begin_batch = partial(self._begin_batch, unique, priority, timeout_s)
        found = await self._cache.get_all(list(unique), begin_batch, keep=kept)
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

    def _begin_batch(
        self, parts: _Parts, priority: int, timeout_s: float | None, keys: Sequence[EncodingKey]
    ) -> Awaitable[Sequence[Encoding]]:
        """Begin one batch: the cache asks for keys of one module at a time."""
        found = [parts[key] for key in keys]
        jobs = [EncodeJob(item.keyed, text, item.loras, item.alone) for item, text in found]
        return self._run_batch(jobs, priority, timeout_s)


def encode_batch(jobs: Sequence[EncodeJob], counter: EncodeCounter | None = None) -> Sequence[Encoding | Exception]:
    """Encode jobs of one encoder in as few forwards as `plan_forwards` finds; an exception is its job's own. Blocks.

    Texts with the same LoRAs share forwards, but for those that are to be alone. Raises EngineError when the encoder
    was let go, which happens to requests that were cancelled before.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, job in enumerate(jobs):
        mates = number if job.alone else None
        groups.setdefault((mates, *(lora.identity for lora in job.loras)), []).append(number)
    outcomes: dict[int, Encoding | Exception] = {}
    with jobs[0].keyed.computing() as encoder:
        for numbers in groups.values():
            uses = [(lora.pairs, lora.scale) for lora in jobs[numbers[0]].loras]
            texts = [jobs[number].text for number in numbers]
            with encoder.lock, applied_adapters([AdaptedSpan(uses)]):
                outcomes |= zip(numbers, encoder.encode_each(texts, counter=counter), strict=True)
    return [outcomes[number] for number in range(len(jobs))]


def encode_batch_or_raise(jobs: Sequence[EncodeJob]) -> list[Encoding]:
    """Encode jobs of one encoder for one caller. Raises the first job's error. Blocks."""
    outcomes = encode_batch(jobs)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]


def embedding_items(
    keyed: KeyedEncoder, texts: Sequence[Text], long_text: LongText = "truncate", first: int = 0
) -> list[TextItem]:
    """Return items that give one vector each; `first` is the number of the first one in its request.

    Raises EngineError for "chunk".
    """
    if long_text == "chunk":
        raise EngineError("long_text 'chunk' makes longer sequences, and an embedding is one vector: use truncate")
    return [
        TextItem(keyed, text, f"input {number}", long_text=long_text, as_embedding=True, keep=text == "")
        for number, text in enumerate(texts, first)
    ]


def embedding_of(encoding: Encoding) -> torch.Tensor:
    """Return the vector (D,) of an output of `CachedEncoders.embed`."""
    return encoding["embedding"]


def tokenize_items(items: Sequence[TextItem]) -> list[tuple[TokenizedText, ...]]:
    """Return each item's text as the one or more texts that are encoded for it.

    Raises EngineError for a text that its `long_text` rule refuses.
    """
    found: list[tuple[TokenizedText, ...]] = [()] * len(items)
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, item in enumerate(items):
        encoder = item.keyed.encoder
        if not isinstance(item.text, str):
            found[number] = (encoder.accept_ids(item.text),)
        elif item.long_text == "chunk":
            found[number] = tuple(encoder.tokenize_chunks(item.text, item.max_length))
        else:
            alike.setdefault((encoder, item.max_length, item.padding, item.as_embedding, item.layer), []).append(number)
    for numbers in alike.values():
        first = items[numbers[0]]
        texts = first.keyed.encoder.tokenize(
            [str(items[number].text) for number in numbers],
            first.max_length,
            padding=first.padding,
            as_embedding=first.as_embedding,
            layer=first.layer,
        )
        for number, text in zip(numbers, texts, strict=True):
            _check_whole(items[number], text)
            found[number] = (text,)
    return _level(items, found)


def cut_warnings(items: Sequence[TextItem], chunked: Sequence[Sequence[TokenizedText]]) -> tuple[str, ...]:
    """Return a warning for each text that was truncated."""
    return tuple(
        f"{item.name} was cut to {len(text.token_ids)} tokens; {text.num_ignored} more were ignored"
        for item, texts in zip(items, chunked, strict=True)
        for text in texts
        if text.num_ignored
    )


def _level(items: Sequence[TextItem], chunked: Sequence[tuple[TokenizedText, ...]]) -> list[tuple[TokenizedText, ...]]:
    in_chunks = [number for number, item in enumerate(items) if item.long_text == "chunk"]
    if not in_chunks:
        return list(chunked)

    def empty(place: int) -> TokenizedText:
        item = items[in_chunks[place]]
        return item.keyed.encoder.tokenize_chunks("", item.max_length)[0]

    levelled = level_chunks([chunked[number] for number in in_chunks], empty)
    by_number = dict(zip(in_chunks, levelled, strict=True))
    return [by_number.get(number, texts) for number, texts in enumerate(chunked)]


def _check_whole(item: TextItem, text: TokenizedText) -> None:
    if text.num_ignored and item.long_text == "error":
        limit = len(text.token_ids)
        raise EngineError(f"{item.name} has {limit + text.num_ignored} tokens, and at most {limit} can be encoded")


def _key(item: TextItem, text: TokenizedText) -> EncodingKey:
    encoder = item.keyed.encoder
    dtype = str(encoder.dtype).removeprefix("torch.")
    weights = " + ".join((item.keyed.module_key, *(lora.identity for lora in item.loras)))
    variant = encoder.variant(text) + " alone" * item.alone
    return EncodingKey(weights, dtype, variant, text.token_ids)
