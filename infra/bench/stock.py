"""Pipelines that diffusers' own code runs, beside diffusers alone: steps, switches, and a chat on the same device.

In one process, in turn, over the services that a worker has; extents come from the local disk. Texts are fresh on both
sides and encoded on both: ours by the text encoder, with a module cache of its own.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import diffusers
import torch

from configs.cluster import WorkerConfig
from configs.model import GenerationDefaults
from deployments.console.output import Column, print_json, print_line, print_table
from deployments.engines.stock.inputs import FIELDS
from deployments.modules.budget import ModuleBudget
from deployments.modules.builder import Builder
from deployments.modules.cache import ModuleCache
from deployments.modules.encoders import TextEncoderBuilder
from deployments.modules.loading import ComponentBuilder
from deployments.records import ClipRequest, CompletionRequest, ImageRequest
from deployments.replicas.step_loop import DeviceThread
from deployments.requests.defaults import with_image_defaults
from deployments.services.image_service import ImageService
from deployments.services.text_service import TextService
from deployments.text.fallback import FallbackEncoder
from infra.bench.command.figures import percentile
from infra.bench.stock_models import CLASSES, Sizes, build_pipeline, options_of, save_chat
from weights.loading.provider import LocalExtents
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

_COLUMNS: Final = ("ours", "diffusers", "ours / diffusers", "by processor time", "whole request", "ms beside steps")
_MANY_STEPS: Final = 500  # more than a chat sees the end of


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measuring."""

    few_steps: int = 2
    num_steps: int = 30
    rounds: int = 7
    switches: int = 4
    tokens: int = 40
    sizes: Sizes = field(default_factory=Sizes)


class _Extents(LocalExtents):
    def release(self, extents: Sequence[Any]) -> None: ...
    def prefetch(self, extents: Sequence[Any]) -> None: ...


class _Host:
    """A worker's services over a store, and a text encoder beside it."""

    def __init__(self, store: WeightStore, budget_bytes: int) -> None:
        self._store = store
        self.manifests: dict[str, Any] = {}
        settings, device = WorkerConfig(), DeviceThread()
        self.worker = self._cache(ComponentBuilder(settings), budget_bytes)
        self.encoder = FallbackEncoder(self._cache(TextEncoderBuilder(), 2**33), DeviceThread(), warnings=())
        self.images = ImageService(self.worker, settings, device)
        self.texts = TextService(self.worker, device)

    def add(self, name: str, folder: Path) -> None:
        """Bring a model into the store."""
        self.manifests[name] = externalize(self._store, name, folder, dtype="float32")

    def _cache(self, builder: Builder, budget_bytes: int) -> ModuleCache:
        async def fetch(model: str, version: str | None) -> Any:
            return self.manifests[model]

        budget = ModuleBudget(budget_bytes)
        return ModuleCache(fetch, _Extents(self._store.packs), self._store.models, budget, builder)

    async def make(
        self,
        model: str,
        class_name: str,
        prompt: str,
        num_steps: int,
        options: dict[str, Any],
        began: asyncio.Event | None = None,
    ) -> Any:
        """Return the result of one request. A video sets `began` after its first step."""
        named = {name: value for name, value in options.items() if name in FIELDS}
        extra = {name: value for name, value in options.items() if name not in FIELDS}
        given = {"model": model, "prompt": prompt, "seed": 1, "num_inference_steps": num_steps, "extra": extra, **named}
        if class_name == "WanPipeline":
            clip = ClipRequest(**given, reports_steps=began is not None)
            return await self.images.make_clip(clip, self.encoder.condition, lambda _: began.set() if began else None)
        request = with_image_defaults(ImageRequest(**given), GenerationDefaults(), class_name)
        return await self.images.generate(request, self.encoder.condition)


def measure_stock(effort: Effort, seed: int) -> dict[str, Any]:
    """Return the figures of all parts."""
    with tempfile.TemporaryDirectory(prefix="bench-stock-") as folder:
        return asyncio.run(_measure(effort, seed, Path(folder)))


async def _measure(effort: Effort, seed: int, folder: Path) -> dict[str, Any]:
    host = _Host(WeightStore(folder / "store"), 2**33)
    pipelines = {}
    for name in CLASSES:
        pipelines[name] = build_pipeline(name, effort.sizes, seed)
        pipelines[name].save_pretrained(folder / name)
        host.add(name, folder / name)
    steps = [await _measure_steps(host, name, pipelines[name], effort) for name in CLASSES]
    chat = await _measure_chat(host, folder, effort, seed)
    del pipelines
    gc.collect()
    return {"steps": steps, "switch": await _measure_switch(folder, effort, seed), "chat": chat}


