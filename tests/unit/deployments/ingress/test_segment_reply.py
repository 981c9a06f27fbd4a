"""The reply of a segment: asked at once, handed on as it is, asked again when its replica dies."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from deployments.errors import InvalidRequest, ReplicaLost
from deployments.ingress.retries import MAX_RETRIES
from deployments.ingress.segment_reply import EncoderReply
from deployments.pipelines.plans import SegmentResult

RESULT = SegmentResult({}, {"s": 1.0})


class Response:
    """Serve's: awaited or handed on."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def cancel(self) -> None:
        self.cancelled = True


class Encoder:
    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.made: list[Response] = []

    def ask(self) -> Response:
        self.made.append(Response(self.outcomes[min(len(self.made), len(self.outcomes) - 1)]))
        return self.made[-1]


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.retries.PAUSE_S", 0.0)


async def test_it_is_asked_at_once_and_once() -> None:
    encoder = Encoder(RESULT)
    reply = EncoderReply(encoder.ask, 5.0)
    (first,) = encoder.made
    assert reply.response is first
    assert await reply is RESULT
    assert await reply is RESULT  # by several who need it
    assert encoder.made == [first]


async def test_another_replica_is_asked_when_one_dies() -> None:
    encoder = Encoder(ActorDiedError(), RESULT)
    reply = EncoderReply(encoder.ask, 5.0)
    assert await reply is RESULT
    assert len(encoder.made) == 2
    assert reply.response is encoder.made[1]  # whoever is handed it now gets the living one
    assert await reply is RESULT
    assert len(encoder.made) == 2


async def test_in_the_end_it_is_lost() -> None:
    encoder = Encoder(ActorDiedError())
    with pytest.raises(ReplicaLost):
        await EncoderReply(encoder.ask, 5.0)
    assert len(encoder.made) == 1 + MAX_RETRIES


async def test_an_error_of_the_step_is_not_asked_again() -> None:
    error = InvalidRequest("pipeline 'p', step 's': too long", "steps.s")
    encoder = Encoder(RayTaskError("run_segment", "Traceback", error))
    with pytest.raises(InvalidRequest) as raised:
        await EncoderReply(encoder.ask, 5.0)
    assert raised.value is error
    assert len(encoder.made) == 1


async def test_cancelling_reaches_the_replica_that_works_on_it() -> None:
    encoder = Encoder(ActorDiedError(), RESULT)
    reply = EncoderReply(encoder.ask, 5.0)
    await reply
    reply.cancel()
    assert [response.cancelled for response in encoder.made] == [False, True]


async def test_results_that_came_along_are_made_anew() -> None:
    """The earlier segment's replica died with its result, which shows where that was handed on."""
    first, second = Encoder(ActorDiedError(), RESULT), Encoder(ActorDiedError(), RESULT)
    upstream = EncoderReply(first.ask, 5.0)
    handed_on: list[Any] = []

    def ask() -> Response:
        handed_on.append(upstream.response)
        return second.ask()

    assert await EncoderReply(ask, 5.0, [upstream]) is RESULT
    assert handed_on == first.made
    assert [await response for response in first.made[1:]] == [RESULT]
