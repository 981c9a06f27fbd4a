"""The place of an object: shared memory, or a file on disk that Ray fell back to."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from kit.seeding import seeded_rng

from cluster.keeper.object_store import (
    PROBE_BYTES,
    ObjectStore,
    _in_shared_memory,
    _is_mapped_for_writing,
    _make_pages,
    let_go,
)
from cluster.keeper.records import StoreFull

NBYTES = 2**16


@pytest.fixture(params=["/dev/shm", None], ids=["memory", "disk"])
def mapped(request: pytest.FixtureRequest) -> Iterator[tuple[bool, Any]]:
    """Bytes of a deleted file, as Ray maps them, and whether it is in memory."""
    with tempfile.TemporaryFile(dir=request.param) as file:
        file.truncate(NBYTES)
        # Unmapped with the last reference.
        yield request.param is not None, np.frombuffer(mmap.mmap(file.fileno(), NBYTES), np.uint8)


def test_the_mapping_of_an_object_tells_where_it_is(mapped: tuple[bool, Any]) -> None:
    expected, array = mapped
    assert _in_shared_memory(array) == expected
    assert _in_shared_memory(array[NBYTES - 1 :]) == expected


def test_memory_of_no_file_is_memory() -> None:
    assert _in_shared_memory(np.zeros(100, np.uint8))


@pytest.mark.parametrize(
    ("flags", "protection", "expected"),
    [
        (mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, True),
        (mmap.MAP_SHARED, mmap.PROT_READ, False),
        (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, False),
    ],
)
def test_a_mapping_tells_whether_others_see_what_is_written(flags: int, protection: int, expected: bool) -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(NBYTES)
        array = np.frombuffer(mmap.mmap(file.fileno(), NBYTES, flags=flags, prot=protection), np.uint8)
        assert _is_mapped_for_writing(array) == expected


class FakeRay:
    """Ray's store: puts end in memory, on disk, or with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_shared = True
        self.error: Exception | None = None
        self.free_bytes = 10**12
        self.is_writable = self.may_be_unfilled = True
        self.objects: list[Any] = []
        node = {"NodeID": "n", "Resources": {"object_store_memory": 1000.0}}
        monkeypatch.setattr("cluster.keeper.object_store.ray.nodes", lambda: [node])
        monkeypatch.setattr("cluster.keeper.object_store.ray.put", self.put)
        monkeypatch.setattr("cluster.keeper.object_store.ray.get", lambda ref: ref)
        monkeypatch.setattr("cluster.keeper.object_store.put_unfilled", self.put_unfilled)
        monkeypatch.setattr("cluster.keeper.object_store.is_unfilled_possible", lambda: self.may_be_unfilled)
        monkeypatch.setattr("cluster.keeper.object_store._in_shared_memory", lambda view: self.is_shared)
        monkeypatch.setattr("cluster.keeper.object_store._is_mapped_for_writing", lambda view: self.is_writable)
        monkeypatch.setattr(
            "cluster.keeper.object_store.os.statvfs",
            lambda path: SimpleNamespace(f_bavail=self.free_bytes, f_frsize=1),
        )

    def put_unfilled(self, nbytes: int) -> Any:
        return self.put(np.full(nbytes, 7, np.uint8))

    def put(self, array: Any) -> Any:
        if self.error:
            raise self.error
        made = array.copy()
        self.objects.append(weakref.ref(made))
        made = made[:]
        made.flags.writeable = False
        return made


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


DATA = np.arange(100, dtype=np.uint8)


def test_a_put_gives_reference_and_view(fake: FakeRay) -> None:
    store = ObjectStore("n", environ={})
    assert store.capacity_bytes == 1000
    assert ObjectStore("unknown", environ={}).capacity_bytes == 0
    ref, view = store.put(DATA, 0)
    assert (ref.tolist(), view.tolist()) == (DATA.tolist(), DATA.tolist())


def test_what_does_not_stay_in_memory_is_refused(fake: FakeRay) -> None:
    store = ObjectStore("n", environ={})
    fake.is_shared = False
    with pytest.raises(StoreFull, match=r"store of 1000 bytes has no room in memory for 100 bytes beside 700"):
        store.put(DATA, 700)
    fake.is_shared = True
    for full in (ray.exceptions.ObjectStoreFullError("full"), ray.exceptions.OutOfDiskError("no disk to spill to")):
        fake.error = full
        with pytest.raises(StoreFull, match=r"no room for 100 bytes: .*(full|no disk)"):
            store.put(DATA, 700)


def test_a_store_that_is_on_disk_by_configuration_is_used(fake: FakeRay) -> None:
    fake.is_shared = False
    assert ObjectStore("n", environ={}).put(DATA, 0)


