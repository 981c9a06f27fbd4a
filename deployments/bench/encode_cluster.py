"""Our side of `atelier bench encode`: a cluster for it, and what its encoders counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ray import serve

from configs.cluster import ClusterConfig
from deployments.bench.encode_peers import free_port
from deployments.cli.client import Client

STORE_BYTES: Final = 512 * 2**20
NUM_CPUS: Final = 4  # shares, not cores


def cluster_config(
    folder: Path, models: Mapping[str, Path], num_threads: int, *, num_replicas: int = 1, address: str | None = None
) -> ClusterConfig:
    """Return a config with sizes for the bench, and `num_replicas` text encoders of `num_threads` each."""
    ray = {"address": address} if address else {"num_cpus": NUM_CPUS, "object_store_bytes": STORE_BYTES}
    return ClusterConfig.model_validate(
        {
            "name": "bench-encode",
            "http": {"port": free_port()},
            "ray": ray | {"preallocate": False},
            "store": {"path": str(folder / "store")},
            "text_encoder": {"num_replicas": num_replicas, "num_cpus": num_threads, "shared_cache_bytes": "32 MiB"},
            "models": [
                {"id": name, "path": str(path), "dtype": "float32", "preload": True} for name, path in models.items()
            ],
        }
    )


@dataclass(frozen=True, slots=True)
class EncoderCounts:
    """Counts of all replicas since their start. `texts` went through encoders, in `forwards`."""

    texts: int
    forwards: int
    batches: int
    text_tokens: int
    padding_tokens: int
    shared_errors: int

    def since(self, before: EncoderCounts) -> EncoderCounts:
        return EncoderCounts(*(getattr(self, name) - getattr(before, name) for name in self.__slots__))

    @property
    def padding_share(self) -> float:
        """Return the share of padding in the token positions that forwards worked on."""
        return self.padding_tokens / max(1, self.text_tokens + self.padding_tokens)


def encoder_counts(url: str) -> EncoderCounts:
    """Read the counts. Raises RuntimeError when a replica does not answer: its counts would be missing."""
    replicas: Sequence[Mapping[str, Any]] = Client(url).cluster()["text_encoders"]
    if not replicas or any("unreachable" in replica for replica in replicas):
        raise RuntimeError(f"not every text encoder answers: {replicas!r:.300}")

    def total(part: str, name: str) -> int:
        return sum(replica[part][name] for replica in replicas)

    return EncoderCounts(
        texts=total("padding", "texts"),
        forwards=total("padding", "forwards"),
        batches=total("batching", "batches"),
        text_tokens=total("padding", "text_tokens"),
        padding_tokens=total("padding", "batch_padding_tokens") + total("padding", "stock_padding_tokens"),
        shared_errors=total("cache", "shared_errors"),
    )


def arrival_padding(lengths: Sequence[int], size: int) -> float:
    """Return the share of padding when texts run in the order of arrival, `size` together, at the longest's length."""
    positions = tokens = 0
    for start in range(0, len(lengths), size):
        group = lengths[start : start + size]
        positions += len(group) * max(group)
        tokens += sum(group)
    return 1 - tokens / positions if positions else 0.0


class _Empty:
    """An empty application: the cost of Serve's proxy and one replica."""

    async def __call__(self, _: Any) -> str:
        return "{}"


class _Front:
    """An application of two replicas in series, as the way to an encoder is."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    async def __call__(self, _: Any) -> str:
        answer: str = await self._behind.__call__.remote(None)
        return answer


def deploy_empty() -> dict[str, str]:
    """Deploy empty applications beside ours; return their route prefixes by name."""
    options: dict[str, Any] = {"max_ongoing_requests": 256, "ray_actor_options": {"num_cpus": 0}}
    behind = serve.deployment(_Empty).options(name="behind", **options).bind()
    apps = {
        "one empty deployment": serve.deployment(_Empty).options(**options).bind(),
        "an empty deployment behind another": serve.deployment(_Front).options(**options).bind(behind),
    }
    prefixes = {name: f"/empty-{number}" for number, name in enumerate(apps)}
    for name, app in apps.items():
        serve.run(app, name=prefixes[name].strip("/"), route_prefix=prefixes[name])
    return prefixes
