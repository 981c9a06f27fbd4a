"""Random tensors of every datatype and many shapes to a server that gives them back, in every way to write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.grpc.service_pb2 as messages
from observing import SLOW_S, place, write
from triton_clients import Grpc, Http
from tritonclient.grpc import InferResult

WHERE = place()
RNG = np.random.default_rng(WHERE.asked["seed"])
SMALL = ((), (3,), (1, 1), (2, 3), (1, 0, 4), (4, 1, 3, 2), (1, 2, 1, 2, 5))
LARGE = 2**18  # bytes: many times what proxies and gRPC pass on at once
INTEGERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
FLOATS = {"FP16": np.float16, "BF16": ml_dtypes.bfloat16, "FP32": np.float32, "FP64": np.float64}
# Neither specification has a way to write them but raw bytes.
RAW_ONLY = ("FP16", "BF16")
DATATYPES = ("BOOL", *INTEGERS, *FLOATS, "BYTES")
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    **{"INT64": "int64_contents", "UINT64": "uint64_contents"},
    **{"FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents"},
}
Way = Callable[[str, str, np.ndarray], np.ndarray]


def drawn(datatype: str, shape: tuple[int, ...], *, raw: bool) -> np.ndarray:
    """Any bits at all where they travel `raw`, numbers and UTF-8 where they are written down."""
    if datatype == "BYTES":
        array = np.empty(math.prod(shape), dtype=np.object_)
        array[:] = [_element(raw=raw) for _ in range(array.size)]
        return array.reshape(shape)
    if datatype == "BOOL":
        return np.asarray(RNG.integers(0, 2, shape).astype(np.bool_))
    dtype = np.dtype(FLOATS[datatype] if datatype in FLOATS else datatype.lower())
    if datatype in FLOATS and not raw:
        return np.asarray(RNG.standard_normal(shape) * 10.0 ** RNG.integers(-30, 30)).astype(dtype)
    return np.frombuffer(RNG.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def _element(*, raw: bool) -> bytes:
    length = int(RNG.choice([0, 1, 5, 60]))
    if raw:
        return RNG.bytes(length)
    return "".join(RNG.choice(list('aß☃🎉 "\\\n\0'), length)).encode()


def large(datatype: str, *, raw: bool) -> np.ndarray:
    """About `LARGE`, as bytes or, not `raw`, as text."""
    if datatype == "BYTES":
        return drawn(datatype, (LARGE // 64, 2), raw=raw)
    itemsize = drawn(datatype, (1,), raw=raw).itemsize
    num_elements = LARGE // (itemsize if raw else 2 * itemsize + 2)
    return drawn(datatype, (4, num_elements // 4), raw=raw)


def difference(sent: np.ndarray, came: np.ndarray | None) -> str:
    """Empty when bits and shape are the same."""
    if came is None:
        return "nothing came back"
    if came.shape != sent.shape:
        return f"shape {came.shape} instead of {sent.shape}"
    if sent.dtype == np.object_:
        same = sent.reshape(-1).tolist() == [_as_bytes(element) for element in came.reshape(-1)]
    else:
        same = came.dtype == sent.dtype and came.tobytes() == sent.tobytes()
    return "" if same else f"other values of shape {sent.shape} ({came.dtype})"


def _as_bytes(element: Any) -> bytes:
    return element.encode() if isinstance(element, str) else bytes(element)


def ways(http: Http, grpc: Grpc) -> dict[str, Way]:
    def through(client: Http | Grpc, *, binary: bool) -> Way:
        def sent(model: str, datatype: str, array: np.ndarray) -> np.ndarray:
            answer = client.infer(model, {"value": array}, ["value"], binary=binary)
            return answer.as_numpy("value")

        return sent

    def contents(model: str, datatype: str, array: np.ndarray) -> np.ndarray:
        """The typed fields of the message, which tritonclient itself never writes."""
        request = messages.ModelInferRequest(model_name=model)
        tensor = request.inputs.add(name="value", datatype=datatype, shape=array.shape)
        getattr(tensor.contents, CONTENTS[datatype]).extend(array.reshape(-1).tolist())
        return InferResult(grpc.client._client_stub.ModelInfer(request, timeout=SLOW_S)).as_numpy("value")

    return {
        "http_raw": through(http, binary=True),
        "http_json": through(http, binary=False),
        "grpc_raw": through(grpc, binary=True),
        "grpc_contents": contents,
    }


def differences(way: str, send: Way, datatype: str) -> dict[str, Any]:
    raw = way.endswith("raw")
    arrays = [drawn(datatype, shape, raw=raw) for shape in SMALL] + [large(datatype, raw=raw)]
    found = [difference(array, send(f"{datatype}-{array.ndim}", datatype, array)) for array in arrays]
    return {"sent": len(arrays), "differences": [text for text in found if text]}


def observations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for way, send in ways(Http(WHERE), Grpc(WHERE)).items():
        for datatype in DATATYPES:
            if way.endswith("raw") or datatype not in RAW_ONLY:
                yield (
                    f"{way}.{datatype}",
                    lambda way=way, send=send, datatype=datatype: differences(way, send, datatype),
                )


if __name__ == "__main__":
    write(WHERE, observations())
