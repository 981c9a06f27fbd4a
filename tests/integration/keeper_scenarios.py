"""Scenarios of keepers on a real Ray of their own: run as a script, prints one JSON object of observations.

A process of its own, because a process can only be connected to one Ray.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
import xxhash
from kit.seeding import seeded_random, seeded_rng
from kit.waiting import wait_until
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.keeper.actor import KeeperSettings, keeper_class
from cluster.keeper.ray_extents import ExtentUser, RayExtents
from cluster.peers.protocol import Located, Question, ResidencyReport
from cluster.registry.extent_locations import ResidencyMap
from weights.records.errors import BudgetExceeded
from weights.records.manifest import ExtentRef

MIB = 2**20
EXTENT_BYTES = 8 * MIB
STORE_BYTES = 384 * MIB
BUDGET_BYTES = 256 * MIB
NAMESPACE = "keepers"
# These need the object store, the cluster or the machine for themselves.
ALONE = ("store_is_full", "two_nodes", "kept_models_take_turns")
PARTS = ("__init__", "model", "keeper", "replica")
WAIT_S = 20.0


class Registry:
    """The registry's part of it: a secret, who has or reads what, and a node that reads for those that cannot."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._reader: Any = None
        self._residency = ResidencyMap(time.monotonic, seeded_random())

    def peer_secret(self) -> bytes:
        return self._secret

    def report_residency(self, node_id: str, report: ResidencyReport) -> None:
        self._residency.report_residency(node_id, report)

    def locate(self, node_id: str, question: Question, load: int = 0) -> Located:
        found = self._residency.locate(node_id, question, load)
        known = found.offers.keys() | found.reading.keys()
        if left := [extent for extent in question.unreadable if extent.id not in known]:
            self._reader.prefetch.remote(left)
        return found

    def read_by(self, keeper: Any) -> None:
        self._reader = keeper


