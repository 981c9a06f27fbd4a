"""Texts -> encodings, through the cache. Ray-free: the service, the worker's fallback and the local runner use it.

A request becomes texts for encoders, a text becomes token ids (in chunks, if it is long and the model says so), and
each (encoder, ids, padding) is computed once. A request's missing encodings go as one batch per encoder.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from configs.model import LongText
from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.families.texts import EncodeItem, lacking_encoders
from deployments.engines.libraries.config_files import read_config
from deployments.engines.nn.lora import AdaptedSpan, applied_adapters
from deployments.engines.records.protocol import EngineError
from deployments.engines.text.forward_plan import EncodeCounter
from deployments.engines.text.prompt_weights import from_compel, plain_texts, weights_lost
from deployments.engines.text.sentence_layers import apply_stages
from deployments.engines.text.tokens import (
    LearnedWords,
    TokenizedText,
    join_chunks,
    weighted,
    weighted_from,
)
from deployments.modules.cache import Lease, ModuleCache
from deployments.modules.encoders import (
    EncoderLora,
    EncoderLoras,
    KeyedEncoder,
    PipelineProcessors,
    text_modules,
    words_of,
)
from deployments.records import CacheUse
from deployments.records.tasks import in_thread
from deployments.text.cache import Encoding, EncodingCache, EncodingKey
from deployments.text.requests import Conditioning, ConditioningRequest, pack
from deployments.text.stock_texts import StockTextJob, StockTexts
from deployments.text.tokenizing import (
    Text,
    TextItem,
    cut_warnings,
    embedding_items,
    num_characters,
    tokenize_items,
    words_in,
)
from weights.platform.panics import panics_as_errors
from weights.records.manifest import Component

INLINE_CHARACTERS = 20_000  # tokenized on the event loop: about 10 ms. Larger requests go to a thread.


@dataclass(frozen=True, slots=True)
class Encoded:
    """The outputs in the order of the items, how many came from the cache, and warnings for the caller.

    `num_tokens` counts the tokens of the texts, without padding. `sources` counts encodings by where they came from:
    the cache's "local", "joined" and "computed", and "repeated" within the request.
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
    words: LearnedWords | None = None
    alone: bool = False

    @property
    def num_tokens(self) -> int:
        """Its cost: tokens that a forward works on, with the stock padding."""
        return self.text.run_length


TextJob = EncodeJob | StockTextJob
# One batch of jobs for one encoder, the request's priority and its timeout in seconds -> encodings in order.
RunBatch = Callable[[Sequence[TextJob], int, float | None], Awaitable[Sequence[Encoding]]]
_Parts = Mapping[EncodingKey, tuple[TextItem, TokenizedText]]


