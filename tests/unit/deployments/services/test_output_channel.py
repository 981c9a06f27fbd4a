"""The channel between who makes outputs and who reads them: bounded, in order, and closed from any side."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from kit.seeding import seeded_rng
from kit.waiting import until

from deployments.records import (
    CacheUse,
    ImageProgress,
    ImageResult,
    TextChunk,
    merge_progress,
    merge_text_chunks,
)
from deployments.replicas.output_channel import OutputChannel


async def count_to(most: int, channel: OutputChannel[int]) -> None:
    for number in range(most):
        await channel.send(number)


class Producer:
    """Sends numbers until it is ended; its cleanup lasts until `may_end` is set."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.may_end = asyncio.Event()
        self.has_ended = False

    async def run(self, channel: OutputChannel[int]) -> None:
        try:
            while True:
                await channel.send(self.num_sent)
                self.num_sent += 1
        finally:
            while not self.may_end.is_set():
                try:
                    await self.may_end.wait()
                except asyncio.CancelledError:
                    continue
            self.has_ended = True


@pytest.mark.parametrize("capacity", [1, 2, 64])
async def test_all_outputs_come_in_order(capacity: int) -> None:
    async with OutputChannel[int](lambda channel: count_to(200, channel), capacity=capacity) as channel:
        assert [number async for number in channel] == list(range(200))
        assert [number async for number in channel] == [], "it has ended"


async def test_nothing_is_made_before_the_first_reading_and_no_more_than_fits() -> None:
    producer = Producer()
    producer.may_end.set()
    async with OutputChannel[int](producer.run, capacity=5) as channel:
        for _ in range(20):
            await asyncio.sleep(0)
        assert producer.num_sent == 0
        assert await anext(channel) == 0
        for _ in range(20):
            await asyncio.sleep(0)
        assert producer.num_sent == 6, "five wait, one was read"
    assert producer.has_ended


async def test_an_error_comes_behind_what_was_made_before_it_and_once() -> None:
    async def fail(channel: OutputChannel[int]) -> None:
        await count_to(3, channel)
        raise ValueError("broken")

    channel = OutputChannel[int](fail)
    assert [await anext(channel) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="broken"):
        await anext(channel)
    assert [number async for number in channel] == []
    await channel.aclose()


async def test_closing_waits_until_nothing_runs_any_more_however_often_and_from_wherever() -> None:
    producer = Producer()
    channel = OutputChannel[int](producer.run)
    await anext(channel)
    channel.close()  # from a side that cannot wait
    channel.close()
    closing = [asyncio.create_task(channel.aclose()) for _ in range(3)]
    await asyncio.sleep(0)
    closing[0].cancel()
    await asyncio.sleep(0)
    assert not any(one.done() for one in closing), "the producer still has what it has leased"
    assert [number async for number in channel] == [], "nothing is read any more"
    producer.may_end.set()
    outcomes = await asyncio.gather(*closing, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, type(None), type(None)]
    assert producer.has_ended


async def test_who_waits_for_an_output_hears_of_the_end() -> None:
    async def never(_: OutputChannel[int]) -> None:
        await asyncio.Event().wait()

    channel = OutputChannel[int](never)
    reading = asyncio.ensure_future(anext(channel, None))
    await asyncio.sleep(0)
    channel.close()
    async with asyncio.timeout(5):
        assert await reading is None
        await channel.aclose()


async def test_a_reader_that_is_cancelled_ends_the_producer_first() -> None:
    producer = Producer()
    channel = OutputChannel[int](producer.run, capacity=1)
    for number in range(3):
        assert await anext(channel) == number

    async def read_on() -> None:
        async for _ in channel:
            await asyncio.sleep(0)

    reading = asyncio.create_task(read_on())
    await until(lambda: producer.num_sent > 10)
    reading.cancel()
    producer.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await channel.aclose()
    assert producer.has_ended


async def test_a_channel_that_was_never_read_has_nothing_to_end() -> None:
    channel = OutputChannel[int](lambda channel: count_to(1, channel))
    await channel.aclose()
    assert [number async for number in channel] == []


def unread(outputs: list[Any], **options: Any) -> OutputChannel[Any]:
    """A channel whose producer puts all outputs at once, as an engine does."""

    async def put(channel: OutputChannel[Any]) -> None:
        for output in outputs:
            channel.put(output)

    return OutputChannel(put, **options)


async def test_texts_that_nobody_reads_take_no_more_pieces_and_lose_nothing() -> None:
    rng = seeded_rng()
    chunks = [
        TextChunk(f"{number} ", 4, number, index=int(index), num_cached_tokens=2)
        for number, index in enumerate(rng.integers(3, size=500))
    ]
    last = TextChunk("end", 4, 500, "stop", {"total": 1.0}, index=1)
    found = [one async for one in unread([*chunks, last], capacity=8, merge=merge_text_chunks)]
    assert len(found) <= 8 + 3 + 1, "one more for each completion, and the last"
    for index in range(3):
        written = "".join(chunk.text for chunk in (*chunks, last) if chunk.index == index)
        assert "".join(chunk.text for chunk in found if chunk.index == index) == written
    counts = [chunk.num_completion_tokens for chunk in found]
    assert counts == sorted(counts)
    assert found[-1] == last


async def test_an_image_that_nobody_reads_keeps_its_newest_progress() -> None:
    preview = np.zeros((2, 2, 3), np.uint8)
    steps = [
        ImageProgress(step, 100, (preview,) if step == 40 else (), 0 if step == 40 else None, b"%d" % step)
        for step in range(1, 91)
    ]
    result = ImageResult("m", [preview], 1, 100, {"total": 1.0}, None, CacheUse(0, 1))
    *found, last = [one async for one in unread([*steps, result], capacity=4, merge=merge_progress)]
    assert [piece.step for piece in found] == [1, 2, 3, 90]
    assert (found[-1].previews, found[-1].preview_index, found[-1].checkpoint) == ((preview,), 0, b"90")
    assert last is result
    moved = ImageProgress(91, 100, checkpoint=b"91", is_moved=True)
    found = [one async for one in unread([*steps, moved], capacity=4, merge=merge_progress)]
    assert found[-1] is moved, "it is the end of its stream"
