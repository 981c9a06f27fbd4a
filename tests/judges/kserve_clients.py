"""Observations of KServe's own clients of the cluster, over REST and over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from observing import SLOW_S, place, write

WHERE = place()
ASKED = WHERE.asked
Call = Callable[[], Coroutine[Any, Any, Any]]
Ask = Callable[[str, list[InferInput]], Coroutine[Any, Any, Any]]


def chat_inputs(*, binary: bool) -> list[InferInput]:
    chat = InferInput("chat", [1], "BOOL")
    chat.set_data_from_numpy(np.array([True]), binary_data=binary)
    prompt = InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([ASKED["sum"].encode()], dtype=np.object_), binary_data=binary)
    return [prompt, chat]


def _output(answer: Any, name: str) -> np.ndarray:
    array: np.ndarray = next(output for output in answer.outputs if output.name == name).as_numpy()
    return array


def _texts(array: np.ndarray) -> list[str]:
    return [element.decode() if isinstance(element, bytes) else element for element in array.reshape(-1)]


async def _chat(ask: Ask, *, binary: bool) -> list[str]:
    return _texts(_output(await ask("adder", chat_inputs(binary=binary)), "text_output"))


async def _embedding(ask: Ask, name: str) -> list[int]:
    inputs = InferInput("text", [len(ASKED["texts"])], "BYTES")
    inputs.set_data_from_numpy(np.array([text.encode() for text in ASKED["texts"]], dtype=np.object_), binary_data=True)
    return WHERE.keep(name, _output(await ask("minilm", [inputs]), "embedding"))


async def _refusal(call: Coroutine[Any, Any, Any]) -> str:
    try:
        return f"answered {await call!r:.100}"
    except Exception as error:
        return str(error)


def _over_rest(client: InferenceRESTClient) -> Iterator[tuple[str, Call]]:
    async def ask(model: str, inputs: list[InferInput]) -> Any:
        return await client.infer(WHERE.url, InferRequest(model, inputs), model_name=model)

    yield "live", lambda: client.is_server_live(WHERE.url)
    yield "ready", lambda: client.is_server_ready(WHERE.url)
    yield "model_ready", lambda: client.is_model_ready(WHERE.url, "adder")
    yield "chat", lambda: _chat(ask, binary=True)
    yield "chat_as_json", lambda: _chat(ask, binary=False)
    yield "embeddings", lambda: _embedding(ask, "kserve_rest")
    yield "refusal", lambda: _refusal(ask("minilm", chat_inputs(binary=False)))


def _over_grpc(client: InferenceGRPCClient) -> Iterator[tuple[str, Call]]:
    async def ask(model: str, inputs: list[InferInput]) -> Any:
        return await client.infer(InferRequest(model, inputs))

    yield "live", client.is_server_live
    yield "ready", client.is_server_ready
    yield "model_ready", lambda: client.is_model_ready("adder")
    yield "chat", lambda: _chat(ask, binary=True)
    yield "embeddings", lambda: _embedding(ask, "kserve_grpc")
    yield "refusal", lambda: _refusal(ask("minilm", chat_inputs(binary=True)))


async def _all() -> list[tuple[str, Callable[[], Any]]]:
    rest = InferenceRESTClient(RESTConfig(protocol="v2", timeout=SLOW_S))
    grpc = InferenceGRPCClient(WHERE.grpc, timeout=SLOW_S)
    calls = [(f"rest.{name}", call) for name, call in _over_rest(rest)]
    calls += [(f"grpc.{name}", call) for name, call in _over_grpc(grpc)]
    done = [(name, await asyncio.gather(call(), return_exceptions=True)) for name, call in calls]
    await rest.close()
    await grpc.close()
    return [(name, lambda result=result: _given(result)) for name, (result,) in done]


def _given(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result


if __name__ == "__main__":
    write(WHERE, asyncio.run(_all()))
