"""The asyncio side: answers, errors, retries, cancelling, deadlines, retuning, the end. Runs are held and let go."""

from __future__ import annotations

import asyncio
import contextvars
import json
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from kit.panics import Panic

from configs.batching import BatchingConfig
from deployments.batching.batcher import MAX_TURNS, Batcher, BatcherClosed
from deployments.records.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, QueueFull


class Jump(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Does not wait: when nothing is ready, the time of the next timer has come."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everybody waits, and no timer is set")
        if not ready:
            self.now_s += timeout or 0.0
        return ready


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test's loop, and the clock of its batchers, jump from timer to timer."""

    def run() -> None:
        selector = Jump()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s  # type: ignore[method-assign]
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(test())

    run.__name__ = test.__name__
    return run


@dataclass
class Model:
    """Doubles its items. Holds batches while `gate` is closed; `fails` decides by the items of a batch."""

    config: BatchingConfig
    fails: Callable[[list[Any]], BaseException | None] = lambda items: None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    batches: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()
        self.batcher: Batcher[Any, Any] = Batcher(self.run, self.config, lambda: asyncio.get_running_loop().time())

    async def run(self, items: Sequence[Any]) -> list[Any]:
        self.batches.append(list(items))
        await self.gate.wait()
        if (error := self.fails(list(items))) is not None:
            raise error
        return [item if isinstance(item, Exception) else item * 2 for item in items]

    async def busy(self) -> asyncio.Future[list[Any]]:
        """One batch runs and goes on running."""
        self.gate.clear()
        first = self.batcher.submit([0])
        await turns()
        assert self.batches == [[0]]
        return first


async def turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def model(**settings: Any) -> Model:
    return Model(BatchingConfig(**settings))


@in_virtual_time
async def test_who_comes_while_a_batch_runs_joins_the_next() -> None:
    ours = model(max_batch_size=4)
    first = await ours.busy()
    others = []
    for item in range(1, 7):
        others.append(ours.batcher.submit([item]))
        await turns()
    assert ours.batches == [[0]]
    assert (ours.batcher.batching_stats().queued, ours.batcher.batching_stats().running) == ({1: 6}, {1: 1})
    ours.gate.set()
    assert await asyncio.gather(first, *others) == [[item * 2] for item in range(7)]
    assert ours.batches == [[0], [1, 2, 3, 4], [5, 6]]


@in_virtual_time
async def test_no_more_batches_run_at_once_than_may_however_many_have_run() -> None:
    ours = model(max_batch_size=2, max_concurrent_batches=2)
    for _ in range(3):
        await ours.batcher.submit([1])
    ours.gate.clear()
    waiting = [ours.batcher.submit([item]) for item in range(8)]
    await turns()
    assert len(ours.batches) == 3 + 2
    ours.gate.set()
    assert await asyncio.gather(*waiting) == [[item * 2] for item in range(8)]


@in_virtual_time
async def test_who_comes_at_one_moment_runs_together() -> None:
    ours = model()

    async def caller(item: int) -> list[Any]:
        await asyncio.sleep(0)
        return list(await ours.batcher.submit([item]))

    assert await asyncio.gather(*map(caller, range(20))) == [[item * 2] for item in range(20)]
    assert ours.batches == [list(range(20))]


@in_virtual_time
async def test_a_batch_waits_for_a_few_turns_alone_where_each_brings_a_request() -> None:
    ours, asked = model(), list[Any]()
    for item in range(30):
        asked.append(ours.batcher.submit([item]))
        await asyncio.sleep(0)
    assert ours.batches[0] == list(range(MAX_TURNS))
    assert await asyncio.gather(*asked) == [[item * 2] for item in range(30)]


@in_virtual_time
async def test_requests_of_many_items_come_back_whole_and_in_order() -> None:
    ours = model(max_batch_size=8, max_concurrent_batches=2)
    sizes = [1, 4, 8, 20, 1, 0, 4, 8]
    items = [[(number, index) for index in range(size)] for number, size in enumerate(sizes)]
    answers = await asyncio.gather(*map(ours.batcher.submit, items))
    assert answers == [[item * 2 for item in request] for request in items]
    assert max(map(len, ours.batches)) <= 8
    assert sorted(item for batch in ours.batches for item in batch) == sorted(
        item for request in items for item in request
    )