class CachedEncoders:
    """Text encoding through a cache. Lives on one event loop."""

    def __init__(self, cache: EncodingCache, run_batch: RunBatch) -> None:
        self._cache = cache
        self._run_batch = run_batch
        self._loras = EncoderLoras()
        self._stock = StockTexts(cache, run_batch)
        self._readers = PipelineProcessors()

    async def condition(
        self, module_cache: ModuleCache, request: ConditioningRequest, wanted: Callable[[Component], bool]
    ) -> Conditioning:
        """Return the conditioning of a prompt, by the `wanted` parts of its model in `module_cache`.

        Raises as `ModuleCache.lease` and `encode` do, and EngineError for an adapter that does not fit.
        """
        if request.arguments is not None:
            return await self._stock.condition(module_cache, request, request.arguments)
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
        """Return the encodings that the pipeline class needs, with the adapters of its encoders."""
        encoders, index = lease.modules, read_config(lease.skeleton / "model_index.json")
        family = family_of(lease.manifest.class_name or "").variant(index)
        lacking = lacking_encoders(index)
        request, warnings = _with_syntax(request, family)
        whole_plan = family.texts.plan(
            index,
            request.prompt,
            request.negative_prompt,
            max_sequence_length=request.max_sequence_length,
            use_negative=request.use_negative,
            text_padding=request.text_padding,
            long_text=request.long_text,
            # Stock reads negative prompts as ever, and the WebUI as it reads prompts.
            clip_skips={
                "prompt": request.clip_skip,
                "negative": request.clip_skip * (request.prompt_syntax != "plain"),
            },
        )
        whole_plan = _with_second_text(whole_plan, request.prompt_2)
        plan = [item for item in whole_plan if item.component not in lacking]
        if absent := sorted({item.component for item in plan} - encoders.keys()):
            raise EngineError(f"{request.model}: {absent[0]} is not there, which {family.class_name} needs")
        loras = await self._loras_of(family, {item.component for item in plan}, lease, request)
        items = [_prompt_item(item, lease, loras.get(item.component, ()), request) for item in plan]
        if request.images:
            config = items[0].keyed.encoder.module.config
            images = await in_thread(self._readers.read, lease.skeleton, config, request.images)
            items = [replace(item, images=images, keep=False) for item in items]
        encoded = await self.encode(items, priority=request.priority, timeout_s=request.timeout_s)
        outputs = dict(zip(plan, encoded.outputs, strict=True))
        if unread := [item for item in whole_plan if item.component in lacking]:
            outputs |= _stand_ins(family, unread, lease, encoded.outputs)
        encoded = replace(encoded, warnings=(*encoded.warnings, *warnings))
        return family.texts.assemble(index, outputs, use_negative=request.use_negative), encoded

    async def _loras_of(
        self, family: Family, components: Set[str], lease: Lease, request: ConditioningRequest
    ) -> Mapping[str, tuple[EncoderLora, ...]]:
        loras: dict[str, tuple[EncoderLora, ...]] = {}
        for name in components if lease.adapters else ():
            encoder = lease.modules[name].encoder
            loras[name] = await in_thread(
                self._loras.loras_of, family, name, encoder, lease.adapters, lease.adapter_keys, request.adapters
            )
        return loras

    async def embed(
        self,
        modules: Mapping[str, Any],
        texts: Sequence[Text],
        *,
        long_text: LongText = "truncate",
        first: int = 0,
        max_second: int | None = None,
        before: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Encoded:
        """Return one "embedding" per text: a sentence encoder's, CLIP's pooled output, or a classifier's logits.

        `modules` are the encoder and the layers behind its pooling. See `embedding_items`.
        """
        keyed, heads = text_modules(modules)
        keyed.encoder.check_embeds()
        items = embedding_items(keyed, texts, long_text, first, max_second, before)
        encoded = await self.encode(items, priority=priority, timeout_s=timeout_s)
        if not (stages := keyed.encoder.later_stages):
            return encoded
        pooled = [embedding_of(output) for output in encoded.outputs]
        vectors = await in_thread(apply_stages, stages, heads, pooled)
        return replace(encoded, outputs=tuple({"embedding": vector} for vector in vectors))

    async def encode(self, items: Sequence[TextItem], *, priority: int = 0, timeout_s: float | None = None) -> Encoded:
        """Return the encodings of all items; missing ones are computed in one batch per encoder.

        Raises EngineError for items that no encoder takes, before any computation, and the errors of `run_batch`.
        """
        count = len(items)
        # ComfyUI's weights say how far a text's vectors lie from those of an empty one.
        measured = [number for number, item in enumerate(items) if item.syntax == "comfyui" and "(" in str(item.text)]
        items = [*items, *(replace(items[number], text="", syntax="plain") for number in measured)]
        if sum(map(num_characters, items)) > INLINE_CHARACTERS:
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
        encodings = [[next(rest) for _ in texts] for texts in chunked]
        empty = {number: own[0] for number, own in zip(measured, encodings[count:], strict=True)}
        outputs = []
        for number, (texts, own) in enumerate(zip(chunked[:count], encodings[:count], strict=True)):
            weigh = partial(weighted_from, empty=empty[number]) if number in empty else weighted
            outputs.append(join_chunks([weigh(one, text) for one, text in zip(own, texts, strict=True)]))
        return Encoded(
            outputs=tuple(outputs),
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
        jobs = [EncodeJob(item.keyed, text, item.loras, words_in(item, text), item.alone) for item, text in found]
        return self._run_batch(jobs, priority, timeout_s)


def _prompt_item(
    item: EncodeItem,
    lease: Lease,
    loras: tuple[EncoderLora, ...],
    request: ConditioningRequest,
) -> TextItem:
    """Return an item of a family's plan as a text for its encoder, with the encoder's adapters.

    Raises EngineError for learned words of another model.
    """
    keyed = lease.modules[item.component]
    return TextItem(
        keyed,
        item.text,
        f"the {'negative ' * (item.role == 'negative')}prompt for {item.component}",
        item.max_length,
        padding=item.padding,
        long_text=item.long_text,
        keep=(item.role == "negative" or not item.text) and not loras,
        layer=item.layer,
        form=item.form,
        syntax=request.prompt_syntax,
        loras=loras,
        words=words_of(item.component, keyed.encoder, lease.adapters, lease.adapter_keys),
        alone=request.encodes_alone,
    )


def _with_syntax(request: ConditioningRequest, family: Family) -> tuple[ConditioningRequest, tuple[str, ...]]:
    """Return the request with texts and a syntax that its family's encoders read, and warnings.

    Raises EngineError for a weight that is too large.
    """
    if request.prompt_syntax == "plain":
        return request, ()
    if "chunk" in family.texts.refused_rules:
        (prompt, negative), is_lost = plain_texts(request.prompt_syntax, request.prompt, request.negative_prompt)
        plain = replace(request, prompt=prompt or "", negative_prompt=negative, prompt_syntax="plain")
        return plain, (weights_lost(family.class_name),) if is_lost else ()
    if request.prompt_syntax == "compel":
        negative = None if request.negative_prompt is None else from_compel(request.negative_prompt)
        request = replace(
            request, prompt=from_compel(request.prompt), negative_prompt=negative, prompt_syntax="weighted"
        )
    return replace(request, long_text="chunk"), ()


def _with_second_text(plan: tuple[EncodeItem, ...], text: str | None) -> tuple[EncodeItem, ...]:
    """Return a plan whose encoders read another prompt, all but the first."""
    if text is None:
        return plan
    first = plan[0].component
    return tuple(
        item if item.role == "negative" or item.component == first else replace(item, text=text) for item in plan
    )


def _stand_ins(
    family: Family, items: Sequence[EncodeItem], lease: Lease, others: Sequence[Encoding]
) -> dict[EncodeItem, Mapping[str, torch.Tensor]]:
    """Return the stock substitutes for encodings whose encoder the pipeline lacks."""
    config = read_config(lease.skeleton / family.denoiser_name / "config.json")
    like = next(tensor for encoding in others for tensor in encoding.values())
    found = {}
    for item in items:
        if (stand_in := family.texts.stand_in(item, config, like)) is None:
            raise EngineError(f"the pipeline has no {item.component}, which {family.class_name} needs")
        found[item] = stand_in
    return found


def encode_batch(jobs: Sequence[TextJob], counter: EncodeCounter | None = None) -> Sequence[Encoding | Exception]:
    """Encode jobs of one encoder in as few forwards as `plan_forwards` finds; an exception is its job's own. Blocks.

    Texts with the same LoRAs share forwards, except `alone` texts and those of stock pipelines. Raises EngineError if
    the encoder was released, which happens to cancelled requests.
    """
    plain = [job for job in jobs if isinstance(job, EncodeJob)]
    if not plain:
        return [_encoded_alone(job) for job in jobs if isinstance(job, StockTextJob)]
    return _encode_together(plain, counter)


def _encoded_alone(job: StockTextJob) -> Encoding | Exception:
    try:
        with panics_as_errors():
            return job.encode()
    except Exception as error:
        return error


def _encode_together(jobs: Sequence[EncodeJob], counter: EncodeCounter | None) -> Sequence[Encoding | Exception]:
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, job in enumerate(jobs):
        mates = number if job.alone else None
        learned = job.words.identity if job.words else ""
        groups.setdefault((mates, learned, *(lora.identity for lora in job.loras)), []).append(number)
    outcomes: dict[int, Encoding | Exception] = {}
    workspace = jobs[0].keyed.workspace
    with jobs[0].keyed.computing() as encoder:
        for numbers in groups.values():
            uses = [(lora.pairs, lora.scale) for lora in jobs[numbers[0]].loras]
            texts = [jobs[number].text for number in numbers]
            with encoder.lock, applied_adapters([AdaptedSpan(uses)]):
                words = jobs[numbers[0]].words
                found = encoder.encode_each(texts, counter=counter, words=words, workspace=workspace)
                outcomes |= zip(numbers, found, strict=True)
    return [outcomes[number] for number in range(len(jobs))]


def encode_batch_or_raise(jobs: Sequence[TextJob]) -> list[Encoding]:
    """Encode jobs of one encoder for one caller. Raises the first job's error. Blocks."""
    outcomes = encode_batch(jobs)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]


def embedding_of(encoding: Encoding) -> torch.Tensor:
    """Return the vector (D,) of an output of `CachedEncoders.embed`."""
    return encoding["embedding"]


def _key(item: TextItem, text: TokenizedText) -> EncodingKey:
    encoder = item.keyed.encoder
    dtype = str(encoder.dtype).removeprefix("torch.")
    weights = " + ".join((item.keyed.module_key, *(lora.identity for lora in item.loras)))
    words = words_in(item, text)
    variant = encoder.variant(text) + (f" with {words.identity}" if words else "") + " alone" * item.alone
    return EncodingKey(weights, dtype, variant, text.token_ids)
