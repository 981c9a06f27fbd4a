"""The text-encoder service: the encoders of all models behind one deployment, with dynamic batching and a cache."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from ray import serve

from cluster.process.telemetry import RequestMetrics
from cluster.registry.actor import WeightRegistry
from cluster.registry.directory import Entry
from configs.batching import BatchingConfig
from configs.cluster import ClusterConfig
from configs.model import LongText, ModelConfig
from deployments.batching.batcher import Batcher
from deployments.batching.serve_adapter import ServeAdapter
from deployments.engines.programs.bound import ServedProgram
from deployments.engines.programs.rows import ProgramJob, answer_of, jobs_of, jobs_of_rows, run_jobs, tensor_of
from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.forward_plan import EncodeCounter
from deployments.engines.text.tokens import TextPair
from deployments.modules.cache import ModuleCache
from deployments.modules.encoders import TextEncoderBuilder, is_part_of_text, is_text_encoder, text_modules
from deployments.modules.footprints import FootprintBook
from deployments.pipelines.planning import plan_segments
from deployments.pipelines.plans import SegmentCall, SegmentResult
from deployments.pipelines.runner import run_together
from deployments.pipelines.segments import SegmentRunner
from deployments.records import (
    EmbeddingRequest,
    EmbeddingResult,
    HeadRequest,
    ProgramRequest,
    ProgramResult,
    ScoringRequest,
)
from deployments.records.errors import as_service_errors
from deployments.records.tasks import in_thread
from deployments.services.model_replica import ModelReplica
from deployments.text.cache import Encoding, EncodingCache
from deployments.text.encode import CachedEncoders, TextJob, embedding_of, encode_batch
from deployments.text.requests import Conditioning, ConditioningRequest
from deployments.text.tokenizing import Text, cut_warnings, embedding_items, tokenize_items
from weights.records.manifest import Manifest, ModelKind

_RunRows = Callable[[Sequence[ProgramJob], int, float | None], Coroutine[Any, Any, list[dict[str, torch.Tensor]]]]


class TextEncoderService(ModelReplica):
    """One replica. Requests come through `@serve.batch` into the batcher by the `ServeAdapter`."""

    _kinds: ClassVar[tuple[ModelKind, ...]] = ("diffusion", "embedding", "reranker", "classifier", "head", "program")
    _section: ClassVar[str] = "text_encoder"
    _wants = staticmethod(is_text_encoder)

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        settings = config.text_encoder
        self._cache = EncodingCache(settings.cache_bytes)
        self._name = serve.get_replica_context().replica_id.unique_id
        builder = TextEncoderBuilder(FootprintBook(settings.torch_device), settings.torch_device)
        self._programs = builder.programs
        await self._open(config, f"encoder-{self._name}", settings, builder)
        self._padding = EncodeCounter()
        tuned = await self._call_registry(WeightRegistry.encoder_batching)
        self._batching: BatchingConfig = tuned or settings.batching
        self._batcher: Batcher[Any, Any] = Batcher(self._run_items, self._batching)
        self._serve_adapter = ServeAdapter(self._batcher, settings.max_ongoing_requests)
        self._encoders = CachedEncoders(self._cache, self._run_batch)
        self._segments = SegmentRunner(settings.torch_device)
        if config.pipelines:
            records = await self._call_registry(WeightRegistry.list_models)
            models = {record.id: record for record in records}
            for segment in plan_segments(config.pipelines, models, settings.batching.max_batch_size):
                self._segments.prepare_segment(segment)
        self._metrics = RequestMetrics()

    async def condition(self, request: ConditioningRequest) -> Conditioning:
        """Return the tensors that a diffusion pipeline's `start_request` takes for this prompt."""
        with as_service_errors():
            conditioning = await self._encoders.condition(self._module_cache, request, is_part_of_text)
        self._metrics.count_encodings(conditioning.cache.hits, conditioning.cache.misses)
        return conditioning

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """Return one vector per input."""
        size = request.dimensions

        def shortened(encoder: TextEncoder, vector: torch.Tensor) -> torch.Tensor:
            return vector if size is None else encoder.shortened(vector, size)

        def before(encoder: TextEncoder) -> str:
            are_ids = not isinstance(request.input[0], str)
            return "" if are_ids else encoder.prompts.before(request.prompt_name, request.input_type)

        return await self._encoded(request, request.input, request.long_text or "truncate", shortened, before=before)

    async def score(self, request: ScoringRequest) -> EmbeddingResult:
        """Return the scores of each text or pair of texts."""
        texts = [text if isinstance(text, str) else TextPair(*text) for text in request.input]

        def scored(encoder: TextEncoder, logits: torch.Tensor) -> torch.Tensor:
            return encoder.scored(logits, raw=request.raw)

        return await self._encoded(
            request, texts, request.long_text or "truncate", scored, max_second=request.max_second_tokens
        )

    async def _encoded(
        self,
        request: EmbeddingRequest | ScoringRequest,
        texts: Sequence[Text],
        long_text: LongText,
        finish: Callable[[TextEncoder, torch.Tensor], torch.Tensor],
        max_second: int | None = None,
        before: Callable[[TextEncoder], str] = lambda _: "",
    ) -> EmbeddingResult:
        """Return the result of `finish` for the vector of each text."""
        start = time.perf_counter()
        with as_service_errors():
            async with self._module_cache.lease(request.model, is_text_encoder, version=request.model_version) as lease:
                encoder, _ = text_modules(lease.modules)
                encoded = await self._encoders.embed(
                    lease.modules,
                    texts,
                    long_text=long_text,
                    max_second=max_second,
                    before=before(encoder.encoder),
                    priority=request.priority,
                    timeout_s=request.timeout_s,
                )
                vectors = [finish(encoder.encoder, embedding_of(output)) for output in encoded.outputs]
                labels = encoder.encoder.scoring.labels if encoder.encoder.scoring else ()
                switch_ms = lease.report.switch_ms
        self._metrics.count_encodings(encoded.cache.hits, encoded.cache.misses)
        total_ms = (time.perf_counter() - start) * 1e3
        return EmbeddingResult(
            model=request.model,
            embeddings=[vector.float().cpu().numpy().astype(np.float32) for vector in vectors],
            num_tokens=encoded.num_tokens,
            timings_ms={"switch": switch_ms, "encode": total_ms - switch_ms, "total": total_ms},
            cache=encoded.cache,
            warnings=encoded.warnings,
            labels=labels,
        )

    async def apply_head(self, request: HeadRequest) -> npt.NDArray[np.float32]:
        """Apply a head to features: (n, in) -> (n, out)."""
        with as_service_errors():
            async with self._module_cache.lease(request.model, is_text_encoder, version=request.model_version) as lease:
                (head,) = lease.modules.values()
                features = torch.from_numpy(np.array(request.features))  # arrays from Ray are read-only
                scores = await in_thread(head.apply, features)
        result: npt.NDArray[np.float32] = scores.float().cpu().numpy()
        return result

    async def run_program(self, request: ProgramRequest) -> ProgramResult:
        """Run a stored program for the rows of a request, together with those of others."""
        start = time.perf_counter()
        with as_service_errors():
            async with self._module_cache.lease(request.model, is_text_encoder, version=request.model_version) as lease:
                (program,) = lease.modules.values()
                jobs = await in_thread(_jobs_of_arrays, program, request.inputs)
                found = await self._run_rows(jobs, request.priority, request.timeout_s)
                outputs = await in_thread(answer_of, program, found)
                switch_ms = lease.report.switch_ms
        total_ms = (time.perf_counter() - start) * 1e3
        return ProgramResult(outputs, {"switch": switch_ms, "run": total_ms - switch_ms, "total": total_ms})

    async def run_segment(self, call: SegmentCall, *upstream: SegmentResult) -> SegmentResult:
        """Run stages of a pipeline, one after the other; their intermediate results stay on the device."""
        with as_service_errors():
            return await self._segments.run_segment(
                call, upstream, _EncoderOps(self._module_cache, self._encoders, call, self._run_rows)
            )

    async def retune(self, batching: BatchingConfig) -> None:
        """Batch by this config from now on, waiting requests included."""
        self._batching = batching
        self._batcher.retune(batching)

    async def describe(self) -> dict[str, Any]:
        """Add the cache, the batches and the pipelines' segments to the description of a replica."""
        return await super().describe() | {
            "name": self._name,
            "cache": asdict(self._cache.cache_stats()),
            "batching": asdict(self._batcher.batching_stats()),
            "batching_config": self._batching.model_dump(mode="json"),
            "padding": asdict(self._padding.encode_stats()),
            "segments": asdict(self._segments.segment_stats()),
            "programs": self._programs.graph_stats(),
        }

    def _note_program(self, entry: Entry | None, manifest: Manifest) -> None:
        if isinstance(entry, ModelConfig) and entry.compiled:
            for component in manifest.components.values():
                self._programs.compile(component)

    def invalidate(self, extents: Sequence[str]) -> None:
        """Forget all encodings as well: it is not known since when the weights that computed them were damaged."""
        super().invalidate(extents)
        self._cache.forget_all()

    def _run_batch(self, jobs: Sequence[TextJob], priority: int, timeout_s: float | None) -> Awaitable[list[Encoding]]:
        # By number: the batcher remembers groups, and must not keep an encoder's weights with them.
        group, costs = id(jobs[0].keyed), [job.num_tokens for job in jobs]
        return self._submit(jobs, group, costs, priority, timeout_s)

    def _run_rows(
        self, jobs: Sequence[ProgramJob], priority: int, timeout_s: float | None
    ) -> Coroutine[Any, Any, list[dict[str, torch.Tensor]]]:
        return self._submit(jobs, jobs[0].group, [job.length for job in jobs], priority, timeout_s)

    def _submit(
        self, jobs: Sequence[Any], group: Hashable, costs: Sequence[int], priority: int, timeout_s: float | None
    ) -> Coroutine[Any, Any, list[Any]]:
        priority = min(priority, self._batching.priority_levels)  # the admission queue may have more levels
        return self._serve_adapter.submit(jobs, group=group, costs=costs, priority=priority, timeout_s=timeout_s)

    def _run_items(self, jobs: Sequence[TextJob] | Sequence[ProgramJob]) -> Awaitable[Sequence[Any]]:
        """Run a batch: jobs of one group, which are texts of one encoder or rows of one program."""
        if isinstance(jobs[0], ProgramJob):
            return asyncio.to_thread(run_jobs, cast("Sequence[ProgramJob]", jobs))
        return asyncio.to_thread(encode_batch, cast("Sequence[TextJob]", jobs), counter=self._padding)


