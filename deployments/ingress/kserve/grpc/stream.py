"""One ModelStreamInfer call: requests as they come, each with one response or, of a text model, one per piece.

As in Triton, responses of text models (decoupled ones) go out when they are there, and all others in the order of
their requests. An error is a response with `error_message`, and the stream goes on; a client that sends the header
`triton_grpc_error: true` gets it as the status of the whole stream instead. `triton_final_response` is true on the
last response of each request, error or not, so no empty one has to follow it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from deployments.ingress.admission import Admission
from deployments.ingress.kserve.grpc.calls import parsed, read_infer, write_infer
from deployments.ingress.kserve.grpc.errors import status_of
from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.model_configuration import is_decoupled

MAX_CONCURRENT: Final = 64  # requests of one stream in work; the next ones wait in gRPC's own flow control
Turn = asyncio.Future[None]
Write = Callable[[messages.ModelStreamInferResponse], Awaitable[None]]


class InferStream:
    """`write` sends one response. With `errors_end_it`, `run` raises what a request raises."""

    def __init__(self, inference: Inference, write: Write, admission: Admission, *, errors_end_it: bool) -> None:
        self._admission = admission
        self._inference = inference
        self._write = write
        self._errors_end_it = errors_end_it
        self._room = asyncio.Semaphore(MAX_CONCURRENT)
        self._writing = asyncio.Lock()  # gRPC takes one write of a call at a time

    async def run(self, requests: AsyncIterator[Any]) -> None:
        """Returns when the client sends no more and everything is answered; a cancellation ends all work on it."""
        before = _settled()
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await self._room.acquire()
                    done = asyncio.get_running_loop().create_future()
                    task = tasks.create_task(self._answer(request, before, done))
                    task.add_done_callback(self._make_room)
                    before = done
        except* Exception as group:
            raise _first(group) from None

    async def _answer(self, request: Any, before: Turn, done: Turn) -> None:
        """`before` is done when the responses that go first are out, `done` when the next request's may go."""
        if await self._is_decoupled(request):
            before.add_done_callback(lambda _: _settle(done))
            await self._respond(request, _settled())
        else:
            await self._respond(request, before)
            _settle(done)

    async def _respond(self, request: Any, before: Turn) -> None:
        try:
            with self._admission.place():
                asked = await read_infer(request)
                async with aclosing(self._inference.infer_stream(asked)) as responses:
                    async for response in responses:
                        await self._send(before, infer_response=await write_infer(response))
        except Exception as error:
            if self._errors_end_it:
                raise
            _, text = status_of(error)
            await self._send(before, error_message=text, infer_response=_end_of(request))

    async def _send(self, before: Turn, **fields: Any) -> None:
        await asyncio.shield(before)
        async with self._writing:
            await self._write(messages.ModelStreamInferResponse(**fields))

    async def _is_decoupled(self, request: Any) -> bool:
        try:
            return is_decoupled(await self._inference.metadata(parsed(request).model_name))
        except Exception:  # the request's own answer says what is wrong
            return False

    def _make_room(self, _: asyncio.Task[None]) -> None:
        self._room.release()


def _end_of(request: Any) -> messages.ModelInferResponse:
    """Beside an error: whose it is, and that no more will come."""
    if not isinstance(request, messages.ModelInferRequest):
        return messages.ModelInferResponse()
    final = {"triton_final_response": messages.InferParameter(bool_param=True)}
    return messages.ModelInferResponse(model_name=request.model_name, id=request.id, parameters=final)


def _settled() -> Turn:
    turn: Turn = asyncio.get_running_loop().create_future()
    turn.set_result(None)
    return turn


def _settle(turn: Turn) -> None:
    if not turn.done():
        turn.set_result(None)


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