@in_virtual_time
async def test_an_error_in_place_of_a_result_is_of_its_request_alone() -> None:
    ours = model()
    good, bad, other = (ours.batcher.submit(items) for items in ([1, 2], [3, ValueError("mine"), 4], [5]))
    assert await good == [2, 4]
    with pytest.raises(ValueError, match="mine"):
        await bad
    assert await other == [10]
    assert (len(ours.batches), ours.batcher.batching_stats().failed, ours.batcher.batching_stats().retried) == (1, 1, 0)


@in_virtual_time
async def test_a_batch_that_fails_is_tried_one_request_at_a_time() -> None:
    ours = model()
    ours.fails = lambda items: RuntimeError("poison") if 3 in items else None
    answers = [ours.batcher.submit(items) for items in ([1, 2], [3], [4])]
    assert await answers[0] == [2, 4]
    with pytest.raises(RuntimeError, match="poison"):
        await answers[1]
    assert await answers[2] == [8]
    assert ours.batches == [[1, 2, 3, 4], [1, 2], [3], [4]]
    stats = ours.batcher.batching_stats()
    assert (stats.batches, stats.retried, stats.failed, stats.execution.count) == (1, 3, 1, 4)


@in_virtual_time
async def test_a_batch_that_finds_no_memory_is_halved_and_the_next_ones_are_smaller() -> None:
    ours = model(max_batch_size=32, default_queue_policy={"max_queue_size": 100})
    ours.fails = lambda items: MemoryError() if len(items) > 8 else None
    for _ in range(20):
        answers = [ours.batcher.submit([item]) for item in range(16)]
        assert await asyncio.gather(*answers) == [[item * 2] for item in range(16)]
    assert [len(batch) for batch in ours.batches] == [16] + [8] * 40
    assert ours.batcher.batching_stats().retried == 16


@in_virtual_time
async def test_a_request_of_many_items_is_halved_as_well() -> None:
    ours = model(max_batch_size=32)
    ours.fails = lambda items: MemoryError() if len(items) > 3 else None
    large, small = ours.batcher.submit(list(range(11))), ours.batcher.submit([20, 21])
    assert await large == [2 * item for item in range(11)]
    assert await small == [40, 42]
    assert sorted(item for batch in ours.batches if len(batch) <= 3 for item in batch) == [*range(11), 20, 21]


@in_virtual_time
async def test_an_item_that_finds_no_memory_alone_fails_alone() -> None:
    ours = model()
    ours.fails = lambda items: MemoryError("no room") if 3 in items else None
    answers = await asyncio.gather(*(ours.batcher.submit([item]) for item in range(5)), return_exceptions=True)
    assert [answer for answer in answers if not isinstance(answer, BaseException)] == [[0], [2], [4], [8]]
    assert isinstance(answers[3], MemoryError)


@in_virtual_time
async def test_a_request_that_fails_alone_is_not_tried_again() -> None:
    ours = model()
    ours.fails = lambda items: RuntimeError("poison")
    with pytest.raises(RuntimeError, match="poison"):
        await ours.batcher.submit([1])
    assert ours.batches == [[1]]


@in_virtual_time
async def test_the_wrong_number_of_results_is_a_failure() -> None:
    async def run(items: Sequence[int]) -> list[int]:
        return [0] if len(items) < 3 else [0, 0]

    batcher: Batcher[int, int] = Batcher(run, BatchingConfig())
    one, two = batcher.submit([1]), batcher.submit([1, 2])
    assert await one == [0]
    with pytest.raises(GenerationFailed, match="1 results for 2 items"):
        await two


@in_virtual_time
async def test_a_cancelled_run_leaves_nobody_waiting() -> None:
    ours = model()
    ours.fails = lambda items: asyncio.CancelledError()
    answers = await asyncio.gather(*(ours.batcher.submit([item]) for item in range(3)), return_exceptions=True)
    assert all(isinstance(answer, GenerationFailed) for answer in answers)
    ours.fails = lambda items: None
    assert await ours.batcher.submit([1]) == [2]  # the slot is free again


