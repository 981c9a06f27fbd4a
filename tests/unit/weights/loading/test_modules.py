"""Modules around tensors that exist."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weights.loading.modules import materialize, tied_groups
from weights.records.errors import WeightsError


class Net(nn.Module):
    """Everything that a state dict may have: tied weights, buffers of both kinds, normalization, convolution."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("freqs", 1.0 / torch.arange(1, width + 1), persistent=False)
        self.register_buffer("steps", torch.arange(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.freqs
        x = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = self.attention(x, x, x)[0] * self.scale + self.steps.sum()
        return self.head(x)


@pytest.fixture
def stock() -> Net:
    return Net().eval()


def test_the_module_is_the_one_that_was_saved(stock: Net) -> None:
    ids = torch.randint(0, 20, (2, 7))
    built = materialize(Net, stock.state_dict()).eval()
    with torch.no_grad():
        assert torch.equal(built(ids), stock(ids))


def test_nothing_is_copied_and_nothing_needs_gradients(stock: Net) -> None:
    tensors = stock.state_dict()
    built = materialize(Net, tensors)
    for name, tensor in built.state_dict().items():
        assert tensor.data_ptr() == tensors[name].data_ptr()
    assert not any(parameter.requires_grad for parameter in built.parameters())


def test_no_parameter_is_allocated_or_drawn() -> None:
    tensors = Net().state_dict()
    seen: list[bool] = []

    def build() -> nn.Module:
        module = Net()
        seen.extend(module.get_parameter(name).is_meta for name in ("embed.weight", "conv.weight", "conv.bias"))
        return module

    state = torch.get_rng_state()
    materialize(build, tensors)
    assert seen == [True] * 3
    assert torch.equal(torch.get_rng_state(), state)


def test_one_name_of_tied_weights_is_enough(stock: Net) -> None:
    for name in ("embed.weight", "head.weight"):
        tensors = {key: value for key, value in stock.state_dict().items() if key != name}
        built = materialize(Net, tensors)
        assert built.head.weight is built.embed.weight
        assert built.head.weight.data_ptr() == stock.head.weight.data_ptr()


def test_buffers_that_are_not_saved_are_computed(stock: Net) -> None:
    built = materialize(Net, stock.state_dict())
    assert torch.equal(built.freqs, stock.freqs)
    assert built.freqs.device.type == "cpu"


def test_missing_tensors_are_named(stock: Net) -> None:
    tensors = stock.state_dict()
    del tensors["conv.bias"]
    with pytest.raises(WeightsError, match=r"^tensor 'conv.bias' missing for a Net$"):
        materialize(Net, tensors)
    with pytest.raises(WeightsError, match=r"^\d+ tensors \('scale', 'steps', 'embed.weight', …\) missing for a Net$"):
        materialize(Net, {})


def test_unexpected_tensors_are_named_or_ignored(stock: Net) -> None:
    tensors = stock.state_dict() | {"extra": torch.zeros(1)}
    with pytest.raises(WeightsError, match=r"^a Net has no place for tensor 'extra'$"):
        materialize(Net, tensors)
    assert "extra" not in materialize(Net, tensors, strict=False).state_dict()


def test_a_wrong_shape_is_named(stock: Net) -> None:
    tensors = stock.state_dict() | {"conv.bias": torch.zeros(5)}
    with pytest.raises(WeightsError, match=r"^tensor 'conv.bias' has shape \(5,\), a Net takes \(12,\)$"):
        materialize(Net, tensors)


def test_a_buffer_without_a_value_is_found() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty(4), persistent=False)

    with pytest.raises(WeightsError, match=r"tensor 'table' of a Forgotten got no value"):
        materialize(Forgotten, {})


def test_names_that_share_a_parameter_are_a_group_and_others_none() -> None:
    assert tied_groups(Net()) == [["embed.weight", "head.weight"]]
