"""An object store that is full within the budget: of holes, and of what was given back and is not let go yet."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xxhash
from kit.waiting import wait_until
from unit.cluster.keeper.local_keeper import FakeStore

from cluster.keeper.actor import KeeperSettings, NodeKeeper
from cluster.keeper.object_store import NewObject
from cluster.keeper.records import StoreFull
from weights.records.errors import BudgetExceeded
from weights.records.manifest import ExtentRef

WAIT_S = 20.0
NBYTES = 100


class TightStore(FakeStore):
    """Objects have room as long as all that anybody refers to has so many bytes."""

    def __init__(self, memory_bytes: int) -> None:
        super().__init__()
        self.memory_bytes = memory_bytes
        self.num_refused = 0
        self._making = threading.Lock()
        self._alive: list[weakref.ref[Any]] = []

    def create_object(self, nbytes: int, used_bytes: int) -> NewObject:
        with self._making:
            self._alive = [one for one in self._alive if one() is not None]
            if NBYTES * len(self._alive) + nbytes > self.memory_bytes:
                self.num_refused += 1
                raise StoreFull("no room in memory")
            made = super().create_object(nbytes, used_bytes)
            self._alive.append(weakref.ref(made.out))
            return made


@pytest.fixture
def store() -> TightStore:
    return TightStore(3 * NBYTES)


@pytest.fixture
def extents(tmp_path: Path) -> dict[str, ExtentRef]:
    found = {}
    for number in range(20):
        data = random.randbytes(NBYTES)
        id_ = f"{number // 2}{'ab'[number % 2]}"  # two of each of ten models
        (tmp_path / id_).write_bytes(data)
        found[id_] = ExtentRef(id=id_, pack=id_, offset=0, nbytes=NBYTES, checksum=xxhash.xxh3_128_hexdigest(data))
    return found


@pytest.fixture
def keeper(tmp_path: Path, store: TightStore) -> Iterator[Callable[[float], NodeKeeper]]:
    made: list[NodeKeeper] = []

    def make(max_wait_s: float) -> NodeKeeper:
        settings = KeeperSettings(audit_bytes_per_s=0, max_wait_s=max_wait_s)
        made.append(NodeKeeper(str(tmp_path), 5 * NBYTES, "node", settings, store=store))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_request_waits_until_others_give_back_what_the_store_is_full_of(
    keeper: Callable[[float], NodeKeeper], extents: dict[str, ExtentRef], store: TightStore
) -> None:
    node = keeper(WAIT_S)
    node.acquire([extents["0a"], extents["0b"]], "v")
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(node.acquire, [extents["1a"], extents["1b"]], "w")
        wait_until(lambda: store.num_refused > 1)
        assert not later.done()
        node.release(["0a", "0b"], "v")
        assert later.result(WAIT_S).refs.keys() == {"1a", "1b"}
    assert node.stats().holders == {"w": 2 * NBYTES}


def test_it_waits_for_objects_that_nobody_has_a_lease_on_and_somebody_still_maps(
    keeper: Callable[[float], NodeKeeper], extents: dict[str, ExtentRef], store: TightStore
) -> None:
    node = keeper(WAIT_S)
    mapped = node.acquire([extents["0a"], extents["0b"]], "v").refs
    node.release(["0a", "0b"], "v")
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(node.acquire, [extents["1a"], extents["1b"]], "w")
        wait_until(lambda: store.num_refused > 1)
        assert not later.done()
        mapped.clear()
        assert later.result(WAIT_S).refs.keys() == {"1a", "1b"}


def test_what_never_has_room_is_refused_in_time_and_says_who_has_it(
    keeper: Callable[[float], NodeKeeper], extents: dict[str, ExtentRef]
) -> None:
    node = keeper(0.3)
    node.acquire([extents["0a"], extents["0b"]], "v")
    since_s = time.monotonic()
    with pytest.raises(BudgetExceeded, match=r"no room in memory \(leased by: .*v \(200 bytes\)"):
        node.acquire([extents["1a"], extents["1b"]], "w")
    assert time.monotonic() - since_s >= 0.3
    assert node.stats().holders == {"v": 2 * NBYTES}
    node.release(["0a", "0b"], "v")
    assert node.acquire([extents["1a"], extents["1b"]], "w").refs  # nobody holds the turn to try again


def test_six_clients_and_ten_models_all_have_their_turn(
    keeper: Callable[[float], NodeKeeper], extents: dict[str, ExtentRef], store: TightStore
) -> None:
    """The budget lets two models in at once, the store one and a half."""
    node = keeper(WAIT_S)

    def ask(client: int) -> int:
        draw, answered = random.Random(client), 0
        for _ in range(8):
            model = draw.randrange(10)
            wanted = [extents[f"{model}a"], extents[f"{model}b"]]
            refs = node.acquire(wanted, f"client-{client}").refs
            answered += len(refs) == 2
            del refs
            node.release([one.id for one in wanted], f"client-{client}")
        return answered

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == [8] * 6
    assert store.num_refused