@in_virtual_time
async def test_a_panic_over_one_request_is_its_own() -> None:
    ours = model()
    ours.fails = lambda items: Panic("out of range") if 1 in items else None
    answers = await asyncio.gather(*(ours.batcher.submit([item]) for item in range(3)), return_exceptions=True)
    assert (answers[0], str(answers[1]), answers[2]) == ([0], "Panic: out of range", [4])


@in_virtual_time
async def test_no_exception_upsets_a_future() -> None:
    ours = model()
    with pytest.raises(GenerationFailed, match="StopIteration"):
        await ours.batcher.submit([StopIteration("end")])


@in_virtual_time
async def test_cancelling_a_request_that_waits_takes_it_out_at_once() -> None:
    ours = model(default_queue_policy={"max_queue_size": 1})
    first = await ours.busy()
    waiting = ours.batcher.submit([1])
    with pytest.raises(QueueFull):
        await ours.batcher.submit([2])
    waiting.cancel()
    assert ours.batcher.batching_stats().queued == {}
    third = ours.batcher.submit([3])
    ours.gate.set()
    assert await asyncio.gather(first, third) == [[0], [6]]
    assert ours.batches == [[0], [3]]
    stats = ours.batcher.batching_stats()
    assert (stats.cancelled, stats.rejected) == (1, 1)


@in_virtual_time
async def test_cancelling_a_request_that_runs_is_for_it_alone() -> None:
    ours = model()
    ours.gate.clear()
    task = asyncio.ensure_future(_wait(ours.batcher.submit([1])))
    other = ours.batcher.submit([2])
    await turns()
    task.cancel()
    ours.gate.set()
    assert await other == [4]
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ours.batches == [[1, 2]]


async def _wait(answer: asyncio.Future[list[Any]]) -> list[Any]:
    return await answer


@in_virtual_time
async def test_time_that_is_over_is_noticed_by_itself() -> None:
    ours = model(priority_levels=2, queue_policies={2: {"timeout_us": 3_000_000}})
    first = await ours.busy()
    loop = asyncio.get_running_loop()
    own, of_level = ours.batcher.submit([1], timeout_s=1.0), ours.batcher.submit([2], priority=2, timeout_s=5.0)
    for answer, due_s in ((own, 1.0), (of_level, 3.0)):
        with pytest.raises(DeadlineExceeded, match="its time was over"):
            await answer
        assert loop.time() == pytest.approx(due_s)
    ours.gate.set()
    assert await first == [0]
    assert ours.batches == [[0]]
    assert ours.batcher.batching_stats().expired == 2


@in_virtual_time
async def test_the_delay_ends_by_itself() -> None:
    ours = model(strategy="prefer_batch", max_queue_delay_us=2_000_000, preferred_batch_sizes=(4,))
    assert await asyncio.gather(*(ours.batcher.submit([item]) for item in range(4))) == [[0], [2], [4], [6]]
    assert asyncio.get_running_loop().time() == 0.0
    assert await ours.batcher.submit([4]) == [8]
    assert asyncio.get_running_loop().time() == pytest.approx(2.0)


@in_virtual_time
async def test_who_is_due_at_the_end_of_the_delay_still_joins() -> None:
    """As after a stall of the event loop: the timer and the newcomer's wake-up come in one turn."""
    ours = model(strategy="prefer_batch", max_queue_delay_us=2_000_000)
    first = ours.batcher.submit([1])
    await asyncio.sleep(2.0)
    assert await asyncio.gather(first, ours.batcher.submit([2])) == [[2], [4]]
    assert ours.batches == [[1, 2]]


@in_virtual_time
async def test_another_group_runs_in_another_slot() -> None:
    ours = model(max_concurrent_batches=2, max_batch_size=2)
    await ours.busy()
    answers = [ours.batcher.submit([item], group=item % 2) for item in range(1, 5)]
    await turns()
    assert ours.batches == [[0], [1, 3]]
    ours.gate.set()
    assert await asyncio.gather(*answers) == [[2], [4], [6], [8]]


