"""The summary of what a store has."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from weights.operations.externalize import externalize
from weights.operations.maintenance import StoreTotals, summarize, totals
from weights.records.errors import ModelNotStored
from weights.records.manifest import Layout
from weights.storage.store import WeightStore


@pytest.mark.parametrize("layout", ["combined", "separate", "inline"])
def test_every_tensor_is_where_the_summary_says(tmp_path: Path, write_pipeline, layout: Layout) -> None:
    tensors = {"w": torch.rand(30, 4), "b": torch.arange(7)}
    store = WeightStore(tmp_path / "store")
    externalize(store, "p", write_pipeline("p", {"vae": tensors, "unet": {"x": torch.rand(9)}}), layout=layout)
    weights = summarize(store, "p")
    assert {(weight.component, weight.name) for weight in weights} == {("vae", "w"), ("vae", "b"), ("unet", "x")}
    for weight in weights:
        file = store.path / weight.path
        data = file.read_bytes()[weight.offset : weight.offset + weight.nbytes]
        assert hashlib.sha256(data).hexdigest() == weight.id
        if weight.component == "vae":
            assert data == tensors[weight.name].numpy().tobytes()
            assert weight.shape == tuple(tensors[weight.name].shape)
    assert {weight.name: weight.dtype for weight in weights} == {"w": "F32", "b": "I64", "x": "F32"}


def test_totals_count_what_is_shared_once(tmp_path: Path, write_model) -> None:
    store = WeightStore(tmp_path / "store")
    shared, own = torch.rand(1024), torch.rand(256)
    externalize(store, "a", write_model("a", {"s": shared, "tied": shared.clone()}))
    externalize(store, "b", write_model("b", {"s": shared, "own": own}))
    assert totals(store, "a") == StoreTotals(1, 2, 2 * shared.nbytes, shared.nbytes)
    assert totals(store, "b") == StoreTotals(1, 2, shared.nbytes + own.nbytes, shared.nbytes + own.nbytes)
    assert totals(store) == StoreTotals(2, 4, 3 * shared.nbytes + own.nbytes, shared.nbytes + own.nbytes)
    externalize(store, "c", write_model("c", {"s": shared}), layout="inline")
    assert totals(store).stored_bytes == 2 * shared.nbytes + own.nbytes
    assert totals(WeightStore(tmp_path / "new")) == StoreTotals(0, 0, 0, 0)
    with pytest.raises(ModelNotStored, match="stored: a, b, c"):
        summarize(store, "x")
