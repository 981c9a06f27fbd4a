"""The shared encodings on a real Ray: several processes, one of which is killed, and an actor that is killed."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import ray
import torch
from integration.harness import Cluster

from cluster.actor_names import NAMESPACE, encodings_name
from cluster.encodings.actor import connect_shared_encodings
from cluster.encodings.ledger import CLAIM_S
from cluster.encodings.ray_tier import ANSWER_TIMEOUT_S, RaySharedTier
from cluster.encodings.records import SharedStats
from deployments.text.cache import EncodingCache, EncodingKey

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import tests

LARGE = 2**20  # float32: 4 MiB, which go through Ray's object store
SMALL = 256


class Replica:
    """A text encoder's half that matters here. What it encodes is `size` numbers, all of them the first token."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._computed = 0
        self._tier = RaySharedTier(lambda: connect_shared_encodings(name, 64 * 2**20))
        self.cache = EncodingCache(64 * 2**20, self._tier)

    async def encode(
        self, token: int, size: int, times: int = 1, pause_s: float = 0.0
    ) -> tuple[list[str], list[float]]:
        """Return where each of `times` callers at once had it from, and the values that they saw."""

        async def compute_many(keys: Sequence[EncodingKey]) -> list[dict[str, torch.Tensor]]:
            self._computed += len(keys)
            await asyncio.sleep(pause_s)
            return [{"hidden": torch.full((size,), float(token))} for _ in keys]

        key = EncodingKey("m", "float32", "none", (token, size))
        answers = await asyncio.gather(*(self.cache.get_all([key], compute_many) for _ in range(times)))
        found = [answer[key] for answer in answers]
        seen = {id(one.encoding): one.encoding["hidden"] for one in found}  # to look at 1,000 times 4 MiB takes long
        values = torch.cat([torch.stack([hidden.min(), hidden.max()]) for hidden in seen.values()]).unique()
        return [one.source for one in found], values.tolist()

    async def forget_all(self) -> None:
        self.cache.forget_all()

    async def num_computed(self) -> int:
        return self._computed

    async def num_shared_errors(self) -> int:
        return self.cache.cache_stats().shared_errors

    async def shared_stats(self) -> SharedStats:
        return await self._tier.stats()


@pytest.fixture(scope="module")
def shared(cluster: Cluster) -> Iterator[str]:
    """The name of a cluster that has nothing but shared encodings."""
    name = f"encodings-test-{uuid.uuid4().hex[:8]}"
    yield name
    ray.kill(ray.get_actor(encodings_name(name), namespace=NAMESPACE))


@pytest.fixture(scope="module")
def replicas(shared: str) -> Iterator[list[Any]]:
    started = [ray.remote(Replica).options(num_cpus=0).remote(shared) for _ in range(3)]
    yield started
    for replica in started:
        ray.kill(replica)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_thousand_identical_prompts_over_three_processes_are_encoded_once(replicas: list[Any], size: int) -> None:
    before = sum(ray.get([replica.num_computed.remote() for replica in replicas]))
    token = size + 1
    answers = ray.get([replica.encode.remote(token, size, 334, 0.2) for replica in replicas], timeout=60)
    assert sum(ray.get([replica.num_computed.remote() for replica in replicas])) == before + 1
    assert sum(ray.get([replica.num_shared_errors.remote() for replica in replicas])) == 0
    sources = [source for found, _ in answers for source in found]
    assert (sources.count("computed"), sources.count("shared"), sources.count("joined")) == (1, 2, 999)
    assert all(values == [token] for _, values in answers)


def test_what_a_killed_replica_was_computing_is_the_next_ones(replicas: list[Any]) -> None:
    """It is computed once more, soon; and what it had published is there still."""
    victim, *others = replicas
    replicas.remove(victim)
    assert ray.get(victim.encode.remote(7, LARGE), timeout=60) == (["computed"], [7.0])
    wait_for_stats(others[0], lambda stats: stats.in_flight == 0)
    lost = victim.encode.remote(8, SMALL, 1, 600.0)
    before = wait_for_stats(others[0], lambda stats: stats.in_flight == 1)
    waiting = [replica.encode.remote(8, SMALL, 5, 0.1) for replica in others]
    wait_for_stats(others[0], lambda stats: stats.waiting == len(others))
    start_s = time.monotonic()
    ray.kill(victim)
    answers = ray.get(waiting, timeout=30)
    assert time.monotonic() - start_s < CLAIM_S + 5
    assert sorted(found[0] for found, _ in answers) == ["computed", "shared"]
    assert all(values == [8.0] for _, values in answers)
    assert wait_for_stats(others[0], lambda stats: stats.in_flight == 0).lost_claims == before.lost_claims + 1
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(lost, timeout=10)
    assert ray.get([replica.encode.remote(7, LARGE) for replica in others], timeout=30) == [(["shared"], [7.0])] * 2


def wait_for_stats(replica: Any, condition: Callable[[SharedStats], bool]) -> SharedStats:
    deadline_s = time.monotonic() + 20
    while not condition(stats := ray.get(replica.shared_stats.remote(), timeout=10)):
        assert time.monotonic() < deadline_s, stats
    return stats


def test_when_one_replica_finds_damaged_weights_no_other_uses_its_copies(replicas: list[Any]) -> None:
    damaged, other = replicas[:2]
    assert ray.get(damaged.encode.remote(9, SMALL), timeout=30) == (["computed"], [9.0])
    wait_for_stats(damaged, lambda stats: stats.in_flight == 0)
    for source in ("shared", "local"):
        assert ray.get(other.encode.remote(9, SMALL), timeout=30) == ([source], [9.0])
    ray.get(damaged.forget_all.remote(), timeout=10)
    deadline_s = time.monotonic() + 10
    while (found := ray.get(other.encode.remote(9, SMALL), timeout=30)[0]) == ["local"]:
        assert time.monotonic() < deadline_s
    assert found == ["computed"]


def test_when_the_actor_is_killed_replicas_compute_and_it_comes_back_empty(replicas: list[Any], shared: str) -> None:
    ray.get(replicas[0].encode.remote(11, SMALL), timeout=30)
    wait_for_stats(replicas[0], lambda stats: stats.in_flight == 0)  # else the actor may hear of it when it is back
    actor = ray.get_actor(encodings_name(shared), namespace=NAMESPACE)
    ray.kill(actor, no_restart=False)
    start_s = time.monotonic()
    found = ray.get(replicas[1].encode.remote(11, SMALL), timeout=30)
    assert found == (["computed"], [11.0])  # nobody else has it any more, or nobody can be asked
    assert time.monotonic() - start_s < ANSWER_TIMEOUT_S + 3
    assert ray.get(actor.stats.remote(), timeout=30).hits == 0
