"""Dense heads against sentence-transformers' own module on the same folder, and against the plain formula."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers.sentence_transformer.modules import Dense
from torch import nn

from deployments.engines.records.protocol import ComputationFailed, EngineError
from deployments.engines.text.known import ACTIVATIONS
from deployments.engines.text.sentence_layers import DenseHead, load_dense_head

STOCK_ACTIVATIONS = [nn.Identity(), nn.Tanh(), nn.ReLU(), nn.GELU(), nn.Sigmoid()]


def saved(folder: Path, **settings: Any) -> Dense:
    """A stock module with random weights, in `folder`."""
    stock = Dense(**{"in_features": 7, "out_features": 5, **settings})
    stock.save(str(folder))
    return stock


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def head_of(folder: Path) -> DenseHead:
    return load_dense_head(folder, load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("activation", STOCK_ACTIVATIONS, ids=lambda module: type(module).__name__)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_stock(tmp_path: Path, activation: nn.Module, bias: bool) -> None:
    saved(tmp_path, activation_function=activation, bias=bias)
    x_BD = 3 * torch.randn(9, 7)
    expected = Dense.load(str(tmp_path))({"sentence_embedding": x_BD})["sentence_embedding"]
    assert torch.allclose(head_of(tmp_path).apply(x_BD), expected, atol=1e-6)


def test_every_known_activation_was_compared() -> None:
    names = {f"{type(module).__module__}.{type(module).__name__}" for module in STOCK_ACTIVATIONS}
    assert names == set(ACTIVATIONS)


@pytest.mark.parametrize("out_features", [7, 5])
def test_a_residual_is_added_behind_the_activation(tmp_path: Path, out_features: int) -> None:
    stock = saved(tmp_path, out_features=out_features, use_residual=True)
    assert ("residual.weight" in load_file(tmp_path / "model.safetensors")) == (out_features == 5)
    x_BD = torch.randn(4, 7)
    assert torch.allclose(
        head_of(tmp_path).apply(x_BD), stock({"sentence_embedding": x_BD})["sentence_embedding"], atol=1e-6
    )


def test_what_the_config_leaves_out_is_as_in_stock(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "config.json").write_text('{"in_features": 7, "out_features": 5}')
    x_BD = torch.randn(4, 7)
    expected = Dense.load(str(tmp_path))({"sentence_embedding": x_BD})["sentence_embedding"]
    assert torch.allclose(head_of(tmp_path).apply(x_BD), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_plain_formula(tmp_path: Path, dtype: torch.dtype) -> None:
    """In float32 for halves: the stored weights are rounded, the sums are not."""
    saved(tmp_path, activation_function=nn.Identity())
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    head = load_dense_head(tmp_path, tensors)
    x_BD = torch.randn(6, 7).to(dtype)
    weight, bias = tensors["linear.weight"].tolist(), tensors["linear.bias"].tolist()
    plain = [
        [
            math.fsum([b, *(w * x for w, x in zip(row, vector, strict=True))])
            for row, b in zip(weight, bias, strict=True)
        ]
        for vector in x_BD.tolist()
    ]
    scores = head.apply(x_BD)
    assert scores.dtype == head.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(scores.double(), torch.tensor(plain, dtype=torch.float64), atol=2e-6, rtol=0)


def test_tensors_are_used_where_they_are(tmp_path: Path) -> None:
    saved(tmp_path, activation_function=nn.Identity(), bias=False)
    tensors = load_file(tmp_path / "model.safetensors")
    head = load_dense_head(tmp_path, tensors)
    x_BD = torch.randn(3, 7)
    before = head.apply(x_BD)
    tensors["linear.weight"].mul_(2)
    assert torch.allclose(head.apply(x_BD), 2 * before, atol=1e-6)
    assert not head.apply(x_BD).requires_grad


def test_out_is_written_and_given_back(tmp_path: Path) -> None:
    saved(tmp_path)
    head = head_of(tmp_path)
    x_BD = torch.randn(3, 7)
    whole = torch.full((5, 5), 9.0)
    out = whole[1:4]
    assert head.apply(x_BD, out=out) is out
    assert torch.equal(out, head.apply(x_BD))
    assert (whole[[0, 4]] == 9).all()
    assert head.apply(torch.empty(0, 7)).shape == (0, 5)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(7), torch.zeros(2, 6), torch.zeros(2, 3, 7), torch.zeros(2, 7, dtype=torch.long)],
)
def test_other_inputs_are_refused(tmp_path: Path, x: torch.Tensor) -> None:
    saved(tmp_path)
    with pytest.raises(EngineError, match=r"expected floating vectors \(B, 7\), got torch\.\w+ \["):
        head_of(tmp_path).apply(x)


@pytest.mark.parametrize("out", [torch.zeros(2, 5), torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.float16)])
def test_other_outputs_are_refused(tmp_path: Path, out: torch.Tensor) -> None:
    saved(tmp_path)
    with pytest.raises(EngineError, match=r"expected an output of torch\.float32 \[3, 5\], got"):
        head_of(tmp_path).apply(torch.zeros(3, 7), out=out)


def test_labels_in_the_order_of_the_outputs(tmp_path: Path) -> None:
    saved(tmp_path)
    assert head_of(tmp_path).labels is None
    edited(tmp_path, id2label={str(number): f"kind {number}" for number in (3, 1, 0, 4, 2)})
    assert head_of(tmp_path).labels == ("kind 0", "kind 1", "kind 2", "kind 3", "kind 4")
    assert (head_of(tmp_path).in_features, head_of(tmp_path).out_features) == (7, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "somebody.Tanh"}, r"unknown activation_function 'somebody\.Tanh' \(known: torch\.nn"),
        ({"activation_function": None}, "activation_function: expected a text, got None"),
        ({"module_input_name": "token_embeddings"}, "a Dense module over 'token_embeddings', expected 'sentence_emb"),
        ({"in_features": 8}, r"'linear\.weight' has shape \[5, 7\], config\.json asks for \[5, 8\]"),
        ({"bias": False}, r"unexpected tensor 'linear\.bias'"),
        ({"use_residual": True}, r"no tensor 'residual\.weight'"),
    ],
)
def test_folders_that_make_no_head(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    saved(tmp_path)
    with pytest.raises(EngineError, match=message):
        head_of(edited(tmp_path, **changes))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        load_dense_head(tmp_path, {})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    saved(tmp_path)
    head, x_BD = head_of(tmp_path), torch.randn(4, 7)
    x_BD[2, 3] = value
    with pytest.raises(EngineError, match="expected finite numbers"):
        head.apply(x_BD)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["linear.bias"][1] = value
    with pytest.raises(ComputationFailed, match="not finite"):
        load_dense_head(edited(tmp_path, activation_function="torch.nn.modules.linear.Identity"), tensors).apply(
            torch.randn(4, 7)
        )
