"""The encoding cache in `atelier bench encode`: encodings per GiB, and on two nodes lookups and identical texts.

Encodings are counted in the real cache, filled until it evicts some. The nodes are two raylets of one machine: what
goes from node to node goes over loopback, between two object stores.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import ray
import torch
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.torch import load_file

from cluster.actor_names import encodings_name
from cluster.encodings.actor import connect_shared_encodings
from cluster.encodings.ray_tier import RaySharedTier
from deployments.bench.encode_load import Texts, post_all
from deployments.bench.encode_servers import STORE_BYTES, cluster_config, encoder_counts
from deployments.bench.figures import summary
from deployments.cli.running import APP_NAME, cluster_up
from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.loading import load_text_encoder
from deployments.records import EmbeddingRequest
from deployments.text.cache import ENTRY_BYTES, TENSOR_BYTES, CacheStats, Encoding, EncodingCache, EncodingKey
from deployments.text.encode import CachedEncoders, EncodeJob, encode_batch_or_raise
from deployments.text.encoders import KeyedEncoder

GIB: Final = 2**30
XXL_WIDTH: Final = 4096  # of T5-XXL, which FLUX.1 and SD3 read; bf16
STOCK_LENGTH: Final = 512  # what FluxPipeline pads to
FILL_BYTES: Final = {"stock": GIB // 8, "trimmed": GIB // 8, "sentence": GIB // 64}
NUM_REPLICAS: Final = 2
NUM_TEXTS: Final = 40
LARGE_SHAPE: Final = (512, 4096)  # bf16: the 4 MiB that FLUX.1 reads of one prompt
NUM_LARGE: Final = 5  # of each round: the shared tier takes a tenth of the object store
TIER: Final = "bench-tiers"
CACHE_BYTES: Final = 128 * 2**20
_Lookup = tuple[str, float]  # source, milliseconds


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
    """Return "lookups" and "identical"; `identical` is the model that is asked `num_identical` times at once."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    node = {"num_cpus": 4, "object_store_memory": STORE_BYTES}
    nodes = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        nodes.add_node(**node)
        config = cluster_config(folder, models, num_threads, num_replicas=NUM_REPLICAS, address=nodes.address)
        with cluster_up(config, "") as url:
            found = {"identical": _identical(url, identical, texts, num_identical)}
            found["lookups"] = _lookups(models["minilm"], texts)
    finally:
        nodes.shutdown()
    return found


def _identical(url: str, model: str, texts: Texts, number: int) -> dict[str, Any]:
    """Send requests at once for a text that nobody has; count how often it went through an encoder."""
    handle = serve.get_app_handle(APP_NAME)
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
        found[name] = {"encoded": counts.texts, "wall_s": wall_s, "shared_errors": counts.shared_errors}
    return found


def _lookups(folder: Path, texts: Texts) -> dict[str, Any]:
    """Return milliseconds inside a replica, by where the encoding was."""
    home = _tier_node(TIER)
    (away,) = {node["NodeID"] for node in ray.nodes()} - {home}
    first, second, other = (_replica(folder, node) for node in (home, home, away))
    found: dict[str, Any] = {}
    embed = partial(_by_place, first, second, other, "embed_texts")
    found["sentence embedding"] = embed([texts.draw(NUM_TEXTS), texts.draw(NUM_TEXTS)])
    numbers = range(2 * NUM_LARGE)
    keep = partial(_by_place, first, second, other, "keep_encodings")
    found["4 MiB"] = keep([numbers[:NUM_LARGE], numbers[NUM_LARGE:]], LARGE_SHAPE)
    for replica in (first, second, other):
        ray.kill(replica)
    ray.kill(ray.get_actor(encodings_name(TIER)))
    return found


def _by_place(first: Any, second: Any, other: Any, method: str, rounds: Sequence[Any], *shape: Any) -> dict[str, Any]:
    """Return milliseconds by place: the last of the `rounds` counts: connections are made in the ones before."""
    num_published = ray.get(first.count_published.remote())
    found: dict[str, list[_Lookup]] = {}
    for keys in rounds:
        plan = {"computed": first, "same replica": first, "other replica, same node": second, "other node": other}
        for place, replica in plan.items():
            found[place] = ray.get(getattr(replica, method).remote(keys, *shape))
            while place == "computed" and ray.get(first.count_published.remote()) < num_published + len(keys):
                time.sleep(0.01)
        num_published += len(keys)
    sources = {place: {source for source, _ in lookups} for place, lookups in found.items()}
    expected = {"computed": {"computed"}, "same replica": {"local"}, "other node": {"shared"}}
    if sources != expected | {"other replica, same node": {"shared"}}:
        raise RuntimeError(f"encodings came from elsewhere than they should have: {sources}")
    return {place: summary([ms for _, ms in lookups]) for place, lookups in found.items()}


def _replica(folder: Path, node: str) -> Any:
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_EncodeReplica).options(num_cpus=0, scheduling_strategy=where).remote(TIER, folder)


class _EncodeReplica:
    """A replica's cache with both of its tiers, in a process of its own. `cluster` names the shared encodings."""

    def __init__(self, cluster: str, folder: Path) -> None:
        torch.set_num_threads(1)
        self._tier = RaySharedTier(lambda: connect_shared_encodings(cluster, CACHE_BYTES))
        self._cache = EncodingCache(CACHE_BYTES, self._tier)
        encoder = load_text_encoder(folder, "transformers", None, folder, load_file(folder / "model.safetensors"))
        self._keyed = KeyedEncoder(cluster, encoder)
        self._encoders = CachedEncoders(self._cache, _encode_jobs)

    async def embed_texts(self, texts: Sequence[str]) -> list[_Lookup]:
        """Encode one after the other, from the text on: what a service's replica does, tokenization and all."""
        found: list[_Lookup] = []
        for text in texts:
            start = time.perf_counter()
            (source,) = (await self._encoders.embed(self._keyed, [text])).sources
            found.append((source, (time.perf_counter() - start) * 1e3))
        return found

    async def keep_encodings(self, numbers: Sequence[int], shape: tuple[int, ...]) -> list[_Lookup]:
        """Keep encodings of `shape` in bfloat16, as another encoder would make; only the cache is timed."""

        async def compute_many(keys: Sequence[EncodingKey]) -> list[Encoding]:
            return [{"hidden": torch.zeros(shape, dtype=torch.bfloat16)} for _ in keys]

        found: list[_Lookup] = []
        for number in numbers:
            start = time.perf_counter()
            key = EncodingKey("large", "bfloat16", "none", (number,))
            source = (await self._cache.get_all([key], compute_many))[key].source
            found.append((source, (time.perf_counter() - start) * 1e3))
        return found

    async def count_published(self) -> int:
        """Return how many were published, which goes on after an answer."""
        return (await self._tier.stats()).published


def _tier_node(cluster: str) -> str:
    """Return the node of the shared encodings."""
    actor = connect_shared_encodings(cluster, CACHE_BYTES)
    node: str = ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
    return node


async def _encode_jobs(jobs: Sequence[EncodeJob], priority: int, timeout_s: float | None) -> list[Encoding]:
    return await asyncio.to_thread(encode_batch_or_raise, jobs)