class Replica(ExtentUser):
    """Holds weights as a worker does, and looks at every byte of them."""

    def __init__(self, keeper: Any, holder: str, keeps: bool = False) -> None:
        self.keeps = keeps
        self._damaged: list[str] = []
        self._extents = RayExtents(keeper, holder, self)
        self._views: Mapping[str, Any] = {}

    def note_damage(self, extents: Sequence[str]) -> None:
        self._damaged.extend(extents)

    def fetch(self, extents: Sequence[ExtentRef]) -> bool:
        self._views = self._extents.fetch(extents)
        return _sound(extents, self._views)

    def check(self, extents: Sequence[ExtentRef]) -> bool:
        return _sound(extents, self._views)

    def release(self, extents: Sequence[ExtentRef]) -> None:
        self._views = {}
        self._extents.release(extents)

    def work(self, models: Sequence[Sequence[ExtentRef]], seconds: float) -> list[str]:
        """Fetch, look and give back, one model after the other. What went wrong."""
        wrong, end_s = [], time.monotonic() + seconds
        while time.monotonic() < end_s:
            for extents in models:
                try:
                    if not _sound(extents, self._extents.fetch(extents)):
                        wrong.append("other bytes")
                    self._extents.release(extents)
                except Exception as error:
                    wrong.append(repr(error))
        return wrong

    def switch(self, models: Sequence[Sequence[ExtentRef]], number: int) -> dict[str, Any]:
        """Use one model after the other, so many times each; how long the longest fetch took."""
        longest_s, wrong = 0.0, []
        for _ in range(number):
            for extents in models:
                start_s = time.monotonic()
                views = self._extents.fetch(extents)
                longest_s = max(longest_s, time.monotonic() - start_s)
                if not _sound(extents, views):
                    wrong.append("other bytes")
                del views
                self._extents.release(extents)
        return {"longest_s": longest_s, "wrong": wrong}

    def write(self, id_: str) -> None:
        """Do what must never happen: an in-place operation on a shared weight."""
        ctypes.memset(self._views[id_].ctypes.data + EXTENT_BYTES // 2, 1, 1)

    def damaged(self) -> list[str]:
        """Return the extents that it was told of."""
        return self._damaged

    def sources(self) -> dict[str, int] | None:
        report = self._extents.last_report
        return report.sources if report else None


def _sound(extents: Sequence[ExtentRef], views: Mapping[str, Any]) -> bool:
    return all(xxhash.xxh3_128_hexdigest(views[extent.id]) == extent.checksum for extent in extents)


class Scenarios:
    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.head: str = ray.get_runtime_context().get_node_id()

    def model(self, name: str, num_extents: int, nbytes: int = EXTENT_BYTES) -> list[ExtentRef]:
        extents = []
        for number in range(num_extents):
            data = seeded_rng().integers(0, 256, nbytes, np.uint8)
            (self.folder / f"{name}{number}").write_bytes(data)
            checksum = xxhash.xxh3_128_hexdigest(data)
            extents.append(
                ExtentRef(id=f"{name}{number}", pack=f"{name}{number}", offset=0, nbytes=nbytes, checksum=checksum)
            )
        return extents

    def keeper(self, node: str = "", budget_bytes: int = BUDGET_BYTES, **options: Any) -> Any:
        place = NodeAffinitySchedulingStrategy(node or self.head, soft=False)
        actor = keeper_class().options(scheduling_strategy=place)
        registry, packs = options.pop("registry", None), options.pop("packs", self.folder)
        settings = KeeperSettings(**options)
        return actor.remote(str(packs), budget_bytes, node or self.head, settings, registry=registry)

    def replica(self, keeper: Any, holder: str, node: str = "", **settings: Any) -> Any:
        place = NodeAffinitySchedulingStrategy(node or self.head, soft=False)
        options = {"num_cpus": 0, "max_concurrency": 16, "scheduling_strategy": place}
        return ray.remote(Replica).options(**options).remote(keeper, holder, **settings)

    def one_read_for_many(self) -> dict[str, Any]:
        extents, keeper = self.model("many", 4), self.keeper()
        replicas = [self.replica(keeper, f"r{number}") for number in range(4)]
        sound = ray.get([replicas[number % 4].fetch.remote(extents) for number in range(64)])
        stats = stats_of(keeper)
        end(keeper, *replicas)
        return {"sound": all(sound), "read_bytes": stats.read_bytes, "model_bytes": _bytes(extents)}

    def keeper_killed_idle(self) -> dict[str, Any]:
        extents, keeper = self.model("idle", 4), self.keeper()
        replica = self.replica(keeper, "old")
        ray.get(replica.fetch.remote(extents))
        start_s = time.monotonic()
        kill(keeper)
        sound = ray.get(replica.check.remote(extents))
        wait_until(lambda: stats_of(keeper).adopted_bytes == _bytes(extents))
        adopted_s = time.monotonic() - start_s
        late = self.replica(keeper, "late")
        late_sound = ray.get(late.fetch.remote(extents))
        holders = stats_of(keeper).holders
        # The replica that kept them goes too: now the new keeper alone holds them, whose owner is long dead.
        os.kill(pid_of(replica), signal.SIGKILL)
        wait_until(lambda: "old" not in stats_of(keeper).holders)
        last = self.replica(keeper, "last")
        last_sound = ray.get(last.fetch.remote(extents))
        stats = stats_of(keeper)
        end(keeper, late, last)
        return {
            "sound": [sound, late_sound, last_sound],
            "read_bytes": stats.read_bytes,
            "adopted_s": adopted_s,
            "holders": sorted(holders),
            "leased": stats.leased_bytes == _bytes(extents),
        }

    def keeper_killed_under_load(self) -> dict[str, Any]:
        models = [self.model(name, 3) for name in ("x", "y")]
        keeper = self.keeper()
        replicas = [self.replica(keeper, f"r{number}") for number in range(2)]
        working = [replica.work.remote(models, 5.0) for replica in replicas for _ in range(2)]
        generations = set()
        for _ in range(2):
            time.sleep(1.0)  # into the middle of the work, wherever that is
            generations.add(stats_of(keeper).generation)
            kill(keeper)
        wrong = [what for found in ray.get(working) for what in found]
        wait_until(lambda: stats_of(keeper).leased_bytes == 0)
        generations.add(stats_of(keeper).generation)
        end(keeper, *replicas)
        return {"wrong": wrong, "lives": len(generations)}

    def holder_dies(self) -> dict[str, Any]:
        extents, keeper = self.model("dies", 2), self.keeper()
        replica, other = self.replica(keeper, "dies"), self.replica(keeper, "lives")
        ray.get([replica.fetch.remote(extents), other.fetch.remote(extents[:1])])
        os.kill(pid_of(replica), signal.SIGKILL)
        start_s = time.monotonic()
        wait_until(lambda: list(stats_of(keeper).holders) == ["lives"])
        freed_s = time.monotonic() - start_s
        end(keeper, other)
        return {"freed_s": freed_s}

    def budget_changes(self) -> dict[str, Any]:
        extents, keeper = self.model("budget", 4), self.keeper()
        replica = self.replica(keeper, "r")
        ray.get(replica.fetch.remote(extents))
        ray.get(keeper.set_budget.remote(2 * EXTENT_BYTES))
        leased = stats_of(keeper).resident_bytes
        ray.get(replica.release.remote(extents))
        wait_until(lambda: stats_of(keeper).resident_bytes == 2 * EXTENT_BYTES)
        try:
            ray.get(keeper.set_budget.remote(STORE_BYTES))
            refusal = ""
        except BudgetExceeded as error:
            refusal = str(error.cause)
        end(keeper, replica)
        return {"leased": leased, "refusal": refusal}

    def models_take_turns(self) -> dict[str, Any]:
        """Each fits, both do not, and both are wanted all the time."""
        models = [self.model(name, 3) for name in ("left", "right")]
        keeper = self.keeper(budget_bytes=4 * EXTENT_BYTES)
        turns = [0, 0]
        replicas = [self.replica(keeper, f"r{number}") for number in range(2)]

        def alternate(which: int) -> None:
            for _ in range(10):
                assert ray.get(replicas[which].fetch.remote(models[which]), timeout=WAIT_S)
                ray.get(replicas[which].release.remote(models[which]))
                turns[which] += 1

        start_s = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(alternate, range(2)))
        seconds = time.monotonic() - start_s
        end(keeper, *replicas)
        return {"turns": turns, "seconds": seconds}

    def kept_models_take_turns(self) -> dict[str, Any]:
        """Two replicas keep what they leave; the node has room for one and a bit of three models that they want."""
        models = [self.model(name, 3) for name in ("kept-a", "kept-b", "kept-c")]
        budget_bytes = 4 * EXTENT_BYTES
        keeper = self.keeper(budget_bytes=budget_bytes)
        replicas = [self.replica(keeper, f"r{number}", keeps=True) for number in range(2)]
        working = [
            replica.switch.remote(models[number:] + models[:number], 12) for number, replica in enumerate(replicas)
        ]
        most_bytes, waiting = 0, working
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.01)
            most_bytes = max(most_bytes, stats_of(keeper).resident_bytes)
        found = [ray.get(done) for done in working]
        again_ms = [ray.get(replicas[0].switch.remote(models[:1], 1))["longest_s"] * 1e3 for _ in range(2)][-1]
        kill(keeper)
        wait_until(lambda: stats_of(keeper).callable_bytes >= len(models[0]) * EXTENT_BYTES)
        after = ray.get(replicas[1].switch.remote(models[1:], 2))
        stats = stats_of(keeper)
        end(keeper, *replicas)
        return {
            "wrong": [what for one in (*found, after) for what in one["wrong"]],
            "longest_s": max(one["longest_s"] for one in found),
            "after_kill_s": after["longest_s"],
            "over_bytes": max(most_bytes, stats.resident_bytes) - budget_bytes,
            "again_ms": again_ms,
            "num_recalled": stats.num_recalled,
        }

    def shared_weight_is_written(self) -> dict[str, Any]:
        extents, keeper = self.model("written", 2), self.keeper(audit_bytes_per_s=2**30)
        replica, other = self.replica(keeper, "writes"), self.replica(keeper, "reads")
        third = self.replica(keeper, "has nothing of it")
        ray.get([replica.fetch.remote(extents), other.fetch.remote(extents), third.fetch.remote(extents[:1])])
        ray.get(replica.write.remote("written1"))
        seen = ray.get(other.check.remote(extents))
        wait_until(lambda: all(ray.get([replica.damaged.remote(), other.damaged.remote()])))
        again = ray.get(other.fetch.remote(extents))
        stats = stats_of(keeper)
        told = ray.get([found.damaged.remote() for found in (replica, other, third)])
        end(keeper, replica, other, third)
        return {"before": seen, "again": again, "corrupt": stats.corrupt, "read_bytes": stats.read_bytes, "told": told}

    def store_is_full(self) -> dict[str, Any]:
        """Somebody else's objects are in the way: Ray would fall back to disk."""
        extents, keeper = self.model("full", 2, 64 * MIB), self.keeper()
        replica = self.replica(keeper, "r")
        others = [ray.put(np.zeros(64 * MIB, np.uint8)) for _ in range(5)]
        views = ray.get(others)
        try:
            ray.get(replica.fetch.remote(extents))
            refusal = ""
        except BudgetExceeded as error:
            refusal = str(error.cause)
        leased = stats_of(keeper).leased_bytes
        del views, others
        sound = bool(wait_until(lambda: fits(replica, extents)))
        end(keeper, replica)
        return {"refusal": refusal, "leased": leased, "sound": sound}

    def extent_larger_than_staging(self) -> dict[str, Any]:
        """Cold, so that it is read past the page cache, through a sixteenth of its size."""
        extents, keeper = self.model("giant", 1, 32 * MIB), self.keeper(staging_bytes=2 * MIB)
        with (self.folder / extents[0].pack).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        replica = self.replica(keeper, "r")
        sound = ray.get(replica.fetch.remote(extents))
        stats = stats_of(keeper)
        in_place = ray.get(keeper.__ray_call__.remote(lambda actor: actor.memory.store.writes_in_place))
        clears = ray.get(keeper.__ray_call__.remote(lambda actor: actor.memory.store.clears_objects))
        end(keeper, replica)
        return {
            "sound": sound,
            "staging_bytes": stats.staging_bytes,
            "copied_bytes": stats.stages["copy"].nbytes,
            "in_place": in_place,
            "clears": clears,
        }

    def two_nodes(self) -> dict[str, Any]:
        """The second gets it from the first; and what both want at the same moment is read by one."""
        registry = ray.remote(Registry).options(name="registry", namespace=NAMESPACE, num_cpus=0).remote()
        second = self.cluster.add_node(num_cpus=1, object_store_memory=128 * MIB).node_id
        nodes = [self.head, second]
        keepers = [self.keeper(node, 64 * MIB, registry=("registry", NAMESPACE)) for node in nodes]
        replicas = [self.replica(keeper, "r", node) for keeper, node in zip(keepers, nodes, strict=True)]
        wait_until(lambda: all(stats_of(keeper).address for keeper in keepers))
        both, warm, alone = self.model("both", 3), self.model("warm", 3), self.model("alone", 1)
        sound = ray.get([replica.fetch.remote(both) for replica in replicas])
        reads = [stats_of(keeper).read_bytes for keeper in keepers]
        reader, other = (0, 1) if reads[0] else (1, 0)
        sound.append(ray.get(replicas[reader].fetch.remote(warm)))
        question = Question(tuple(extent.id for extent in warm), 0)
        wait_until(lambda: len(ray.get(registry.locate.remote(nodes[other], question)).offers) == 3)
        sound.append(ray.get(replicas[other].fetch.remote(warm)))
        sources = ray.get(replicas[other].sources.remote())
        stats = [stats_of(keepers[which]) for which in (reader, other)]
        ray.get(registry.read_by.remote(keepers[0]))
        without = self.keeper(second, 64 * MIB, registry=("registry", NAMESPACE), packs=self.folder / "not here")
        bare, far = self.replica(without, "bare", second), self.model("far", 2)
        sound.append(ray.get(bare.fetch.remote(far), timeout=WAIT_S))
        bare_sources, bare_stats = ray.get(bare.sources.remote()), stats_of(without)
        end(without, bare)
        ray.kill(registry)
        sound.append(ray.get(replicas[other].fetch.remote(alone)))
        end(*keepers, *replicas)
        return {
            "sound": sound,
            "model_bytes": _bytes(warm),
            "sources": sources,
            "without_storage": (bare_stats.has_storage, bare_stats.read_bytes, bare_sources),
            "read": [found.read_bytes for found in stats],
            "peer": [found.peer_bytes for found in stats],
            "served": [found.served_bytes for found in stats],
        }


