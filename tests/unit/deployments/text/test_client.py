"""A worker's calls of the text-encoder service: slow, dead, hanging, and its own errors, over a fake handle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kit.clock import Clock
from kit.waiting import until
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import ReplicaUnavailableError
from unit.deployments.serve_fakes import FakeHandle

from deployments.records import CacheUse
from deployments.records.errors import DeadlineExceeded, InvalidRequest, ReplicaLost
from deployments.replicas.replica_calls import ReplicaCalls
from deployments.text.client import BELIEVED_DOWN_S, MAX_MISSED, EncoderDown, TextEncoderClient
from deployments.text.requests import Conditioning, ConditioningRequest

REQUEST = ConditioningRequest("flux", "a seven", None, False)
ANSWER = Conditioning({}, 1.0, CacheUse(0, 1), ())
TICK_S = 0.005


class Encoder:
    """`answers` are what calls do, one after the other, the last one again and again. `gone` is why none runs."""

    def __init__(self, *answers: Callable[[], Awaitable[Any]]) -> None:
        self.answers = list(answers)
        self.gone: str | None = None
        self.num_asked = self.num_looked = self.num_cancelled = 0

    async def on_condition(self, request: ConditioningRequest) -> Any:
        assert request == REQUEST
        self.num_asked += 1
        try:
            return await (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def why_none(self) -> str | None:
        self.num_looked += 1
        return self.gone


def answered(value: Any) -> Callable[[], Awaitable[Any]]:
    async def answer() -> Any:
        return value

    return answer


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.text.client.PAUSE_S", 0.0)


def raising(error: Exception) -> Callable[[], Awaitable[Any]]:
    async def fail() -> Any:
        raise error

    return fail


async def hanging() -> Any:
    await asyncio.Event().wait()


def service_of(encoder: Encoder, clock: Clock | None = None, timeout_s: float = 30.0) -> TextEncoderClient:
    calls = ReplicaCalls(FakeHandle(encoder), encoder.why_none, patience_s=TICK_S)
    return TextEncoderClient(calls, timeout_s, clock=clock or Clock(100.0))


async def test_an_answer_needs_no_look_at_the_replicas() -> None:
    encoder = Encoder(answered(ANSWER))
    assert await service_of(encoder).condition(REQUEST) is ANSWER
    assert (encoder.num_asked, encoder.num_looked) == (1, 0)


async def test_slow_is_not_down() -> None:
    """As long as a replica runs, however much it has to do, it is waited for, and asked once."""
    encoder = Encoder()

    async def slow() -> Conditioning:
        await until(lambda: encoder.num_looked >= 3)
        return ANSWER

    encoder.answers = [slow]
    service = service_of(encoder)
    assert await service.condition(REQUEST) is ANSWER
    assert (encoder.num_asked, encoder.num_looked >= 3, service.is_believed_down) == (1, True, False)


async def test_without_a_replica_it_is_down_after_some_patience() -> None:
    encoder = Encoder(hanging)
    encoder.gone = "no replica of 'text_encoder' is running (UNHEALTHY): killed"
    service = service_of(encoder)
    with pytest.raises(EncoderDown, match="killed"):
        await service.condition(REQUEST)
    assert (encoder.num_asked, encoder.num_looked, service.is_believed_down) == (1, 1, True)
    await until(lambda: encoder.num_cancelled == 1)


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("not now", None)])
async def test_another_replica_is_asked_when_one_died(error: Exception) -> None:
    encoder = Encoder(raising(error), answered(ANSWER))
    service = service_of(encoder)
    assert await service.condition(REQUEST) is ANSWER
    assert (encoder.num_asked, service.is_believed_down) == (2, False)


async def test_the_last_replica_that_died_leaves_it_down() -> None:
    encoder = Encoder(raising(ActorDiedError()), hanging)
    encoder.gone = "no replica of 'text_encoder' is running"
    service = service_of(encoder)
    with pytest.raises(EncoderDown):
        await service.condition(REQUEST)
    assert (encoder.num_asked, service.is_believed_down) == (2, True)


async def test_encoders_that_are_not_reached_say_nothing_of_the_prompt() -> None:
    missed = raising(ReplicaUnavailableError("on a silent node"))
    encoder = Encoder(*[missed] * (MAX_MISSED - 1), raising(ActorDiedError()), answered(ANSWER))
    service = service_of(encoder)
    assert await service.condition(REQUEST) is ANSWER
    assert (encoder.num_asked, service.is_believed_down) == (MAX_MISSED + 1, False)


async def test_when_none_is_reached_for_long_the_worker_may_encode() -> None:
    encoder = Encoder(raising(ReplicaUnavailableError("on a silent node")))
    service = service_of(encoder)
    with pytest.raises(EncoderDown, match="no text encoder could be reached"):
        await service.condition(REQUEST)
    assert (encoder.num_asked, service.is_believed_down) == (MAX_MISSED, True)


async def test_a_prompt_that_two_died_of_is_not_encoded_by_the_worker() -> None:
    """EncoderDown would let the worker encode it, and be the third."""
    encoder = Encoder(raising(ActorDiedError()))
    service = service_of(encoder)
    with pytest.raises(ReplicaLost, match="2 text encoders died"):
        await service.condition(REQUEST)
    assert (encoder.num_asked, service.is_believed_down) == (2, False)


async def test_nobody_waits_again_for_what_is_believed_down() -> None:
    encoder, clock = Encoder(hanging), Clock(100.0)
    encoder.gone = "gone"
    service = service_of(encoder, clock)
    with pytest.raises(EncoderDown):
        await service.condition(REQUEST)
    clock.now_s += BELIEVED_DOWN_S - 0.01
    with pytest.raises(EncoderDown, match="a moment ago"):
        await service.condition(REQUEST)
    assert encoder.num_asked == 1
    clock.now_s += 0.02
    encoder.answers = [answered(ANSWER)]
    assert await service.condition(REQUEST) is ANSWER
    assert not service.is_believed_down


async def test_all_who_wait_find_it_down_by_one_look() -> None:
    encoder = Encoder(hanging)
    encoder.gone = "gone"
    service = service_of(encoder)
    outcomes = await asyncio.gather(*(service.condition(REQUEST) for _ in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EncoderDown] * 5
    assert encoder.num_looked == 1


async def test_what_never_answers_ends_with_the_requests_time() -> None:
    encoder = Encoder(hanging)
    service = service_of(encoder, timeout_s=TICK_S)
    with pytest.raises(DeadlineExceeded):
        await service.condition(REQUEST)
    assert not service.is_believed_down
    await until(lambda: encoder.num_cancelled == 1)


async def test_a_replicas_own_error_leaves_as_itself() -> None:
    error = InvalidRequest("the prompt is too long", "prompt")
    encoder = Encoder(raising(error))
    service = service_of(encoder)
    with pytest.raises(InvalidRequest) as raised:
        await service.condition(REQUEST)
    assert raised.value is error
    assert (encoder.num_asked, service.is_believed_down) == (1, False)


async def test_who_leaves_takes_the_call_along() -> None:
    encoder = Encoder(hanging)
    asking = asyncio.create_task(service_of(encoder).condition(REQUEST))
    await until(lambda: encoder.num_asked)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: encoder.num_cancelled == 1)
