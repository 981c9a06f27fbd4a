"""Transfers: every byte arrives, in chunks of the right size; no buffer is used before the device is done with it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.seeding import seeded_rng

from weights.memory.device_space import _DeviceCopy, _RingCopy, _StreamQueue
from weights.memory.transfer import PIECE_ALIGNMENT, Chunk, HostCopy, Pair, Transfer, plan_chunks, run_all
from weights.records.errors import WeightsError

CHUNK = 4 * PIECE_ALIGNMENT
SIZES = [1, 0, 511, 512, 513, CHUNK, CHUNK + 1, 7 * CHUNK - 3, 5, 10, 3 * CHUNK]
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]


def random_pairs(sizes: Sequence[int] = SIZES) -> list[Pair]:
    return [(torch.randint(0, 256, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)) for size in sizes]


def assert_arrived(pairs: Sequence[Pair]) -> None:
    for source, target in pairs:
        assert np.array_equal(np.asarray(source), target.numpy())


class LateQueue:
    """Copies as late as a device may: only when somebody waits. `fail_at` is the copy that goes wrong."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.enqueued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_done = self.num_followed = 0
        self.fail_at = fail_at
        self.lock = threading.Lock()

    def follow(self) -> None:
        assert self.num_done == len(self.enqueued)
        self.num_followed += 1

    def upload(self, copies: Copies) -> None:
        with self.lock:
            self.enqueued += copies

    def fence(self) -> LateFence:
        with self.lock:
            return LateFence(self, len(self.enqueued))


class LateFence:
    def __init__(self, queue: LateQueue, until: int) -> None:
        self.queue, self.until = queue, until

    def synchronize(self) -> None:
        with self.queue.lock:
            while self.queue.num_done < self.until:
                self.queue.num_done += 1
                if self.queue.num_done - 1 == self.queue.fail_at:
                    raise RuntimeError("the device fell off")
                target, pinned = self.queue.enqueued[self.queue.num_done - 1]
                target.copy_(pinned)


def ring(queues: Sequence[LateQueue], num_buffers: int = 3, num_threads: int = 4) -> _RingCopy:
    buffers = [torch.zeros(CHUNK, dtype=torch.uint8) for _ in range(num_buffers)]
    return _RingCopy(queues, buffers, num_threads=num_threads)


@given(st.lists(st.integers(0, 3 * CHUNK), max_size=20), st.integers(1, 6))
def test_chunks_cover_every_byte_once_and_are_full(sizes: list[int], units: int) -> None:
    chunk_bytes = units * PIECE_ALIGNMENT
    chunks = plan_chunks(sizes, chunk_bytes)
    pieces = [piece for chunk in chunks for piece in chunk]
    ends = dict.fromkeys(range(len(sizes)), 0)
    for piece in pieces:
        assert piece.nbytes > 0
        assert piece.offset == ends[piece.index]
        assert piece.offset % PIECE_ALIGNMENT == piece.at % PIECE_ALIGNMENT == 0
        ends[piece.index] += piece.nbytes
    assert list(ends.values()) == sizes
    for chunk in chunks:
        assert chunk[0].at == 0
        for before, after in itertools.pairwise(chunk):
            assert 0 <= after.at - before.at - before.nbytes < PIECE_ALIGNMENT
        assert chunk[-1].at + chunk[-1].nbytes <= chunk_bytes
    for chunk in chunks[:-1]:
        assert chunk[-1].at + chunk[-1].nbytes > chunk_bytes - PIECE_ALIGNMENT


def test_small_tensors_share_a_chunk() -> None:
    assert len(plan_chunks([300] * 1000, 2**20)) == 1
    assert len(plan_chunks([10 * 2**20, 100, 100], 2**20)) == 11


@pytest.mark.parametrize("chunk_bytes", [0, -512, 100, 513])
def test_a_chunk_size_that_does_not_align_is_refused(chunk_bytes: int) -> None:
    with pytest.raises(WeightsError, match=f"chunks of {chunk_bytes} bytes: expected a positive multiple of 512"):
        plan_chunks([1], chunk_bytes)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_host_copies_arrive(num_threads: int) -> None:
    pairs = random_pairs()
    report = HostCopy(chunk_bytes=CHUNK, num_threads=num_threads).copy(pairs)
    assert_arrived(pairs)
    assert report.nbytes == sum(SIZES)


def test_read_only_views_are_read_and_not_written() -> None:
    array = seeded_rng().integers(0, 256, 5000, np.uint8)
    array.flags.writeable = False
    for transfer in (HostCopy(chunk_bytes=CHUNK), ring([LateQueue()])):
        pairs: list[Pair] = [(array, torch.zeros(5000, dtype=torch.uint8))]
        transfer.copy(pairs)
        assert_arrived(pairs)