async def _measure_steps(host: _Host, name: str, pipeline: Any, effort: Effort) -> dict[str, Any]:
    """Measure requests of few and of many steps, in turn with diffusers: what they differ by is the steps' alone.

    The file of a video is no part of it.
    """
    counts = (effort.few_steps, effort.num_steps)
    taken = {(who, count): list[_Taken]() for who in ("ours", "stock") for count in counts}
    for round_ in range(-1, effort.rounds):
        for who, count in sorted(taken, reverse=round_ % 2 == 1):
            gc.collect()
            one = await _measure_request(host, name, None if who == "ours" else pipeline, count, effort)
            if round_ >= 0:
                taken[who, count].append(one)
    return {"class": name, **_step_figures(taken, effort)}


@dataclass(frozen=True, slots=True)
class _Taken:
    """The time of one request: by the clock, and of the process, which other work on the machine changes little."""

    seconds: float
    cpu_s: float


async def _measure_request(host: _Host, name: str, pipeline: Any | None, num_steps: int, effort: Effort) -> _Taken:
    """Measure a request of the worker, or of a pipeline of diffusers."""
    options = options_of(name, effort.sizes)
    prompt = f"a cat of number {time.perf_counter_ns()}"  # fresh, so that no side has it in a cache
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    if pipeline is None:
        result = await host.make(name, name, prompt, num_steps, options)
        file_s = result.timings_ms.get("encode_file", 0.0) / 1e3
    else:
        await asyncio.to_thread(_call, pipeline, prompt, num_steps, options)
        file_s = 0.0
    return _Taken(time.perf_counter() - begin_s - file_s, time.process_time() - begin_cpu_s)


def _step_figures(taken: dict[tuple[str, int], list[_Taken]], effort: Effort) -> dict[str, float]:
    def step_s(who: str, kind: str) -> float:
        pairs = zip(taken[who, effort.few_steps], taken[who, effort.num_steps], strict=True)
        more = statistics.median(getattr(many, kind) - getattr(few, kind) for few, many in pairs)
        return more / (effort.num_steps - effort.few_steps)

    def request_s(who: str, count: int) -> float:
        return statistics.median(one.seconds for one in taken[who, count])

    few, many = effort.few_steps, effort.num_steps
    return {
        "num_steps": many,
        "ours": 1 / step_s("ours", "seconds"),
        "stock": 1 / step_s("stock", "seconds"),
        "ratio": step_s("stock", "seconds") / step_s("ours", "seconds"),
        "cpu_ratio": step_s("stock", "cpu_s") / step_s("ours", "cpu_s"),
        "whole_ratio": request_s("stock", many) / request_s("ours", many),
        "extra_ms": (request_s("ours", few) - request_s("stock", few)) * 1e3,
    }


def _call(pipeline: Any, prompt: str, num_steps: int, options: dict[str, Any]) -> None:
    generator = torch.Generator("cpu").manual_seed(1)
    pipeline(prompt, num_inference_steps=num_steps, generator=generator, output_type="np", **options)


