"""The encoding cache in `infra.bench encode`: encodings per GiB, lookups, and on two nodes identical texts.

Encodings are counted in the real cache, filled until it evicts some. The nodes are two raylets of one machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from ray import serve
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from deployments.console.running import cluster_up
from deployments.engines.text.encoder import TextEncoder, load_text_encoder
from deployments.modules.encoders import KeyedEncoder
from deployments.records import EmbeddingRequest
from deployments.text.cache import ENTRY_BYTES, TENSOR_BYTES, CacheStats, Encoding, EncodingCache, EncodingKey
from deployments.text.encode import CachedEncoders, TextJob, encode_batch_or_raise
from infra.bench.command.figures import summary
from infra.bench.encode_load import Texts, post_all
from infra.bench.encode_servers import STORE_BYTES, cluster_config, encoder_counts

GIB: Final = 2**30
XXL_WIDTH: Final = 4096  # of T5-XXL, which FLUX.1 and SD3 read; bf16
STOCK_LENGTH: Final = 512  # what FluxPipeline pads to
FILL_BYTES: Final = {"stock": GIB // 8, "trimmed": GIB // 8, "sentence": GIB // 64}
NUM_REPLICAS: Final = 2
NUM_TEXTS: Final = 40
CACHE_BYTES: Final = 128 * 2**20


def live_entries(t5: Path, prompts: Sequence[str], embedding_width: int) -> dict[str, Any]:
    """Return encodings per GiB, of T5-XXL's shapes with the lengths of the `prompts`.

    A narrower T5 of the folder `t5` is really run: its entries have to be as large as `_entry_bytes` says.
    """
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
    """Return bytes per entry as the cache counts them, and as the formula does."""
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
    """Return what a cache counts after `number` entries; None: after it let go of as many as it could hold."""

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


def measure_nodes(
    folder: Path, models: Mapping[str, Path], identical: str, texts: Texts, num_identical: int, num_threads: int
) -> dict[str, Any]:
    """Return "identical": what became of `num_identical` requests at once to the model `identical`."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    node = {"num_cpus": 4, "object_store_memory": STORE_BYTES}
    nodes = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        nodes.add_node(**node)
        config = cluster_config(folder, models, num_threads, num_replicas=NUM_REPLICAS, address=nodes.address)
        with cluster_up(config, "") as url:
            return {"identical": _identical(url, config.name, identical, texts, num_identical)}
    finally:
        nodes.shutdown()


def _identical(url: str, app: str, model: str, texts: Texts, number: int) -> dict[str, Any]:
    """Send requests at once for a text that nobody has; count how often it went through an encoder."""
    handle = serve.get_app_handle(app)
    asyncio.run(post_all(f"{url}/v1/embeddings", [{"model": model, "input": text} for text in texts.draw(16)], 16))

    def over_http(text: str) -> None:
        asyncio.run(post_all(f"{url}/v1/embeddings", [{"model": model, "input": text}] * number, number))

    def over_handles(text: str) -> None:
        request = EmbeddingRequest(model=model, input=(text,))
        for response in [handle.embed.remote(request) for _ in range(number)]:
            response.result()

    found: dict[str, Any] = {"callers": number, "replicas": NUM_REPLICAS}
    for name, send_all in (("http", over_http), ("handles", over_handles)):
        (text,) = texts.draw(1, 200)
        before, start = encoder_counts(url), time.perf_counter()
        send_all(text)
        wall_s = time.perf_counter() - start
        counts = encoder_counts(url).since(before)
        found[name] = {"encoded": counts.texts, "wall_s": wall_s}
    return found


def measure_lookups(folder: Path, texts: Texts) -> dict[str, Any]:
    """Return milliseconds inside a replica, of new texts and of the same ones again: what its encoders and cache take,
    tokenization and all.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        encoder = load_text_encoder(folder, "transformers", None, folder, load_file(folder / "model.safetensors"))
        found = asyncio.run(_look_up(KeyedEncoder("bench", encoder), texts))
    finally:
        torch.set_num_threads(threads)
    return {"sentence embedding": {place: summary(times) for place, times in found.items()}}


async def _look_up(keyed: KeyedEncoder, texts: Texts) -> dict[str, list[float]]:
    """Return milliseconds by place: the last of two rounds counts."""
    encoders = CachedEncoders(EncodingCache(CACHE_BYTES), _encode_jobs)
    found: dict[str, list[float]] = {}
    for drawn in (texts.draw(NUM_TEXTS), texts.draw(NUM_TEXTS)):
        for place in ("computed", "same replica"):
            found[place] = []
            for text in drawn:
                start = time.perf_counter()
                await encoders.embed({"model": keyed}, [text])
                found[place].append((time.perf_counter() - start) * 1e3)
    return found


async def _encode_jobs(jobs: Sequence[TextJob], priority: int, timeout_s: float | None) -> list[Encoding]:
    return await asyncio.to_thread(encode_batch_or_raise, jobs)
