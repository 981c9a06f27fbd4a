"""The benchmark of deltas: what it makes of a pair of models keeps what makes them a pair."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.seeding import seeded_rng

from infra.bench.delta_families import checkpoints, repeated, to_int8
from infra.bench.deltas import _encoded_bytes, _zipnn_sizes
from weights.reading.delta_codec import CHUNK_BYTES, encode_chunk

ADDER = Path("infra/demo/models/adder")
# Takes half of what it is given, and of a difference a quarter.
ZIPNN = """
class ZipNN:
    def __init__(self, input_format, bytearray_dtype, delta_compressed_type=0):
        assert (input_format, bytearray_dtype) in (("byte", "bfloat16"), ("byte", "float32"))
        self.is_difference = bool(delta_compressed_type)

    def compress(self, data, delta_second_data=None):
        assert self.is_difference == (delta_second_data is not None)
        return bytes(len(data) // (4 if self.is_difference else 2))
"""


def test_a_larger_pair_differs_as_the_given_one() -> None:
    base = {"w": torch.randn(20, 30), "b": torch.randn(7)}
    tuned = {name: torch.where(torch.rand(tensor.shape) < 0.3, 0.0, tensor) for name, tensor in reversed(base.items())}
    large = [repeated(tensors, 10 * 4 * 607) for tensors in (base, tuned)]
    assert [found["w"].shape for found in large] == [(200, 30)] * 2
    assert [found["b"].shape for found in large] == [(70,)] * 2
    for name in base:
        num_equal = int((base[name] == tuned[name]).sum())
        assert int((large[0][name] == large[1][name]).sum()) == 10 * num_equal


def test_int8_is_near_what_was_given() -> None:
    given = {"w": torch.randn(8, 64), "norm": torch.randn(64)}
    stored = to_int8(given)
    assert stored["w"].dtype == torch.int8
    found = stored["w"].float() * stored["w_scale"][:, None]
    assert torch.all((found - given["w"]).abs() <= 0.51 * stored["w_scale"][:, None])


def test_checkpoints_are_of_one_training() -> None:
    first, second = checkpoints(ADDER, "lora-merged", (1, 2))
    (longer,) = checkpoints(ADDER, "full-strong", (1,))
    assert first.keys() == second.keys() == longer.keys()
    assert {tensor.dtype for found in (first, longer) for tensor in found.values()} == {torch.bfloat16}
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert changed
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in changed)
    assert sum(not torch.equal(first[name], longer[name]) for name in first) > len(first) // 2


def test_the_bytes_of_a_tensor_are_those_of_its_chunks() -> None:
    rng = seeded_rng()
    num_items = CHUNK_BYTES // 2 + 500
    base = torch.from_numpy(rng.integers(-1000, 1000, num_items, "int16"))
    tuned = base + torch.from_numpy(rng.integers(0, 3, num_items, "int16"))
    given, other = (found.numpy().view("uint8") for found in (tuned, base))
    parts = [slice(0, CHUNK_BYTES), slice(CHUNK_BYTES, None)]
    expected = sum(len(encode_chunk(given[part], 2, other[part])) for part in parts)
    assert _encoded_bytes(tuned, base) == expected < 0.5 * given.nbytes


@pytest.mark.long
def test_the_judge_is_asked_in_its_own_process(tmp_path: Path) -> None:
    tuned = {"a": torch.ones(40), "b": torch.ones(8, dtype=torch.bfloat16), "i": torch.ones(6, dtype=torch.int8)}
    assert _zipnn_sizes(tuned, tuned, tmp_path, tmp_path / "not installed") == {}
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "zipnn.py").write_text(ZIPNN)
    found = _zipnn_sizes(tuned, tuned, tmp_path, tmp_path / "judge")
    assert found == {"a": (80, 40), "b": (8, 4), "i": (6, 6), "": (94, 50)}
