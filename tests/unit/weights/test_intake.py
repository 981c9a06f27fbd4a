"""One door in and one out: checkpoints and programs find their rooms by themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from kit.seeding import seeded_rng
from onnx.helper import make_graph, make_model, make_node, make_tensor_value_info
from onnx.numpy_helper import from_array, to_array
from safetensors.torch import load_file

from weights.operations.intake import import_model, write_back
from weights.records.errors import StoreError, WeightsError
from weights.storage.store import WeightStore


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    weight = seeded_rng().standard_normal((64, 8)).astype(np.float32)
    graph = make_graph(
        [make_node("MatMul", ["x", "w"], ["y"])],
        "tiny",
        [make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 64])],
        [make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 8])],
        [from_array(weight, "w")],
    )
    onnx.save(make_model(graph), tmp_path / "tiny.onnx")
    return tmp_path / "tiny.onnx"


def test_a_checkpoint_folder(store: WeightStore, write_model, tmp_path: Path) -> None:
    tensors = {"w": torch.randn(5, 3)}
    assert import_model(store, "m", write_model("m", tensors), layout="separate").layout == "separate"
    write_back(store, "m", tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back/model.safetensors")["w"], tensors["w"])


@pytest.mark.parametrize("external", [False, True])
def test_an_onnx_program(store: WeightStore, onnx_file: Path, tmp_path: Path, external: bool) -> None:
    assert import_model(store, "m", onnx_file).kind == "program"
    target = tmp_path / "back/tiny.onnx"
    write_back(store, "m", target, external=external)
    assert target.with_name("tiny.onnx.data").exists() == external
    (given,), (back,) = onnx.load(onnx_file).graph.initializer, onnx.load(target).graph.initializer
    assert np.array_equal(to_array(given), to_array(back))
    with pytest.raises(StoreError, match="exists already"):
        write_back(store, "m", target)


def test_a_torch_program_only_on_request(store: WeightStore, tmp_path: Path) -> None:
    module = torch.nn.Linear(6, 2)
    example = torch.randn(3, 6)
    torch.export.save(torch.export.export(module, (example,)), tmp_path / "linear.pt2")
    with pytest.raises(WeightsError, match="allow"):
        import_model(store, "m", tmp_path / "linear.pt2")
    assert import_model(store, "m", tmp_path / "linear.pt2", allow_torch=True).kind == "program"
    write_back(store, "m", tmp_path / "back.pt2")
    again = torch.export.load(tmp_path / "back.pt2").module()
    assert torch.equal(again(example), module(example))


def test_options_that_do_not_fit(store: WeightStore, onnx_file: Path, write_model, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no dtype to cast"):
        import_model(store, "m", onnx_file, dtype="float16")
    import_model(store, "m", write_model("m", {"w": torch.zeros(1)}))
    with pytest.raises(WeightsError, match="only an ONNX model"):
        write_back(store, "m", tmp_path / "back", external=True)
    with pytest.raises(StoreError, match="stored: m"):
        write_back(store, "gone", tmp_path / "back")