async def _measure_switch(folder: Path, effort: Effort, seed: int) -> dict[str, Any]:
    """Measure switches between two models that share text encoder and VAE, beside `from_pretrained` of diffusers.

    The worker has room for one denoiser. Reads of diffusers come from the page cache, as ours do.
    """
    name = CLASSES[0]
    first = build_pipeline(name, effort.sizes, seed)
    other = build_pipeline(name, effort.sizes, seed + 1)
    other.register_modules(text_encoder=first.text_encoder, vae=first.vae)
    sizes = {one: _nbytes(getattr(first, one)) for one in ("transformer", "vae", "text_encoder")}
    host = _Host(WeightStore(folder / "switch"), sizes["transformer"] * 3 // 2 + sizes["vae"])
    for model, pipeline in (("one", first), ("two", other)):
        pipeline.save_pretrained(folder / model)
        host.add(model, folder / model)
    del first, other
    small = {**options_of(name, effort.sizes), "height": 16, "width": 16}
    ours, built, loads = list[float](), set[str](), list[float]()
    for round_ in range(-2, 2 * effort.switches):
        model = ("one", "two")[round_ % 2]
        result = await host.make(model, name, "a cat", 1, small)
        begin_s = time.perf_counter()
        await asyncio.to_thread(diffusers.DiffusionPipeline.from_pretrained, folder / model)
        load_ms = (time.perf_counter() - begin_s) * 1e3
        gc.collect()
        if round_ >= 0:
            ours.append(result.switch.switch_ms)
            built |= set(result.switch.built)
            loads.append(load_ms)
    return {
        "class": name,
        "switch_ms": statistics.median(ours),
        "from_pretrained_ms": statistics.median(loads),
        "built": sorted(built),
        "bytes": sizes,
    }


def _nbytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


async def _measure_chat(host: _Host, folder: Path, effort: Effort, seed: int) -> dict[str, Any]:
    """Measure the time between tokens of a chat, alone and while a video is made, and what the video's calls take."""
    save_chat(folder / "chat", seed)
    host.add("chat", folder / "chat")
    name, gaps = "WanPipeline", {"alone": list[float](), "beside": list[float]()}
    options = {**options_of(name, effort.sizes), "num_frames": 17}
    await _tokens(host, effort.tokens)
    for round_ in range(effort.rounds):
        gaps["alone"] += await _tokens(host, effort.tokens)
        began = asyncio.Event()
        making = asyncio.ensure_future(host.make(name, name, f"a dog {round_}", _MANY_STEPS, options, began))
        beginning = asyncio.ensure_future(began.wait())
        await asyncio.wait({making, beginning}, return_when=asyncio.FIRST_COMPLETED)
        gaps["beside"] += await _tokens(host, effort.tokens)
        if making.done():
            raise RuntimeError(f"the video ended before the chat: {making.exception()}")
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
    step_ms = statistics.median(gaps["alone"]) * 1e3
    waits = [gap * 1e3 - step_ms for gap in gaps["beside"]]
    return {
        "step_ms": step_ms,
        "step_p95_ms": percentile(gaps["alone"], 0.95) * 1e3,
        "beside_ms": statistics.median(gaps["beside"]) * 1e3,
        "beside_p95_ms": percentile(gaps["beside"], 0.95) * 1e3,
        "wait_in_steps": statistics.median(waits) / step_ms,
        "denoiser_call_ms": await asyncio.to_thread(_denoiser_call_ms, folder / name, options),
    }


async def _tokens(host: _Host, count: int) -> list[float]:
    """Return the seconds between the tokens of one text, but for the first few."""
    stamps: list[float] = []
    request = CompletionRequest(
        model="chat", prompt="What is 12 + 7?", max_tokens=count, temperature=0, ignore_eos=True
    )
    await host.texts.write(request, lambda _: stamps.append(time.perf_counter()))
    return [after - before for before, after in itertools.pairwise(stamps[2:])]


def _denoiser_call_ms(folder: Path, options: dict[str, Any]) -> float:
    """Return what a call of the video's denoiser takes alone."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    begun, times = list[float](), list[float]()
    pipeline.transformer.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter()))
    pipeline.transformer.register_forward_hook(lambda *_: times.append(time.perf_counter() - begun[-1]))
    _call(pipeline, "a dog", 5, options)
    return statistics.median(times) * 1e3


def print_stock_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print the tables."""
    if as_json:
        print_json(figures)
        return
    columns = [Column("class"), *(Column(one, align="right") for one in _COLUMNS)]
    names = ("ours", "stock", "ratio", "cpu_ratio", "whole_ratio")
    rows = [(row["class"], *(f"{row[one]:.3f}" for one in names), f"{row['extra_ms']:.1f}") for row in figures["steps"]]
    num_steps = figures["steps"][0]["num_steps"]
    print_table(columns, rows, title=f"steps/s of one request, and ours / diffusers of one of {num_steps} steps")
    switch, chat = figures["switch"], figures["chat"]
    shown = ", ".join(f"{name} {nbytes / 2**20:.0f} MiB" for name, nbytes in switch["bytes"].items())
    print_line(
        f"a switch ({switch['class']}: {shown}): {switch['switch_ms']:.1f} ms, built {', '.join(switch['built'])}; "
        f"from_pretrained {switch['from_pretrained_ms']:.0f} ms"
    )
    print_line(
        f"a chat's token takes {chat['step_ms']:.1f} ms alone (p95 {chat['step_p95_ms']:.1f}), {chat['beside_ms']:.1f} "
        f"beside a video (p95 {chat['beside_p95_ms']:.1f}): it waits {chat['wait_in_steps']:.2f} of its steps; "
        f"a call of the video's denoiser takes {chat['denoiser_call_ms']:.0f} ms"
    )
