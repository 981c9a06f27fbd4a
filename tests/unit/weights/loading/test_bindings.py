"""Other tensors in the same module: put in, taken out, and modules copied with their places."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weights.loading.modules import assign, copy_structure
from weights.records.errors import WeightsError


class Net(nn.Module):
    """Tied weights, a saved buffer, one that is not, a list of layers, a hook, a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)])
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(8.0))
        self.register_buffer("freqs", 1.0 / torch.arange(1, 9), persistent=False)
        self.options = {"scales": [1.0, 2.0]}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.freqs + self.steps
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.options["scales"][1]


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(tensor) for name, tensor in Net().state_dict().items() if name != "head.weight"}


def stock(weights: dict[str, torch.Tensor]) -> Net:
    net = Net().eval()
    net.load_state_dict({**weights, "head.weight": weights["embed.weight"]})
    return net


IDS = torch.randint(0, 20, (2, 5))


def test_other_tensors_are_bound_without_copies() -> None:
    net, first, second = Net().eval(), tensors(), tensors()
    binding = assign(net, first)
    binding.put_tensors(second)
    with torch.no_grad():
        assert torch.equal(net(IDS), stock(second)(IDS))
    assert {t.data_ptr() for t in net.state_dict().values()} == {t.data_ptr() for t in second.values()}
    assert net.head.weight is net.embed.weight
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_what_is_cleared_holds_no_tensor_until_others_are_put_in() -> None:
    net, weights = Net().eval(), tensors()
    binding = assign(net, weights)
    binding.clear()
    assert not any(tensor.numel() for tensor in net.state_dict().values())
    assert net.freqs.numel() == 8
    binding.put_tensors(weights)
    with torch.no_grad():
        assert torch.equal(net(IDS), stock(weights)(IDS))


def test_tensors_may_have_other_names() -> None:
    net, weights = Net().eval(), tensors()
    binding = assign(net, weights).renamed({name: f"old.{name}" for name in weights})
    second = tensors()
    binding.put_tensors({f"old.{name}": tensor for name, tensor in second.items()})
    with torch.no_grad():
        assert torch.equal(net(IDS), stock(second)(IDS))


def test_a_copy_has_places_of_its_own() -> None:
    net, first, second = Net().eval(), tensors(), tensors()
    binding = assign(net, first)
    copied, copied_binding = copy_structure(net, binding)
    copied_binding.put_tensors(second)
    with torch.no_grad():
        assert torch.equal(net(IDS), stock(first)(IDS))
        assert torch.equal(copied(IDS), stock(second)(IDS))
    assert copied.head.weight is copied.embed.weight
    assert copied.options == net.options
    assert copied.options is not net.options
    assert list(copied.state_dict()) == list(net.state_dict())
    copied.layers[0].register_forward_hook(lambda layer, args, output: output + 1)
    with torch.no_grad():
        assert torch.equal(net(IDS), stock(first)(IDS))
    binding.clear()
    assert not any(tensor.is_meta for tensor in copied.state_dict().values())


def test_a_module_with_a_function_of_its_own_is_not_copied() -> None:
    net = Net()
    binding = assign(net, tensors())
    net.layers[0].extra = lambda: net
    with pytest.raises(WeightsError, match="extra of a Linear is a function"):
        copy_structure(net, binding)
