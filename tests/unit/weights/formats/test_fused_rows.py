"""Tensors that hold several matrices are read as runs of the file, of which each is what torch's chunk gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kit.seeding import seeded_rng
from safetensors.numpy import save_file

from weights.formats.safetensors import read_header
from weights.formats.tensors import FileTensor, split_rows
from weights.records.errors import FormatError


@pytest.mark.parametrize(
    ("model_type", "name", "parts"),
    [
        ("nomic_bert", "encoder.layers.0.attn.Wqkv", ("q_proj", "k_proj", "v_proj")),
        ("jina_embeddings_v3", "encoder.layers.0.mixer.Wqkv", ("q_proj", "k_proj", "v_proj")),
        ("gte", "encoder.layer.0.mlp.up_gate_proj", ("up_proj", "gate_proj")),
    ],
)
def test_parts_are_the_rows_one_after_the_other(
    tmp_path: Path, model_type: str, name: str, parts: tuple[str, ...]
) -> None:
    whole = {
        f"{name}.weight": seeded_rng().random((12, 5), np.float32),
        f"{name}.bias": seeded_rng().random(12, np.float32),
        "norm.weight": np.ones(3, np.float16),
    }
    save_file(whole, tmp_path / "model.safetensors")
    tensors = read_header(tmp_path / "model.safetensors").tensors
    found = split_rows(model_type, tensors)
    assert len(found) == 2 * len(parts) + 1
    assert found["norm.weight"] is tensors["norm.weight"]
    for leaf in ("weight", "bias"):
        expected = dict(zip(parts, np.split(whole[f"{name}.{leaf}"], len(parts)), strict=True))
        for key, tensor in found.items():
            part, _, of = key.rpartition(".")
            if of == leaf and (stem := part.rpartition(".")[2]) in expected:
                array = np.frombuffer(tensor.read(), np.float32).reshape(tensor.shape)
                assert np.array_equal(array, expected.pop(stem))
        assert expected == {}
    assert split_rows("bert", tensors) == dict(tensors)


@pytest.mark.parametrize("shape", [(4, 5), ()])
def test_rows_of_no_whole_parts_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = FileTensor(tmp_path / "model.safetensors", 0, 4, "F32", shape)
    with pytest.raises(FormatError, match=r"attn.Wqkv.weight' has shape .*, expected 3 parts of rows"):
        split_rows("nomic_bert", {"layers.0.attn.Wqkv.weight": tensor})