@in_virtual_time
async def test_what_cannot_be_meant_is_refused_through_the_future() -> None:
    ours = model(priority_levels=2, default_priority=2)
    for settings in ({"priority": 3}, {"priority": -1}, {"costs": [1, 2]}, {"costs": [-1]}, {"timeout_s": -1.0}):
        answer = ours.batcher.submit([1], **settings)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await answer
    with pytest.raises(InvalidRequest):
        await ours.batcher.submit([1], timeout_s=float("nan"))
    assert ours.batcher.batching_stats().rejected == 6
    assert await ours.batcher.submit([1]) == [2]


@in_virtual_time
async def test_who_could_start_does_not_fill_the_queue() -> None:
    ours = model(max_batch_size=2, default_queue_policy={"max_queue_size": 2})
    answers = [ours.batcher.submit([item]) for item in range(4)]
    assert await asyncio.gather(*answers) == [[0], [2], [4], [6]]


@in_virtual_time
async def test_retuning_holds_for_who_waits() -> None:
    ours = model(max_batch_size=1, priority_levels=3)
    await ours.busy()
    low, high = ours.batcher.submit([3], priority=3), ours.batcher.submit([1], priority=1)
    ours.batcher.retune(BatchingConfig(max_batch_size=8, priority_levels=1, max_concurrent_batches=2))
    await turns()
    assert ours.batches == [[0], [3, 1]]
    ours.batcher.retune(BatchingConfig(default_queue_policy={"timeout_us": 1_000_000}))
    late = ours.batcher.submit([5])
    with pytest.raises(DeadlineExceeded):
        await late
    ours.gate.set()
    assert await asyncio.gather(low, high) == [[6], [2]]
    assert ours.batcher.batching_stats().running == {}


@in_virtual_time
async def test_closing_refuses_who_waits_and_ends_what_runs() -> None:
    ours = model()
    first = await ours.busy()
    waiting = ours.batcher.submit([1], timeout_s=100.0)
    closing = asyncio.ensure_future(ours.batcher.close())
    with pytest.raises(BatcherClosed):
        await waiting
    with pytest.raises(BatcherClosed):
        await ours.batcher.submit([2])
    assert not closing.done()
    ours.gate.set()
    await closing
    assert await first == [0]


@in_virtual_time
async def test_a_large_request_that_fails_leaves_the_queue() -> None:
    ours = model(max_batch_size=2)
    ours.fails = lambda items: RuntimeError("broken") if 1 in items else None
    large, other = ours.batcher.submit([0, 1, 2, 3, 4]), ours.batcher.submit([7])
    with pytest.raises(RuntimeError, match="broken"):
        await large
    assert await other == [14]
    assert ours.batches == [[0, 1], [7]]


@in_virtual_time
async def test_a_batch_runs_in_nobodys_context() -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")
    seen = []

    async def run(items: Sequence[int]) -> Sequence[int]:
        seen.append(who.get())
        return items

    batcher: Batcher[int, int] = Batcher(run, BatchingConfig(default_queue_policy={"max_queue_size": 1}))
    who.set("the last one")
    await asyncio.gather(
        batcher.submit([1]), batcher.submit([2])
    )  # the second finds the queue full and starts the first
    assert seen == ["nobody", "nobody"]


@in_virtual_time
async def test_stats_add_up_and_are_json() -> None:
    ours = model(max_batch_size=4)
    first = await ours.busy()
    answers = [ours.batcher.submit([1, 2]) for _ in range(3)]
    await asyncio.sleep(2.0)
    ours.gate.set()
    await asyncio.gather(first, *answers)
    await turns()
    stats = ours.batcher.batching_stats()
    assert (stats.batches, stats.requests, stats.items, stats.batch_sizes) == (3, 4, 7, {1: 1, 2: 1, 4: 1})
    wait = stats.queue_wait
    assert (wait.count, wait.sum_s, wait.max_s, wait.p50_s, wait.p99_s) == (
        4,
        *(pytest.approx(t) for t in (6, 2, 2, 2)),
    )
    assert stats.execution.sum_s == pytest.approx(2.0)
    assert (stats.queued, stats.running) == ({}, {})
    assert json.loads(json.dumps(asdict(stats)))["batch_sizes"] == {"1": 1, "2": 1, "4": 1}