def _jobs_of_arrays(program: ServedProgram, arrays: Mapping[str, npt.NDArray[Any]]) -> list[ProgramJob]:
    return jobs_of(program, {name: tensor_of(array) for name, array in arrays.items()})


class _EncoderOps:
    """The `SegmentOps` of one pipeline call: the operations of its stages in a replica.

    A model is leased for its own stage only: two calls that each hold the other's next model would never end.
    """

    def __init__(
        self, module_cache: ModuleCache, encoders: CachedEncoders, call: SegmentCall, run_rows: _RunRows
    ) -> None:
        self._run_rows = run_rows
        self._module_cache = module_cache
        self._encoders = encoders
        self._call = call
        self._warnings: list[str] = []

    async def tokenize(self, model: str, texts: Sequence[str], first: int) -> list[tuple[int, ...]]:
        """Return the token ids of each text; `first` is the number of the first one in its request."""
        async with self._lease(model) as lease:
            keyed, _ = text_modules(lease.modules)
            before = keyed.encoder.prompts.before(None)
            items = embedding_items(keyed, texts, self._long_text(model), first, before=before)
            found = await in_thread(tokenize_items, items)
        self._warnings += cut_warnings(items, found)
        return [text.token_ids for (text,) in found]

    async def encode(
        self, model: str, texts: Sequence[str] | Sequence[tuple[int, ...]], first: int
    ) -> Sequence[torch.Tensor]:
        """Return one vector (D,) per text."""
        return (await self._vectors(model, texts, first))[1]

    async def _vectors(
        self, model: str, texts: Sequence[Text], first: int
    ) -> tuple[TextEncoder, Sequence[torch.Tensor]]:
        async with self._lease(model) as lease:
            keyed, _ = text_modules(lease.modules)
            encoded = await self._encoders.embed(
                lease.modules,
                texts,
                before=keyed.encoder.prompts.before(None),
                long_text=self._long_text(model),
                first=first,
                priority=self._call.priority,
                timeout_s=self._call.timeout_s,
            )
        self._warnings += encoded.warnings
        return keyed.encoder, [embedding_of(output) for output in encoded.outputs]

    async def score(
        self, model: str, texts: Sequence[str] | Sequence[tuple[str, str]], first: int
    ) -> Sequence[torch.Tensor]:
        """Return the scores (C,) of each text or pair."""
        given: list[Text] = [text if isinstance(text, str) else TextPair(*text) for text in texts]
        encoder, logits = await self._vectors(model, given, first)
        return [encoder.scored(one) for one in logits]

    async def head(self, model: str, features: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Apply a head: (n, in) -> (n, out), into `out` where it can."""
        async with self._lease(model) as lease:
            (head,) = lease.modules.values()
            if out is None or head.dtype != torch.float32:
                scores: torch.Tensor = await in_thread(head.apply, features)
                return scores.float()
            into: torch.Tensor = await in_thread(head.apply, features, out)
            return into

    async def program(
        self, model: str, rows: Mapping[str, Sequence[torch.Tensor]], first: int
    ) -> Sequence[Mapping[str, torch.Tensor]]:
        """Run a stored program for the rows of the items, each group together with other calls' rows of it."""
        async with self._lease(model) as lease:
            (program,) = lease.modules.values()
            jobs = await in_thread(jobs_of_rows, program, rows, first)
            groups: dict[Hashable, list[int]] = {}
            for number, job in enumerate(jobs):
                groups.setdefault(job.group, []).append(number)
            terms = self._call.priority, self._call.timeout_s
            answers = await run_together([self._run_rows([jobs[at] for at in one], *terms) for one in groups.values()])
            found = dict(zip(itertools.chain(*groups.values()), itertools.chain(*answers), strict=True))
        return [found[number] for number in range(len(jobs))]

    def take_warnings(self) -> Sequence[str]:
        """Return the warnings so far, once."""
        taken, self._warnings = self._warnings, []
        return taken

    def _long_text(self, model: str) -> LongText:
        return self._call.long_texts.get(model, "truncate")

    def _lease(self, model: str) -> Any:
        return self._module_cache.lease(model, is_text_encoder, version=self._call.versions.get(model))
