"""The denoise/LLM service: one replica runs any model, and switches to what a request needs.

A switch leases the model's components from the host: what another model shares with it stays, what is missing is
attached from the node's shared memory. Text encoding runs in its own service meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

from cluster.telemetry import RequestMetrics
from configs.cluster import ClusterConfig
from deployments.engines.diffusion.factory import create_pipeline, settings_hash
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.protocol import AdapterUse, DiffusionRequest, SamplingParams, TextRequest
from deployments.errors import ModelUnavailable, as_service_errors
from deployments.image_requests import conditioning_request, denoise_request, ignored_inputs
from deployments.modules.component_builder import ComponentBuilder, batch_bounds, is_denoise_component
from deployments.modules.model_host import Lease
from deployments.records import (
    ChatRequest,
    CompletionRequest,
    ImageRequest,
    ImageResult,
    SwitchReport,
    TextChunk,
    TextRequestRecord,
    TextResult,
)
from deployments.services.model_replica import ModelReplica
from deployments.services.replica_calls import ReplicaCalls, ReplicaStates
from deployments.services.step_loop import DenoiseLoop, DenoiseTimes, DeviceThread, TextLoop
from deployments.text.client import EncoderDown, EncoderService
from deployments.text.fallback import OwnEncoder
from deployments.text.records import Conditioning
from deployments.text.tensor_records import unpack
from deployments.threads import outcome_of
from weights.manifest import Manifest, ModelKind


class Worker(ModelReplica):
    """One replica. `encoder` is the handle of the embedding service."""

    _kinds: ClassVar[tuple[ModelKind, ...]] = ("diffusion", "llm")
    _wants = staticmethod(is_denoise_component)

    async def __init__(self, config: ClusterConfig, encoder: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = config.worker
        calls = ReplicaCalls(encoder, ReplicaStates("text_encoder").why_none_runs)
        self._encoder = EncoderService(calls, config.http.request_timeout_s)
        self._device = DeviceThread()
        # HAZARD: the first text that a tokenizer encodes may change it (its file can have truncation switched on), and
        # two at once would meet. One thread for all: prompts take milliseconds, and no step waits for them.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._denoising = DenoiseLoop(self._device)
        self._metrics = RequestMetrics()
        builder = ComponentBuilder(self._settings)
        await self._open(config, "worker", self._settings, builder, self._settings.num_threads)
        self._own_encoder = OwnEncoder(self._host, self._device)

    async def generate(self, request: ImageRequest) -> ImageResult:
        """Pictures. Encodes the text elsewhere while this replica switches; merges with others step by step."""
        start = time.perf_counter()
        with as_service_errors():
            manifest = await self._host.manifest(request.model, request.model_version)
            denoise = denoise_request(request)
            text = conditioning_request(request, denoise, manifest.class_name or "")
            encoding = asyncio.ensure_future(self._encoder.condition(text))
            try:
                switch, conditioning, (images, times) = await self._paint(request, manifest, denoise, encoding)
            except EncoderDown as error:
                if not self._settings.encodes_alone:
                    raise ModelUnavailable(str(error), "model") from None
                own = _done(await self._own_encoder.condition(text))
                switch, conditioning, (images, times) = await self._paint(request, manifest, denoise, own)
            finally:
                encoding.cancel()
        result = ImageResult(
            model=request.model,
            images=list(images),
            seed=denoise.seed,
            num_inference_steps=denoise.num_inference_steps,
            timings_ms={
                "queue": times.queue_s * 1e3,
                "encode": conditioning.encode_ms,
                "switch": switch.switch_ms,
                "denoise": times.denoise_s * 1e3,
                "decode": times.decode_s * 1e3,
                "total": (time.perf_counter() - start) * 1e3,
            },
            switch=switch,
            cache=conditioning.cache,
            warnings=conditioning.warnings + ignored_inputs(request, text.use_negative),
        )
        self._metrics.attached(request.model, switch.attached_bytes)
        self._metrics.answered("image", request.model, result.timings_ms)
        return result

    async def _paint(
        self, request: ImageRequest, manifest: Manifest, denoise: DiffusionRequest, encoding: Awaitable[Conditioning]
    ) -> tuple[SwitchReport, Conditioning, tuple[Any, DenoiseTimes]]:
        """Switch to the model while the text is being encoded, then denoise. Raises EncoderDown with nothing held."""
        async with self._host.lease(
            request.model,
            is_denoise_component,
            [use.name for use in request.lora],
            version=manifest.fingerprint,
            adapter_versions=request.adapter_versions,
        ) as lease:
            conditioning = await encoding
            pictures = await self._denoise(lease, denoise, unpack(conditioning.tensors))
            return lease.report, conditioning, pictures

    async def write_text(self, request: TextRequestRecord) -> TextResult:
        """The whole text in one answer: cheaper than a stream, whose every piece is a message of its own."""
        async with contextlib.aclosing(self.stream_text(request)) as stream:
            chunks = [chunk async for chunk in stream]
        last = chunks[-1]
        return TextResult(
            model=request.model,
            text="".join(chunk.text for chunk in chunks),
            finish_reason=last.finish_reason or "stop",
            num_prompt_tokens=last.num_prompt_tokens,
            num_completion_tokens=last.num_completion_tokens,
            timings_ms=last.timings_ms,
            switch=last.switch,
        )

    async def stream_text(self, request: TextRequestRecord) -> AsyncGenerator[TextChunk, None]:
        """Text as it comes. The last chunk has the finish reason, the timings and the switch report."""
        start = time.perf_counter()
        with as_service_errors():
            async with self._host.lease(request.model, is_denoise_component, version=request.model_version) as lease:
                engine: LLMEngine = lease.modules["model"]
                loop: TextLoop = lease.bound(lambda: TextLoop(self._device, engine))
                reading = asyncio.get_running_loop().run_in_executor(self._tokenizing, _prompt_tokens, engine, request)
                tokens = await outcome_of(reading)
                added = time.perf_counter()
                first: float | None = None
                text_request = TextRequest(uuid.uuid4().hex, tokens, _sampling(request, engine, len(tokens)))
                # Closed before the lease ends: the engine may be in a step of this request when the stream is left.
                async with contextlib.aclosing(loop.run(text_request)) as deltas:
                    async for delta in deltas:
                        first = first or time.perf_counter()
                        if not delta.finish_reason:
                            yield TextChunk(delta.text, delta.num_prompt_tokens, delta.num_completion_tokens)
                            continue
                        now = time.perf_counter()
                        timings = {
                            "switch": lease.report.switch_ms,
                            "prefill": (first - added) * 1e3,
                            "generate": (now - first) * 1e3,
                            "total": (now - start) * 1e3,
                        }
                        self._metrics.attached(request.model, lease.report.attached_bytes)
                        self._metrics.answered("text", request.model, timings)
                        yield TextChunk(
                            delta.text,
                            delta.num_prompt_tokens,
                            delta.num_completion_tokens,
                            delta.finish_reason,
                            timings,
                            lease.report,
                        )

    async def describe(self) -> dict[str, Any]:
        """Add the running work and the state of the text encoder to what every replica tells of itself."""
        return await super().describe() | {
            "denoising": self._denoising.num_running,
            "text_encoder_down": self._encoder.is_believed_down,
            "texts_encoded_alone": self._own_encoder.num_requests,
        }

    async def _denoise(self, lease: Lease, request: DiffusionRequest, conditioning: dict[str, Any]) -> Any:
        pipeline = lease.bound(
            lambda: create_pipeline(
                lease.manifest.class_name or "",
                lease.skeleton,
                lease.modules,
                device=self._settings.torch_device,
                bounds=batch_bounds(self._settings),
            ),
            settings_hash(lease.skeleton),
        )
        names = {name: f"{name}@{serial}" for name, serial in lease.adapter_serials.items()}
        request = replace(request, adapters=tuple(AdapterUse(names[use.name], use.scale) for use in request.adapters))
        adapters = {names[name]: adapter for name, adapter in lease.adapters.items()}
        alive = self._host.serials()
        gone = [name for name in pipeline.adapters if int(name.rpartition("@")[2]) not in alive]
        state = await self._device.run(_start, pipeline, adapters, gone, request, conditioning)
        return await self._denoising.run(pipeline, state)


def _done(conditioning: Conditioning) -> asyncio.Future[Conditioning]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(conditioning)
    return future


def _start(
    pipeline: Any, adapters: dict[str, Any], gone: list[str], request: DiffusionRequest, conditioning: Any
) -> Any:
    """On the device thread: nothing else looks at the pipeline's adapters meanwhile.

    Adapters stay known to the pipeline while they are resident, since requests with the same adapter only merge when
    they use the same object; each version of one has a name of its own. `gone` names those that were evicted.
    """
    for name in set(gone) & set(pipeline.adapters):
        pipeline.drop_adapter(name)
    for name in adapters.keys() - set(pipeline.adapters):
        pipeline.add_adapter(name, adapters[name])
    return pipeline.start(request, conditioning)


def _prompt_tokens(engine: LLMEngine, request: ChatRequest | CompletionRequest) -> tuple[int, ...]:
    if isinstance(request, ChatRequest):
        return engine.encode_chat([message.model_dump() for message in request.messages])
    return engine.encode_text(request.prompt)


def _sampling(request: ChatRequest | CompletionRequest, engine: LLMEngine, num_prompt_tokens: int) -> SamplingParams:
    room = max(1, engine.max_model_len - num_prompt_tokens)
    return SamplingParams(
        max_tokens=room if request.max_tokens is None else request.max_tokens,
        temperature=0.0 if request.temperature is None else request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=request.stop,
    )
