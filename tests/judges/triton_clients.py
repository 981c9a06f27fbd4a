"""tritonclient's two transports behind the few calls that the scripts make of both."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from observing import SLOW_S, Place
from tritonclient.utils import np_to_triton_dtype

Inputs = Mapping[str, np.ndarray]


def texts(*values: str | bytes) -> np.ndarray:
    """BYTES of shape (n,)."""
    array = np.empty(len(values), dtype=np.object_)
    array[:] = [value.encode() if isinstance(value, str) else value for value in values]
    return array


def datatype_of(array: np.ndarray) -> str:
    return str(np_to_triton_dtype(array.dtype))


class Http:
    """`binary`: tensors travel as raw bytes, both ways; else as JSON."""

    name = "http"

    def __init__(self, where: Place) -> None:
        self.client = over_http.InferenceServerClient(where.host, concurrency=16, network_timeout=SLOW_S)

    def tensor(self, name: str, array: np.ndarray, datatype: str = "", *, binary: bool = True) -> Any:
        tensor = over_http.InferInput(name, array.shape, datatype or datatype_of(array))
        return tensor.set_data_from_numpy(array, binary_data=binary)

    def wish(self, name: str, *, binary: bool = True, classes: int = 0) -> Any:
        return over_http.InferRequestedOutput(name, binary_data=binary, class_count=classes)

    def infer(
        self, model: str, inputs: Inputs, outputs: Sequence[str] = (), *, binary: bool = True, **options: Any
    ) -> Any:
        tensors = [self.tensor(name, array, binary=binary) for name, array in inputs.items()]
        wishes = options.pop("wishes", None) or [self.wish(name, binary=binary) for name in outputs] or None
        return self.client.infer(model, tensors, outputs=wishes, **options)

    def together(self, model: str, requests: Sequence[Inputs]) -> list[Any]:
        """All of them at once."""
        pending = [
            self.client.async_infer(model, [self.tensor(name, array) for name, array in inputs.items()])
            for inputs in requests
        ]
        return [answer.get_result() for answer in pending]


class Grpc:
    name = "grpc"

    def __init__(self, where: Place) -> None:
        self.client = over_grpc.InferenceServerClient(where.grpc)

    def tensor(self, name: str, array: np.ndarray, datatype: str = "", *, binary: bool = True) -> Any:
        tensor = over_grpc.InferInput(name, array.shape, datatype or datatype_of(array))
        return tensor.set_data_from_numpy(array)

    def wish(self, name: str, *, binary: bool = True, classes: int = 0) -> Any:
        return over_grpc.InferRequestedOutput(name, class_count=classes)

    def infer(
        self, model: str, inputs: Inputs, outputs: Sequence[str] = (), *, binary: bool = True, **options: Any
    ) -> Any:
        tensors = [self.tensor(name, array) for name, array in inputs.items()]
        wishes = options.pop("wishes", None) or [self.wish(name) for name in outputs] or None
        return self.client.infer(model, tensors, outputs=wishes, client_timeout=SLOW_S, **options)

    def together(self, model: str, requests: Sequence[Inputs]) -> list[Any]:
        """All of them at once, in the order of asking."""
        answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
        for number, inputs in enumerate(requests):
            tensors = [self.tensor(name, array) for name, array in inputs.items()]

            def done(result: Any, error: Any, number: int = number) -> None:
                answers.put((number, result, error))

            self.client.async_infer(model, tensors, done, client_timeout=SLOW_S)
        found = {}
        for _ in requests:
            number, result, error = answers.get(timeout=SLOW_S)
            if error is not None:
                raise error
            found[number] = result
        return [found[number] for number in range(len(requests))]

    def stream(self, requests: Sequence[tuple[str, Inputs]], **options: Any) -> list[tuple[Any, Any]]:
        """Every (result, error) of one ModelStreamInfer call, until each request has had its last."""
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            for number, (model, inputs) in enumerate(requests):
                tensors = [self.tensor(name, array) for name, array in inputs.items()]
                self.client.async_stream_infer(model, tensors, request_id=str(number), **options)
            found: list[tuple[Any, Any]] = []
            num_open = len(requests)
            while num_open:
                result, error = answers.get(timeout=SLOW_S)
                found.append((result, error))
                num_open -= error is not None or is_final(result)
        finally:
            self.client.stop_stream()
        return found


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def decoded(array: np.ndarray) -> list[str]:
    """A BYTES output as texts."""
    return [element.decode() if isinstance(element, bytes) else element for element in array.reshape(-1)]
