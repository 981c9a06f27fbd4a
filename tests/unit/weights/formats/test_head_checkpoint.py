"""Dense modules as models of kind "head": recognised, stored, cast, written back; and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from weights.formats.checkpoint import read_checkpoint
from weights.formats.dense_head import read_dense_config
from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.layouts import convert, write_inline
from weights.operations.maintenance import summarize
from weights.operations.repair import verify
from weights.records.errors import FormatError
from weights.storage.store import WeightStore

IN, OUT = 5, 7  # fixed: they are in the names of tests, which every process must collect alike
TANH = "torch.nn.modules.activation.Tanh"
LABELS = {str(number): f"label {number}" for number in range(OUT)}


def tensors_of(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Those of a good head; None leaves one out. Keys have `_` for the dot."""
    tensors = {"linear_weight": torch.randn(OUT, IN), "linear_bias": torch.randn(OUT)} | changes
    return {name.replace("_", "."): tensor for name, tensor in tensors.items() if tensor is not None}


def write_head(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    config = {"in_features": IN, "out_features": OUT, "bias": True, "activation_function": TANH} | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_dense_folder_is_a_head(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", tensors_of(), id2label=LABELS)
    checkpoint = read_checkpoint(folder)
    (component,) = checkpoint.components
    assert (checkpoint.kind, checkpoint.class_name) == ("head", "Dense")
    assert (component.name, component.library, component.class_name) == ("model", "sentence_transformers", "Dense")
    assert {str(file) for file in checkpoint.skeleton_files()} == {"config.json"}
    assert read_dense_config(folder / "config.json").labels == tuple(LABELS.values())


def test_a_model_with_such_keys_is_no_head(write_model) -> None:
    folder = write_model("m", tensors_of(), architectures=["TinyModel"], in_features=IN, out_features=OUT)
    assert read_checkpoint(folder).kind == "embedding"


@pytest.mark.parametrize("use_residual", [True, False])
def test_the_other_shapes_that_stock_writes(tmp_path: Path, use_residual: bool) -> None:
    residual = torch.randn(OUT, IN) if use_residual and IN != OUT else None
    tensors = tensors_of(linear_bias=None, residual_weight=residual)
    folder = write_head(tmp_path / "head", tensors, bias=False, use_residual=use_residual)
    assert set(read_checkpoint(folder).components[0].tensors) == set(tensors)


@pytest.mark.parametrize("layout", ["combined", "separate", "inline"])
def test_a_head_goes_through_the_store(tmp_path: Path, layout: Any) -> None:
    store = WeightStore(tmp_path / "store")
    tensors = tensors_of()
    folder = write_head(tmp_path / "head", tensors, id2label=LABELS)
    manifest = externalize(store, "kinds", folder, layout=layout)
    assert (manifest.kind, manifest.class_name, manifest.layout) == ("head", "Dense", layout)
    assert [(row.name, row.shape) for row in summarize(store, "kinds")] == [
        (name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items())
    ]
    report = verify(store, "kinds")
    assert not report.damages
    ours = load_from_store(tmp_path / "store", "kinds")["model"]
    assert all(torch.equal(ours[name], tensor) for name, tensor in tensors.items())
    convert(store, "kinds", "separate" if layout == "combined" else "combined")
    write_inline(store, "kinds", tmp_path / "back")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()


def test_a_head_is_cast_like_others(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of().items()}
    folder = write_head(tmp_path / "head", tensors)
    store = WeightStore(tmp_path / "store")
    externalize(store, "kinds", folder, dtype="float32")
    ours = load_from_store(tmp_path / "store", "kinds")["model"]
    assert all(torch.equal(ours[name], tensor.float()) for name, tensor in tensors.items())
    write_inline(store, "kinds", tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors")["linear.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_weight": None},
            r"no tensor 'linear\.weight'; expected linear\.weight, linear\.bias, got linear\.bias",
        ),
        ({"linear_bias": None}, r"no tensor 'linear\.bias'"),
        ({"linear_other": torch.zeros(1)}, r"unexpected tensor 'linear\.other', config\.json asks for linear\.w"),
        (
            {"linear_weight": torch.zeros(OUT, IN + 1)},
            rf"'linear\.weight' has shape \[{OUT}, {IN + 1}\], config\.json asks for \[{OUT}, {IN}\]",
        ),
        (
            {"linear_bias": torch.zeros(OUT, 1)},
            rf"'linear\.bias' has shape \[{OUT}, 1\], config\.json asks for \[{OUT}\]",
        ),
        (
            {"linear_weight": torch.zeros(OUT, IN, dtype=torch.int8)},
            r"'linear\.weight' is I8, expected a floating type",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_head(tmp_path / "head", tensors_of(**changes))
    with pytest.raises(FormatError, match=rf"model\.safetensors: .*{message}"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 0}, "in_features: expected a positive integer, got 0"),
        ({"in_features": True}, "in_features: expected a positive integer, got True"),
        ({"out_features": "4"}, "out_features: expected a positive integer, got '4'"),
        ({"out_features": 10**12, "id2label": LABELS}, "id2label: expected a different name"),
        ({"bias": 1}, "bias: expected true or false, got 1"),
        ({"activation_function": ["x"]}, "activation_function: expected a text"),
        ({"use_residual": None}, "use_residual: expected true or false, got None"),
        ({"id2label": [*LABELS.values()]}, f"id2label: expected a different name for each of 0 to {OUT - 1}"),
        ({"id2label": LABELS | {"0": "label 1"}}, "id2label: expected a different name"),
        ({"id2label": LABELS | {"0": 7}}, "id2label: expected a different name"),
        ({"id2label": {f"x{key}": label for key, label in LABELS.items()}}, "id2label: expected a different name"),
    ],
)
def test_a_damaged_config_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_head(tmp_path / "head", tensors_of(), **changes)
    with pytest.raises(FormatError, match=rf"config\.json: {message}"):
        read_checkpoint(folder)


def test_damaged_weights(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", tensors_of())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"model\.safetensors.*truncated"):
        read_checkpoint(folder)
    file.unlink()
    with pytest.raises(FormatError, match="no safetensors weights beside"):
        read_checkpoint(folder)


def test_pickled_weights_are_read_only_when_allowed(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", tensors_of())
    (folder / "model.safetensors").unlink()
    torch.save(tensors_of(), folder / "pytorch_model.bin")
    with pytest.raises(FormatError, match="allow_torch"):
        read_checkpoint(folder)
    assert read_checkpoint(folder, allow_torch=True).kind == "head"
