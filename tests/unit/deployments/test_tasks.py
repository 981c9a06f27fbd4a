"""A caller of a thread that is cancelled stays until the thread is done."""

from __future__ import annotations

import asyncio
import threading

import pytest
from kit.panics import Panic

from deployments.records.tasks import in_thread
from weights.platform.panics import Panicked


async def test_results_and_errors_come_through() -> None:
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)


async def test_a_panic_comes_through_as_an_error() -> None:
    def work() -> None:
        raise Panic("out of range")

    with pytest.raises(Panicked, match=r"^Panic: out of range$"):
        await in_thread(work)


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_stays_until_the_thread_is_done(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go.wait(10)
        done.set()
        if fails:
            raise ValueError("nobody asks")

    caller = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done.is_set()
    assert caplog.records == []