def test_a_full_dev_shm_is_refused_before_it_is_touched(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore("n", environ={})
    store.put(DATA, 500)
    fake.free_bytes = 99
    with pytest.raises(StoreFull, match=r"/dev/shm is full: 100 bytes are needed, 99 are free"):
        store.put(DATA, 450)
    assert store.put(DATA, 400)  # pages that have been used before are there
    assert ObjectStore("n", environ={"RAY_preallocate_plasma_memory": "1"}).put(DATA, 900)
    monkeypatch.setattr("cluster.keeper.object_store._populate_store", lambda: 1000)
    store.populate()
    assert store.put(DATA, 900)


@pytest.mark.parametrize("nbytes", [0, 1, PROBE_BYTES - 1, PROBE_BYTES, PROBE_BYTES + 17])
@pytest.mark.parametrize(("is_writable", "may_be_unfilled"), [(True, True), (True, False), (False, True)])
def test_what_is_written_to_a_new_object_is_what_others_see(
    fake: FakeRay, nbytes: int, is_writable: bool, may_be_unfilled: bool
) -> None:
    fake.is_writable, fake.may_be_unfilled = is_writable, may_be_unfilled
    store = ObjectStore("n", environ={})
    data = seeded_rng().integers(0, 256, nbytes, np.uint8)
    created = store.create_object(nbytes, 0)
    created.out[:] = data
    ref, view = created.seal(0)
    assert np.array_equal(ref, data)
    assert np.array_equal(view, data)
    assert not view.flags.writeable
    assert store.writes_in_place == is_writable
    assert store.clears_objects != (is_writable and may_be_unfilled)
    # Once: a large one only as zeros or as it comes, and written over where it lies.
    in_place = is_writable and nbytes >= PROBE_BYTES
    assert created.reserved_bytes == (nbytes if in_place else 0)
    assert np.shares_memory(created.out, view) == (in_place and nbytes > 0)


def test_pages_of_a_new_object_are_made_before_somebody_writes_there(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write to a page that /dev/shm has not would end the process."""
    made: list[int] = []
    monkeypatch.setattr("cluster.keeper.object_store._make_pages", lambda view: made.append(view.nbytes))
    store = ObjectStore("n", environ={})
    store.create_object(PROBE_BYTES, 0)
    assert made == [PROBE_BYTES]
    store.put(DATA, 5 * PROBE_BYTES)  # so much has been written before
    store.create_object(PROBE_BYTES, 2 * PROBE_BYTES)
    assert made == [PROBE_BYTES]
    fake.may_be_unfilled = False
    ObjectStore("n", environ={}).create_object(PROBE_BYTES, 0)
    assert made == [PROBE_BYTES]


def test_shared_memory_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its file's end, as beyond what the file system has, there are no pages."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(2 * NBYTES)
        array = np.frombuffer(mmap.mmap(file.fileno(), 2 * NBYTES), np.uint8)
        _make_pages(array[5 : NBYTES + 5])
        assert NBYTES <= os.stat(file.fileno()).st_blocks * 512 < 2 * NBYTES
        file.truncate(NBYTES)
        with pytest.raises(StoreFull, match=rf"/dev/shm has no pages for {NBYTES + 10} bytes: "):
            _make_pages(array[NBYTES - 10 :])


def test_there_is_no_new_object_without_room(fake: FakeRay) -> None:
    store = ObjectStore("n", environ={})
    fake.error = ray.exceptions.ObjectStoreFullError("full")
    with pytest.raises(StoreFull, match=f"no room for {PROBE_BYTES} bytes"):
        store.create_object(PROBE_BYTES, 0)
    small = store.create_object(10, 0)
    with pytest.raises(StoreFull, match="no room for 10 bytes"):
        small.seal(0)


def test_what_is_put_at_the_end_looks_for_room_as_it_is_then(fake: FakeRay) -> None:
    store = ObjectStore("n", environ={})
    small = store.create_object(10, 0)
    store.put(DATA, 500)
    fake.free_bytes = 9
    with pytest.raises(StoreFull, match="10 bytes are needed, 9 are free"):
        small.seal(495)
    assert small.seal(490)


def test_the_memory_of_an_object_lives_as_long_as_somebody_may_write_to_it(fake: FakeRay) -> None:
    out = ObjectStore("n", environ={}).create_object(PROBE_BYTES, 0).out
    made = fake.objects[-1]
    assert made() is not None
    out[:] = 1
    del out
    assert made() is None


def test_an_error_does_not_keep_what_it_came_through() -> None:
    def inner(out: Any) -> None:
        try:
            raise OSError("read")
        except OSError as error:
            raise ValueError("corrupt") from error

    def fail() -> tuple[Exception, Any]:
        out = np.zeros(10, np.uint8)
        try:
            inner(out)
        except ValueError as error:
            return error, weakref.ref(out)
        raise AssertionError

    error, out = fail()
    assert out() is not None
    let_go(error)
    assert out() is None
