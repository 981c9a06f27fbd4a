"""Tensors as records: every dtype and layout comes back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deployments.text.requests import pack, unpack

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    data = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = data.view(dtype).reshape(shape)
    packed = pack({"t": tensor})
    assert packed["t"].data.dtype == np.uint8
    back = unpack(packed)["t"]
    assert (back.dtype, back.shape, raw(back)) == (tensor.dtype, tensor.shape, raw(tensor))


def test_any_layout_is_packed_in_c_order() -> None:
    base = torch.arange(24.0).view(4, 6)
    views = {"transposed": base.T, "strided": base[::2, 1::2], "expanded": base[0].expand(3, 6)}
    back = unpack(pack(views))
    assert all(torch.equal(back[name], view) for name, view in views.items())


def test_a_parameter_is_packed_by_its_values() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert torch.equal(unpack(pack({"p": parameter}))["p"], torch.ones(3))


def test_what_is_unpacked_may_be_written_to() -> None:
    packed = pack({"t": torch.zeros(4)})
    packed["t"].data.flags.writeable = False
    back = unpack(packed)["t"]
    back += 1
    assert torch.equal(unpack(packed)["t"], torch.zeros(4))
