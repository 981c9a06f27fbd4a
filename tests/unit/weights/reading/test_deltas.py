"""Extents that are read from their deltas: with the base from memory or disk, and what happens when a piece is bad."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from unit.weights.comparing import flip

from weights.memory.host_pool import ByteArray, HostBufferPool, allocate_pages
from weights.operations.compaction import compact
from weights.operations.externalize import externalize
from weights.reading.delta_extents import ASSUMED_DECODE_BYTES_PER_S, Resident, prefers_delta
from weights.reading.extents import ExtentReader, read_extent
from weights.reading.measured_rate import MIN_MEASURED_BYTES, MeasuredRate
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock
from weights.reading.strategy import ReadStrategy
from weights.records.errors import ExtentCorrupt
from weights.records.manifest import ExtentRef, Manifest
from weights.storage.store import WeightStore

DIRECT = ReadStrategy(direct=True, num_threads=2, block_bytes=2**20)
BUFFERED = ReadStrategy(direct=False, num_threads=2, block_bytes=64 * 1024)


def add_siblings(store: WeightStore, write_model) -> tuple[Manifest, Manifest]:
    base = {f"w{i}": torch.randn(300, 700).to(torch.bfloat16) for i in range(4)}
    tuned = {name: (w.float() * (1 + 1e-2 * torch.randn(300, 700))).to(torch.bfloat16) for name, w in base.items()}
    return (
        externalize(store, "base", write_model("base", base)),
        externalize(store, "tuned", write_model("tuned", tuned)),
    )


@pytest.fixture
def plain(store: WeightStore, write_model) -> dict[str, bytes]:
    """Bytes of the extents of "tuned" by id, which is compacted then, its plain bytes kept."""
    _, tuned = add_siblings(store, write_model)
    data = {id_: read_extent(store.packs, extent).tobytes() for id_, extent in tuned.extents.items()}
    assert len(compact(store, keep_plain=True).models) == 1
    return data


def only_delta(store: WeightStore) -> ExtentRef:
    (extent,) = store.manifest("tuned").extents.values()
    assert extent.delta
    assert extent.has_plain
    return list(extent.forms())[1]


def reader(store: WeightStore, strategy: ReadStrategy = BUFFERED, resident: Resident = lambda _: None) -> ExtentReader:
    return ExtentReader(store.packs, HostBufferPool(2**22), ReadPlanner(override=strategy), resident=resident)


@pytest.mark.parametrize("strategy", [DIRECT, BUFFERED])
def test_the_base_from_disk_or_from_memory(
    store: WeightStore, plain: dict[str, bytes], strategy: ReadStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.reading.plain_extents.MIN_DIRECT_BYTES", 0)
    extent = only_delta(store)
    (base,) = extent.delta.bases if extent.delta else ()
    from_disk, from_memory = StageClock(), StageClock()
    assert reader(store, strategy).read(extent, from_disk).tobytes() == plain[extent.id]
    base_bytes = read_extent(store.packs, base)
    place = allocate_pages(extent.nbytes)
    reader(store, strategy, lambda ref: {base.id: base_bytes}[ref.id]).read_into(extent, lambda: place, from_memory)
    assert place.tobytes() == plain[extent.id]
    figures = from_memory.figures()
    assert figures["read"].nbytes == extent.delta.nbytes < 0.9 * extent.nbytes
    assert figures["decode"].nbytes == extent.nbytes


def test_a_base_that_is_damaged_in_memory_is_read_from_disk(store: WeightStore, plain: dict[str, bytes]) -> None:
    extent = only_delta(store)
    assert extent.delta
    wrong = read_extent(store.packs, extent.delta.bases[0])
    wrong[1000] ^= 4
    places = []

    def place() -> ByteArray:
        places.append(allocate_pages(extent.nbytes))
        return places[-1]

    for view in (wrong, wrong[:100]):  # other bytes; another size, which is not even tried
        reader(store, resident=lambda _, view=view: view).read_into(extent, place, StageClock())
        assert places.pop().tobytes() == plain[extent.id]
    assert places == []  # asked once each


def test_a_damaged_delta_names_its_file_and_the_plain_bytes_serve_meanwhile(
    store: WeightStore, plain: dict[str, bytes]
) -> None:
    extent = only_delta(store)
    flip(store.packs / extent.pack, extent.offset + 30_000)
    with pytest.raises(ExtentCorrupt, match=rf"{extent.pack}: bytes .*\(delta of extent {extent.id}\)") as caught:
        reader(store).read(extent, StageClock())
    assert caught.value.extent_id == extent.id
    stored = store.manifest("tuned").extents[extent.id]
    slow = reader(store)
    slow._plain.rate.add(MIN_MEASURED_BYTES, 60.0)  # so slow a medium that the delta is tried first
    slow._deltas._resident = lambda base: read_extent(store.packs, base)
    assert slow._deltas.prefers(stored)
    assert slow.read(stored, StageClock()).tobytes() == plain[extent.id]
    flip(store.packs / stored.pack, stored.offset)
    with pytest.raises(ExtentCorrupt, match=rf"{stored.pack}: bytes|delta of extent"):
        slow.read(stored, StageClock())


def test_damaged_plain_bytes_are_made_from_the_delta(store: WeightStore, plain: dict[str, bytes]) -> None:
    (stored,) = store.manifest("tuned").extents.values()
    flip(store.packs / stored.pack, stored.offset + 5)
    assert reader(store).read(stored, StageClock()).tobytes() == plain[stored.id]


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
def test_a_damaged_base_is_named(store: WeightStore, plain: dict[str, bytes], damage: str) -> None:
    extent = only_delta(store)
    assert extent.delta
    pack = store.packs / extent.delta.bases[0].pack
    match damage:
        case "flipped":
            flip(pack, 20_000)
        case "short":
            with pack.open("r+b") as file:
                file.truncate(100_000)
        case _:
            pack.unlink()
    with pytest.raises(ExtentCorrupt, match=str(pack)):
        reader(store).read(extent, StageClock())


def test_a_delta_that_is_cut_short_is_named(store: WeightStore, plain: dict[str, bytes]) -> None:
    extent = only_delta(store)
    with (store.packs / extent.pack).open("r+b") as file:
        file.truncate(50_000)
    with pytest.raises(ExtentCorrupt, match=rf"{extent.pack}: ends at byte 50000"):
        reader(store).read(extent, StageClock())


def test_another_delta_in_its_place_is_refused(store: WeightStore, plain: dict[str, bytes], tmp_path: Path) -> None:
    extent = only_delta(store)
    shutil.copy(store.packs / store.manifest("base").extents.popitem()[1].pack, store.packs / extent.pack)
    with pytest.raises(ExtentCorrupt, match=r"are damaged: it begins with"):
        reader(store).read(extent, StageClock())


def test_what_is_not_verified_is_decoded_all_the_same(store: WeightStore, plain: dict[str, bytes]) -> None:
    extent = only_delta(store)
    hasty = ExtentReader(store.packs, None, ReadPlanner(override=BUFFERED), verify=False)
    assert np.array_equal(hasty.read(extent, StageClock()), np.frombuffer(plain[extent.id], np.uint8))


def test_a_delta_that_is_sent_is_decoded_with_resident_bases(store: WeightStore, plain: dict[str, bytes]) -> None:
    extent = only_delta(store)
    assert extent.delta
    sent = read_extent(store.packs, extent.delta.stored(extent.delta.key))
    base = read_extent(store.packs, extent.delta.bases[0])
    place, stages = np.zeros(extent.nbytes, np.uint8), StageClock()
    here = reader(store, resident=lambda _: base)

    def fetch(out: ByteArray, data: ByteArray = sent) -> None:
        out[:] = data

    shutil.rmtree(store.packs)  # nothing of it is read
    here.from_delta(extent, fetch, lambda: place, stages)
    assert place.tobytes() == plain[extent.id]
    assert stages.figures()["decode"].nbytes == extent.nbytes
    for damaged in (np.zeros_like(sent), np.concatenate([sent[:-50], sent[:50]])):
        with pytest.raises(ExtentCorrupt, match=f"delta of extent {extent.id}"):
            here.from_delta(extent, lambda out, data=damaged: fetch(out, data), lambda: place, StageClock())
    with pytest.raises(ExtentCorrupt, match="is not in memory any more"):
        reader(store).from_delta(extent, fetch, lambda: place, StageClock())
    other = np.where(np.arange(base.nbytes) == 500, base ^ 1, base)
    with pytest.raises(ExtentCorrupt, match=f"delta of extent {extent.id} gives checksum"):
        reader(store, resident=lambda _: other).from_delta(extent, fetch, lambda: place, StageClock())


@pytest.mark.parametrize(
    ("is_resident", "pool_bytes", "bytes_per_s", "expected"),
    [
        (True, 2**22, 1e7, True),
        (True, 2**22, 1e12, False),
        (True, 2**22, None, False),
        (False, 2**22, 1e7, False),
        (True, 2**16, 1e7, False),
    ],
)
def test_a_delta_is_asked_for_over_a_slow_link_when_it_can_be_decoded_from_memory(
    store: WeightStore,
    plain: dict[str, bytes],
    is_resident: bool,
    pool_bytes: int,
    bytes_per_s: float | None,
    expected: bool,
) -> None:
    extent = only_delta(store)
    assert extent.delta
    base = read_extent(store.packs, extent.delta.bases[0])
    here = ExtentReader(
        store.packs,
        HostBufferPool(pool_bytes),
        ReadPlanner(override=BUFFERED),
        resident=lambda _: base if is_resident else None,
    )
    assert here.prefers_sent_delta(extent, bytes_per_s) == expected
    assert not here.prefers_sent_delta(extent.delta.bases[0], bytes_per_s)


MIB = 2**20


@pytest.mark.parametrize(
    ("plain_gbps", "decode_gbps", "is_resident", "expected"),
    [
        (0.1, 1.0, True, True),  # 6.5 + 1 against 10
        (0.3, 1.0, True, True),
        (0.4, 1.0, True, False),
        (0.4, 2.0, True, True),
        (3.0, 1.0, True, False),
        (0.1, 1.0, False, False),  # the base's bytes come on top
        (0.1, None, True, True),
        (1.0, None, True, False),
        (None, 1.0, True, False),  # nobody has measured the medium
    ],
)
def test_the_form_that_is_here_sooner_is_read(
    plain_gbps: float | None, decode_gbps: float | None, is_resident: bool, expected: bool
) -> None:
    assert ASSUMED_DECODE_BYTES_PER_S == 1e9
    chosen = prefers_delta(
        100 * MIB,
        65 * MIB,
        base_is_resident=is_resident,
        plain_bytes_per_s=plain_gbps and plain_gbps * 1e9,
        read_bytes_per_s=None,
        decode_bytes_per_s=decode_gbps and decode_gbps * 1e9,
    )
    assert chosen is expected


def test_what_deltas_were_read_at_counts_where_it_is_known() -> None:
    rates = {"base_is_resident": True, "plain_bytes_per_s": 5e8, "decode_bytes_per_s": 4e9}
    assert prefers_delta(100 * MIB, 65 * MIB, read_bytes_per_s=None, **rates)
    assert not prefers_delta(100 * MIB, 65 * MIB, read_bytes_per_s=3e8, **rates)


def test_a_rate_follows_what_is_measured_lately() -> None:
    rate = MeasuredRate()
    assert rate.bytes_per_s is None
    rate.add(MIB - 1, 1.0)
    rate.add(MIB, 0.0)  # a clock too coarse says nothing
    assert rate.bytes_per_s is None
    rate.add(MIB, 1.0)
    rate.add(MIB, 0.0)
    assert rate.bytes_per_s == pytest.approx(MIB)
    for _ in range(50):
        rate.add(10 * MIB, 1.0)
    assert rate.bytes_per_s == pytest.approx(10 * MIB, rel=0.01)