def test_a_report_has_rates() -> None:
    began_s = time.perf_counter()
    report = HostCopy().copy(random_pairs([4000]))
    assert 0 < report.wall_s <= time.perf_counter() - began_s
    assert (report.nbytes, report.gbps) == (4000, pytest.approx(4e-6 / report.wall_s))


@pytest.mark.parametrize("transfer", [HostCopy(), ring([LateQueue()])], ids=["host", "ring"])
@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (torch.zeros(3, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), "3 bytes on the host side, 4 on the"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.uint8), "on the host side, got torch.float32 of shape"),
        (np.zeros(4, np.uint8)[::2], torch.zeros(2, dtype=torch.uint8), "on the host side, .* not contiguous"),
        (np.zeros(4, np.uint8), torch.zeros(2, 2, dtype=torch.uint8), r"on the device side, .* shape \[2, 2\]"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_before_anything_moves(
    transfer: Transfer, source: torch.Tensor, target: torch.Tensor, message: str
) -> None:
    good = random_pairs([100])
    with pytest.raises(WeightsError, match=f"copy 1: .*{message}"):
        transfer.copy([*good, (source, target)])
    assert not good[0][1].any()


@pytest.mark.parametrize("num_buffers", [1, 2, 8])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_no_buffer_is_used_again_before_its_copies_are_done(num_buffers: int, num_threads: int) -> None:
    queues = [LateQueue(), LateQueue()]
    transfer = ring(queues, num_buffers, num_threads)
    for _ in range(3):
        pairs = random_pairs()
        assert transfer.copy(pairs).nbytes == sum(SIZES)
        assert_arrived(pairs)
    # Both streams carry a share, and each waited for the work of the calling thread before.
    assert all(queue.enqueued and queue.num_followed == 3 for queue in queues)


def test_several_copies_share_the_ring() -> None:
    transfer = _RingCopy(
        [NoFollow(), NoFollow()], [torch.zeros(CHUNK, dtype=torch.uint8) for _ in range(3)], num_threads=2
    )
    work = [random_pairs() for _ in range(6)]
    threads = [threading.Thread(target=transfer.copy, args=[pairs]) for pairs in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pairs in work:
        assert_arrived(pairs)


class NoFollow(LateQueue):
    """Several callers: other work may be pending."""

    def follow(self) -> None:
        self.num_followed += 1


@pytest.mark.parametrize("fail_at", [0, 5, 13, 14])
def test_an_error_of_the_device_is_raised_when_nothing_is_under_way_any_more(fail_at: int) -> None:
    queues = [LateQueue(fail_at), LateQueue()]
    transfer = ring(queues)
    with pytest.raises(RuntimeError, match="the device fell off"):
        transfer.copy(random_pairs([CHUNK] * 30))
    assert [queue.num_done for queue in queues] == [len(queue.enqueued) for queue in queues]
    pairs = random_pairs()  # the ring is whole
    transfer.copy(pairs)
    assert_arrived(pairs)


def test_an_error_while_enqueueing_waits_for_what_was_enqueued() -> None:
    class Full(LateQueue):
        def upload(self, copies: Copies) -> None:
            super().upload(copies[:1])
            if len(self.enqueued) == 4:
                raise RuntimeError("no more")

    queue = Full()
    with pytest.raises(RuntimeError, match="no more"):
        ring([queue]).copy(random_pairs([CHUNK] * 30))
    assert queue.num_done == len(queue.enqueued) >= 4


def test_after_an_error_no_further_chunk_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    stopped = threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def stop(threads: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        shutdown(threads, wait, cancel_futures=cancel_futures)
        stopped.set()

    def work(chunk: Chunk) -> None:
        begun.append(chunk[0].index)
        if chunk[0].index == 0:
            raise RuntimeError("bad memory")
        stopped.wait(5)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", stop)
    with pytest.raises(RuntimeError, match="bad memory"):
        run_all(work, plan_chunks([CHUNK] * 50, CHUNK), 2)
    assert len(begun) <= 4


def test_a_queue_orders_its_stream_after_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            said.append(f"stream on {device}")

        def wait_stream(self, other: str) -> None:
            said.append(f"wait for {other}")

        def __enter__(self) -> None:
            said.append("enter")

        def __exit__(self, *_: object) -> None:
            said.append("leave")

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Stream) -> None:
            said.append(f"record {type(stream).__name__}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the caller's on {device}")
    queue = _StreamQueue(torch.device("cuda", 1))
    queue.follow()
    (pinned, target), *_ = random_pairs([9])
    assert isinstance(pinned, torch.Tensor)
    queue.upload([(target, pinned)])
    assert isinstance(queue.fence(), Event)
    assert said == ["stream on cuda:1", "wait for the caller's on cuda:1", "enter", "leave", "record Stream"]
    assert torch.equal(pinned, target)


def test_without_a_card_there_is_no_copy_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WeightsError, match="cannot copy to cuda:0: this torch has no such device"):
        _DeviceCopy(torch.device("cuda", 0))
