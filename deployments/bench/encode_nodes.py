"""The shared tier on two nodes: lookups by where the encoding is, and many who ask for the same text at once.

Two raylets of one machine: what goes from node to node goes over loopback, between two object stores.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
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
from deployments.bench.encode_cluster import STORE_BYTES, cluster_config, encoder_counts
from deployments.bench.encode_load import post_all
from deployments.bench.encode_models import Texts
from deployments.bench.figures import summary
from deployments.cli.running import APP_NAME, cluster_up
from deployments.engines.text.loading import load_text_encoder
from deployments.records import EmbeddingRequest
from deployments.text.cache import Encoding, EncodingCache, EncodingKey
from deployments.text.encode import CachedEncoders, EncodeJob, encode_batch_or_raise
from deployments.text.encoders import KeyedEncoder

NUM_REPLICAS: Final = 2
NUM_TEXTS: Final = 40
LARGE_SHAPE: Final = (512, 4096)  # bf16: the 4 MiB that FLUX.1 reads of one prompt
NUM_LARGE: Final = 5  # of each round: the shared tier takes a tenth of the object store
TIER: Final = "bench-tiers"
CACHE_BYTES: Final = 128 * 2**20
Lookup = tuple[str, float]  # source, milliseconds


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
    """Callers at once of a text that nobody has: how often it went through an encoder."""
    handle = serve.get_app_handle(APP_NAME)
    asyncio.run(post_all(f"{url}/v1/embeddings", [{"model": model, "input": text} for text in texts.take(16)], 16))

    def over_http(text: str) -> None:
        asyncio.run(post_all(f"{url}/v1/embeddings", [{"model": model, "input": text}] * number, number))

    def over_handles(text: str) -> None:
        request = EmbeddingRequest(model=model, input=(text,))
        for response in [handle.embed.remote(request) for _ in range(number)]:
            response.result()

    found: dict[str, Any] = {"callers": number, "replicas": NUM_REPLICAS}
    for name, ask in (("http", over_http), ("handles", over_handles)):
        (text,) = texts.take(1, 200)
        before, start = encoder_counts(url), time.perf_counter()
        ask(text)
        wall_s = time.perf_counter() - start
        counts = encoder_counts(url).since(before)
        found[name] = {"encoded": counts.texts, "wall_s": wall_s, "shared_errors": counts.shared_errors}
    return found


def _lookups(folder: Path, texts: Texts) -> dict[str, Any]:
    """Milliseconds inside a replica, by where the encoding was."""
    home = _tier_node(TIER)
    (away,) = {node["NodeID"] for node in ray.nodes()} - {home}
    first, second, other = (_replica(folder, node) for node in (home, home, away))
    found: dict[str, Any] = {}
    embed = partial(_by_place, first, second, other, "embed")
    found["sentence embedding"] = embed([texts.take(NUM_TEXTS), texts.take(NUM_TEXTS)])
    numbers = range(2 * NUM_LARGE)
    keep = partial(_by_place, first, second, other, "keep")
    found["4 MiB"] = keep([numbers[:NUM_LARGE], numbers[NUM_LARGE:]], LARGE_SHAPE)
    for replica in (first, second, other):
        ray.kill(replica)
    ray.kill(ray.get_actor(encodings_name(TIER)))
    return found


def _by_place(first: Any, second: Any, other: Any, method: str, rounds: Sequence[Any], *shape: Any) -> dict[str, Any]:
    """The last of the `rounds` counts: connections are made in the ones before."""
    num_published = ray.get(first.num_published.remote())
    found: dict[str, list[Lookup]] = {}
    for keys in rounds:
        plan = {"computed": first, "same replica": first, "other replica, same node": second, "other node": other}
        for place, replica in plan.items():
            found[place] = ray.get(getattr(replica, method).remote(keys, *shape))
            while place == "computed" and ray.get(first.num_published.remote()) < num_published + len(keys):
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
        self._encoders = CachedEncoders(self._cache, _run)

    async def embed(self, texts: Sequence[str]) -> list[Lookup]:
        """Encode one after the other, from the text on: what a service's replica does, tokenization and all."""
        found: list[Lookup] = []
        for text in texts:
            start = time.perf_counter()
            (source,) = (await self._encoders.embed(self._keyed, [text])).sources
            found.append((source, (time.perf_counter() - start) * 1e3))
        return found

    async def keep(self, numbers: Sequence[int], shape: tuple[int, ...]) -> list[Lookup]:
        """Keep encodings of `shape` in bfloat16, as another encoder would make; only the cache is timed."""

        async def compute_many(keys: Sequence[EncodingKey]) -> list[Encoding]:
            return [{"hidden": torch.zeros(shape, dtype=torch.bfloat16)} for _ in keys]

        found: list[Lookup] = []
        for number in numbers:
            start = time.perf_counter()
            key = EncodingKey("large", "bfloat16", "none", (number,))
            source = (await self._cache.get_all([key], compute_many))[key].source
            found.append((source, (time.perf_counter() - start) * 1e3))
        return found

    async def num_published(self) -> int:
        """Return how many were published, which goes on after an answer."""
        return (await self._tier.stats()).published


def _tier_node(cluster: str) -> str:
    """The node of the shared encodings."""
    actor = connect_shared_encodings(cluster, CACHE_BYTES)
    node: str = ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
    return node


async def _run(jobs: Sequence[EncodeJob], priority: int, timeout_s: float | None) -> list[Encoding]:
    return await asyncio.to_thread(encode_batch_or_raise, jobs)
