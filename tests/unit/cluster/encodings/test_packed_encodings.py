"""Several tensors in one array, and back."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.encodings.packed import ALIGN_BYTES, PackedTensor, join_tensors, split_tensors


def test_what_is_joined_is_split_again_as_it_was() -> None:
    rng = np.random.default_rng()
    tensors = {
        name: PackedTensor(rng.integers(0, 256, nbytes, np.uint8), "bfloat16", (nbytes // 2,))
        for name, nbytes in {"a": 2, "empty": 0, "b": 300, "c": 64}.items()
    }
    layout, data = join_tensors(tensors)
    back = split_tensors(layout, data)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].data.tobytes() == tensor.data.tobytes()
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
    assert all(place.offset % ALIGN_BYTES == 0 for place in layout)


def test_the_array_is_a_copy_that_nobody_writes_to() -> None:
    source = np.ones(8, np.uint8)
    layout, data = join_tensors({"a": PackedTensor(source, "uint8", (8,))})
    source[:] = 2
    assert data.tolist() == [1] * 8
    with pytest.raises(ValueError, match="read-only"):
        split_tensors(layout, data)["a"].data[0] = 3


def test_nothing_is_joined_to_nothing() -> None:
    layout, data = join_tensors({})
    assert (layout, data.nbytes, split_tensors(layout, data)) == ((), 0, {})