def stats_of(keeper: Any) -> Any:
    """Ask a keeper that may just be dying."""
    while True:
        try:
            return ray.get(keeper.stats.remote(), timeout=WAIT_S)
        except ray.exceptions.RayActorError:
            time.sleep(0.05)


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def kill(keeper: Any) -> None:
    """kill -9, and until the process that follows it answers."""
    generation = stats_of(keeper).generation
    os.kill(pid_of(keeper), signal.SIGKILL)
    wait_until(lambda: stats_of(keeper).generation != generation)


def fits(replica: Any, extents: Sequence[ExtentRef]) -> bool:
    try:
        return ray.get(replica.fetch.remote(extents))
    except BudgetExceeded:
        return False


def end(*actors: Any) -> None:
    for actor in actors:
        ray.kill(actor)


def _bytes(extents: Sequence[ExtentRef]) -> int:
    return sum(extent.nbytes for extent in extents)


NAMES = [name for name, member in vars(Scenarios).items() if callable(member) and name not in PARTS]


def main(folder: Path, names: Sequence[str]) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE_BYTES})
    ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    observed: dict[str, Any] = {}
    scenarios = Scenarios(folder, cluster)

    def run(name: str) -> None:
        try:
            observed[name] = getattr(scenarios, name)()
        except Exception as error:
            observed[name] = {"error": repr(error)}

    try:
        chosen = names or NAMES
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(run, [name for name in chosen if name not in ALONE]))
        for name in chosen:
            if name in ALONE:
                run(name)
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(observed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
