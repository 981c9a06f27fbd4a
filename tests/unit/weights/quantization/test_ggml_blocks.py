"""Q8_0 and Q4_0 against gguf-py on fresh random matrices, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from kit.seeding import seeded_rng

from infra.offline.gguf_export import _quantize_blocks
from weights.records.errors import WeightsError

KINDS = ("Q8_0", "Q4_0")


def matrices() -> list[np.ndarray]:
    draw = seeded_rng()
    plain = draw.standard_normal((64, 96)).astype(np.float32)
    halves = draw.integers(-9, 10, (32, 64)).astype(np.float32) / 2  # ties: halves away from zero
    ties = np.repeat(draw.standard_normal((16, 1)), 64, axis=1).astype(np.float32)  # several largest of a block
    ties[:, ::2] *= -1
    zeros = plain.copy()
    zeros[:, 32:64] = 0
    return [plain, plain * 1e-4, plain * 1e4, halves, ties, zeros, plain.reshape(4, 16, 96)]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_gguf_py(kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    for matrix in matrices():
        packed = _quantize_blocks(kind, matrix)
        assert np.array_equal(packed, gguf.quants.quantize(matrix, type_))


@pytest.mark.parametrize("kind", KINDS)
def test_too_small_for_a_scale_becomes_zeros(kind: str) -> None:
    tiny = np.float32(1e-43) * np.arange(-16, 16, dtype=np.float32)[None]
    assert not gguf.quants.dequantize(_quantize_blocks(kind, tiny), gguf.GGMLQuantizationType[kind]).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.zeros((2, 33), np.float32), r"rows of shape \[2, 33\] are no whole number of blocks of 32"),
        (np.array([[1.0, np.nan] * 16], np.float32), "cannot express the infinities or NaNs"),
        (np.array([[1.0, -np.inf] * 16], np.float32), "cannot express the infinities or NaNs"),
        (np.full((1, 32), 3e38, np.float32), "cannot express values of 3e.38: its scales are float16"),
    ],
)
def test_what_blocks_cannot_express_is_refused(kind: str, matrix: np.ndarray, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        _quantize_blocks(kind, matrix)
