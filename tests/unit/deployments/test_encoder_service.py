"""A worker's calls of the embedding service: slow, dead, hanging, and its own errors, over a fake handle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from deployments.encoder_service import BELIEVED_DOWN_S, EncoderDown, EncoderService
from deployments.encoding.records import Conditioning, ConditioningRequest
from deployments.errors import InvalidRequest
from deployments.records import CacheUse

REQUEST = ConditioningRequest("flux", "a seven", None, False, None)
ANSWER = Conditioning({}, 1.0, CacheUse(0, 1), ())
TICK_S = 0.005


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Handle:
    """`answers` are what calls do, one after the other, the last one again and again; so for `pings`."""

    def __init__(self, *answers: Callable[[], Awaitable[Any]]) -> None:
        self.answers = list(answers)
        self.pings: list[Callable[[], Awaitable[Any]]] = [answered(None)]
        self.num_asked = self.num_pinged = self.num_cancelled = 0
        self.condition = SimpleNamespace(remote=self._ask)
        self.ping = SimpleNamespace(remote=self._ping)

    async def _ask(self, request: ConditioningRequest) -> Any:
        assert request == REQUEST
        self.num_asked += 1
        return await self._run(self.answers)

    async def _ping(self) -> Any:
        self.num_pinged += 1
        return await self._run(self.pings)

    async def _run(self, plans: list[Callable[[], Awaitable[Any]]]) -> Any:
        try:
            return await (plans.pop(0) if len(plans) > 1 else plans[0])()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def answered(value: Any) -> Callable[[], Awaitable[Any]]:
    async def answer() -> Any:
        return value

    return answer


def raising(error: Exception) -> Callable[[], Awaitable[Any]]:
    async def fail() -> Any:
        raise error

    return fail


async def hanging() -> Any:
    await asyncio.Event().wait()


def service_of(handle: Handle, clock: Clock | None = None) -> EncoderService:
    return EncoderService(handle, patience_s=TICK_S, ping_timeout_s=TICK_S, clock=clock or Clock())


async def nothing_is_left() -> bool:
    for _ in range(10):
        await asyncio.sleep(0)
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_answer_needs_no_ping() -> None:
    handle = Handle(answered(ANSWER))
    assert await service_of(handle).condition(REQUEST) is ANSWER
    assert (handle.num_asked, handle.num_pinged) == (1, 0)
    assert await nothing_is_left()


async def test_slow_is_not_down() -> None:
    """As long as it answers pings, it is waited for, and asked once."""
    handle = Handle()

    async def slow() -> Conditioning:
        while handle.num_pinged < 3:
            await asyncio.sleep(0)
        return ANSWER

    handle.answers = [slow]
    service = service_of(handle)
    assert await service.condition(REQUEST) is ANSWER
    assert (handle.num_asked, handle.num_pinged >= 3, service.is_believed_down) == (1, True, False)
    assert await nothing_is_left()


@pytest.mark.parametrize("ping", [hanging, raising(ActorDiedError())])
async def test_what_hangs_is_down_after_patience_and_ping(ping: Callable[[], Awaitable[Any]]) -> None:
    handle = Handle(hanging)
    handle.pings = [ping]
    service = service_of(handle)
    async with asyncio.timeout(5):
        with pytest.raises(EncoderDown, match="no replica of the text encoder service answers"):
            await service.condition(REQUEST)
    assert (handle.num_asked, handle.num_pinged) == (1, 1)
    assert await nothing_is_left()
    assert handle.num_cancelled == 1 + (ping is hanging)


async def test_an_answer_that_comes_during_a_ping_counts() -> None:
    handle = Handle()
    pinged, given = asyncio.Event(), asyncio.Event()

    async def late() -> Conditioning:
        await pinged.wait()
        given.set()
        return ANSWER

    async def no_ping() -> None:
        pinged.set()
        await given.wait()
        raise ActorDiedError

    handle.answers, handle.pings = [late], [no_ping]
    assert await service_of(handle).condition(REQUEST) is ANSWER
    assert await nothing_is_left()


async def test_another_replica_is_asked_when_one_died() -> None:
    handle = Handle(raising(ActorDiedError()), answered(ANSWER))
    service = service_of(handle)
    assert await service.condition(REQUEST) is ANSWER
    assert (handle.num_asked, service.is_believed_down) == (2, False)
    assert await nothing_is_left()


@pytest.mark.parametrize("ping", [answered(None), hanging, raising(ActorDiedError())])
async def test_replicas_that_all_die_are_down(ping: Callable[[], Awaitable[Any]]) -> None:
    handle = Handle(raising(ActorDiedError()))
    handle.pings = [ping]
    service = service_of(handle)
    with pytest.raises(EncoderDown):
        await service.condition(REQUEST)
    assert handle.num_asked <= 2
    assert service.is_believed_down
    assert await nothing_is_left()


async def test_nobody_waits_again_for_what_is_believed_down() -> None:
    handle, clock = Handle(hanging), Clock()
    handle.pings = [hanging]
    service = service_of(handle, clock)
    with pytest.raises(EncoderDown):
        await service.condition(REQUEST)
    clock.now_s += BELIEVED_DOWN_S - 0.01
    with pytest.raises(EncoderDown, match="a moment ago"):
        await service.condition(REQUEST)
    assert handle.num_asked == 1
    clock.now_s += 0.02
    handle.answers = [answered(ANSWER)]
    assert await service.condition(REQUEST) is ANSWER
    assert not service.is_believed_down


async def test_the_last_of_several_that_waited_finds_it_down_once() -> None:
    """Requests that were on their way when it was found to be down end as well."""
    handle = Handle(hanging)
    handle.pings = [hanging]
    service = service_of(handle)
    outcomes = await asyncio.gather(*(service.condition(REQUEST) for _ in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EncoderDown] * 5
    assert await nothing_is_left()


@pytest.mark.parametrize("is_wrapped", [True, False])
async def test_a_replicas_own_error_leaves_as_itself(is_wrapped: bool) -> None:
    error = InvalidRequest("the prompt is too long", "prompt")
    handle = Handle(raising(RayTaskError("condition", "Traceback", error) if is_wrapped else error))
    service = service_of(handle)
    with pytest.raises(InvalidRequest) as raised:
        await service.condition(REQUEST)
    assert raised.value is error
    assert (handle.num_asked, handle.num_pinged, service.is_believed_down) == (1, 0, False)
    assert await nothing_is_left()


async def test_who_leaves_takes_the_call_along() -> None:
    handle = Handle(hanging)
    asking = asyncio.create_task(service_of(handle).condition(REQUEST))
    while not handle.num_pinged:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await nothing_is_left()
    assert handle.num_cancelled == 1
