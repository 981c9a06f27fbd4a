"""The reply of a segment: asked at once, handed on as it is, asked again when its replica dies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit.waiting import until
from ray.exceptions import ActorDiedError
from unit.deployments.serve_fakes import FakeHandle

from cluster.admission.dispatcher import Dispatcher
from configs.admission import AdmissionConfig
from deployments.ingress.service.retries import MAX_RETRIES, EncoderReply, RetriedCalls
from deployments.pipelines.plans import SegmentResult
from deployments.records.errors import InvalidRequest, ReplicaLost
from deployments.replicas.replica_calls import ReplicaCalls

CALL: Any = object()  # handed on as it is
RESULT = SegmentResult({}, {"s": 1.0})


class Encoder:
    """`outcomes` are those of the calls, the last one again and again; None hangs."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.handed_on: list[Any] = []
        self.handle = FakeHandle(self)
        self.calls = RetriedCalls(ReplicaCalls(self.handle), Dispatcher(AdmissionConfig()), 5.0)

    async def on_run_segment(self, call: Any, *upstream: Any) -> Any:
        self.handed_on += upstream
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is None:
            await asyncio.Event().wait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @property
    def made(self) -> list[Any]:
        return self.handle.responses

    def reply(self, *upstream: EncoderReply) -> EncoderReply:
        return EncoderReply(self.calls, CALL, upstream)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.service.retries.PAUSE_S", 0.0)


async def test_it_is_asked_at_once_and_once() -> None:
    encoder = Encoder(RESULT)
    reply = encoder.reply()
    (first,) = encoder.made
    assert reply.response is first
    assert await reply is RESULT
    assert await reply is RESULT  # by several who need it
    assert encoder.made == [first]


async def test_another_replica_is_asked_when_one_dies() -> None:
    encoder = Encoder(ActorDiedError(), RESULT)
    reply = encoder.reply()
    assert await reply is RESULT
    assert len(encoder.made) == 2
    assert reply.response is encoder.made[1]  # whoever is handed it now gets the living one
    assert await reply is RESULT
    assert len(encoder.made) == 2


async def test_in_the_end_it_is_lost() -> None:
    encoder = Encoder(ActorDiedError())
    with pytest.raises(ReplicaLost):
        await encoder.reply()
    assert len(encoder.made) == 1 + MAX_RETRIES


async def test_an_error_of_the_step_is_not_asked_again() -> None:
    error = InvalidRequest("pipeline 'p', stage 's': too long", "stages.s")
    encoder = Encoder(error)
    with pytest.raises(InvalidRequest) as raised:
        await encoder.reply()
    assert raised.value is error
    assert len(encoder.made) == 1


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_cancelling_reaches_the_replica_that_works_on_it(is_awaited: bool) -> None:
    encoder = Encoder(ActorDiedError(), None)
    reply = encoder.reply()
    if is_awaited:
        waiting = asyncio.ensure_future(_wait(reply))
        await until(lambda: len(encoder.made) >= 2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        reply._send_again()
        await asyncio.sleep(0)
        reply.cancel()
    with pytest.raises(asyncio.CancelledError):
        await encoder.made[1].task


async def test_results_that_came_along_are_made_anew() -> None:
    """The earlier segment's replica died with its result, which shows where that was handed on."""
    first, second = Encoder(ActorDiedError(), RESULT), Encoder(ActorDiedError(), RESULT)
    assert await second.reply(first.reply()) is RESULT
    assert second.handed_on == first.made
    assert [await response for response in first.made[1:]] == [RESULT]


async def _wait(reply: EncoderReply) -> SegmentResult:
    return await reply
