"""One stream of requests: what goes out, in which order, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from deployments.ingress.kserve.grpc import servicer
from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.grpc.servicer import _InferStream
from deployments.ingress.kserve.inference import Inference
from deployments.records.errors import InvalidRequest, QueueFull, UnknownModel


def text(content: str) -> bytes:
    return len(content.encode()).to_bytes(4, "little") + content.encode()


def write(id_: str, prompt: str = "Hi", model: str = "adder") -> messages.ModelInferRequest:
    name = "text_input" if model == "adder" else "text"
    inputs = [{"name": name, "datatype": "BYTES", "shape": [1]}]
    return messages.ModelInferRequest(model_name=model, id=id_, inputs=inputs, raw_input_contents=[text(prompt)])


def embed(id_: str, prompt: str = "Hi") -> messages.ModelInferRequest:
    return write(id_, prompt, "minilm")


class Stream:
    """The client's side: `send` requests, look at `answers`."""

    def __init__(self, inference: Inference, *, errors_end_it: bool = False) -> None:
        self.answers: list[messages.ModelStreamInferResponse] = []
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self.num_reads = 0
        context: Any = SimpleNamespace(write=self._write)
        stream = _InferStream(inference, context, errors_end_it=errors_end_it)
        self.task = asyncio.create_task(stream.answer_requests(self._read()))

    def send(self, *requests: Any) -> None:
        for request in requests:
            self._requests.put_nowait(request)

    async def end(self) -> list[messages.ModelStreamInferResponse]:
        self.send(None)
        async with asyncio.timeout(5):
            await self.task
        return self.answers

    async def until(self, num_answers: int) -> None:
        async with asyncio.timeout(5), self._changed:
            await self._changed.wait_for(lambda: len(self.answers) >= num_answers)

    async def _write(self, answer: messages.ModelStreamInferResponse) -> None:
        async with self._changed:
            self.answers.append(answer)
            self._changed.notify_all()

    async def _read(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            self.num_reads += 1
            yield request


def ids(answers: list[messages.ModelStreamInferResponse]) -> list[str]:
    return [answer.infer_response.id for answer in answers]


def is_final(answer: messages.ModelStreamInferResponse) -> bool:
    return answer.infer_response.parameters["triton_final_response"].bool_param


async def test_a_text_comes_in_pieces_and_the_last_one_says_so(inference: Inference, service: Any) -> None:
    stream = Stream(inference)
    stream.send(write("a"))
    answers = await stream.end()
    pieces = [answer.infer_response.raw_output_contents[0] for answer in answers]
    assert pieces == [text(piece) for piece in service.pieces]
    assert [is_final(answer) for answer in answers] == [False, False, True]
    assert ids(answers) == ["a", "a", "a"]
    assert not any(answer.error_message for answer in answers)


async def test_other_models_answer_once(inference: Inference) -> None:
    stream = Stream(inference)
    stream.send(embed("e"))
    (answer,) = await stream.end()
    output = answer.infer_response.outputs[0]
    assert (output.name, output.datatype, list(output.shape)) == ("embedding", "FP32", [1, 4])
    assert np.frombuffer(answer.infer_response.raw_output_contents[0], np.float32)[2] == -3
    assert is_final(answer)


async def test_one_response_each_goes_out_in_the_order_of_requests(inference: Inference, service: Any) -> None:
    first_may_go = asyncio.Event()
    embed_at_once = service.embed

    async def embed_first_last(request: Any) -> Any:
        if request.input == ("first",):
            await first_may_go.wait()
        else:
            first_may_go.set()
        return await embed_at_once(request)

    service.embed = embed_first_last
    stream = Stream(inference)
    stream.send(embed("1", "first"), embed("2", "second"), embed("3", "third"))
    assert ids(await stream.end()) == ["1", "2", "3"]
    assert service.requests[0].input == ("second",)


async def test_a_text_does_not_wait_for_what_was_asked_before(inference: Inference, service: Any) -> None:
    service.gate.clear()  # neither answers
    embed_later, stream = asyncio.Event(), Stream(inference)
    embed_at_once = service.embed

    async def slow(request: Any) -> Any:
        await embed_later.wait()
        return await embed_at_once(request)

    service.embed = slow
    stream.send(embed("e"), write("t"), embed("f"))
    service.gate.set()
    await stream.until(3)
    assert ids(stream.answers) == ["t", "t", "t"]
    embed_later.set()
    assert ids(await stream.end())[3:] == ["e", "f"]


async def test_one_response_does_not_wait_for_a_text_in_work(inference: Inference, service: Any) -> None:
    service.gate.clear()
    stream = Stream(inference)

    async def answered(request: Any) -> Any:
        service.gate.set()
        result = await embed_at_once(request)
        service.gate.clear()
        return result

    embed_at_once, service.embed = service.embed, answered
    stream.send(write("t"))
    while not service.requests:  # the text has begun, and the gate holds it
        await asyncio.sleep(0)
    stream.send(embed("e"))
    await stream.until(1)
    assert "e" in ids(stream.answers)
    service.gate.set()
    assert sorted(ids(await stream.end())) == ["e", "t", "t", "t"]


async def test_an_error_is_an_answer_and_the_stream_goes_on(inference: Inference) -> None:
    stream = Stream(inference)
    bad = embed("b")
    bad.raw_input_contents[0] = b"torn"
    stream.send(write("a", model="nothing"), bad, DecodeError("no message"), embed("c"))
    answers = await stream.end()
    assert "nothing" in answers[0].error_message
    assert "text" in answers[1].error_message
    assert "not a message" in answers[2].error_message
    assert ids(answers) == ["a", "b", "", "c"]
    assert is_final(answers[0])
    assert not answers[3].error_message


async def test_an_error_in_the_middle_of_a_text_ends_that_text(inference: Inference, service: Any) -> None:
    service.error = lambda position: QueueFull("too many") if position == 1 else None
    stream = Stream(inference)
    stream.send(write("a"))
    first, second = await stream.end()
    assert first.infer_response.raw_output_contents[0] == text("Hel")
    assert (second.error_message, second.infer_response.id) == ("too many", "a")


async def test_errors_end_the_stream_where_the_client_wants_that(inference: Inference, service: Any) -> None:
    service.gate.clear()
    stream = Stream(inference, errors_end_it=True)
    stream.send(embed("waits"))
    while not service.requests:
        await asyncio.sleep(0)
    stream.send(write("a", model="nothing"))
    with pytest.raises(UnknownModel, match="nothing"):
        await asyncio.wait_for(stream.task, 5)
    assert (stream.answers, service.num_cancelled) == ([], 1)


async def test_a_message_that_is_none_can_end_it_too(inference: Inference) -> None:
    stream = Stream(inference, errors_end_it=True)
    stream.send(DecodeError("no message"))
    with pytest.raises(InvalidRequest):
        await asyncio.wait_for(stream.task, 5)


async def test_a_client_that_goes_ends_all_work_on_its_stream(inference: Inference, service: Any) -> None:
    service.gate.clear()
    stream = Stream(inference)
    stream.send(embed("a"), embed("b"))
    while len(service.requests) < 2:
        await asyncio.sleep(0)
    stream.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.task
    assert service.num_cancelled == 2


async def test_only_so_many_requests_of_a_stream_are_in_work(
    inference: Inference, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "MAX_CONCURRENT", 2)
    service.gate.clear()
    stream = Stream(inference)
    stream.send(*(embed(str(number)) for number in range(5)))
    for _ in range(50):
        await asyncio.sleep(0)
    assert (stream.num_reads, len(service.requests)) == (3, 2)
    service.gate.set()
    assert ids(await stream.end()) == ["0", "1", "2", "3", "4"]
