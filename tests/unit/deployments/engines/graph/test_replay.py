"""Replays of small modules, on the host and as graphs of a card: the same bits on new inputs, and refusals.

The card is a double of `torch.cuda` (`kit/captures.py`), and its memory the host's.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kit.captures import Card
from torch import nn
from torch.nn import functional as F

from deployments.engines.graph.card_graphs import CardGraphs
from deployments.engines.graph.replay import MAX_RECORDINGS, HostCalls, Replays
from weights.platform.torch_seam import DispatchMode, is_written_to, out_form

Forward = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(params=["host", "card"])
def replays_of(request: pytest.FixtureRequest) -> Callable[..., Replays]:
    """Return a function that makes the replays of a module, or of forwards of none."""

    def make(module: nn.Module | None = None, **options: Any) -> Replays:
        graphs = CardGraphs(torch.device("cpu"), module or nn.Module(), cuda=Card())
        return Replays(**options, **({"binder": graphs} if request.param == "card" else {}))

    return make


class Net(nn.Module):
    """Views, a part in place, several results of one operation, a constant, and an operation without a form for out."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.conv = nn.LayerNorm(32), nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (4, 8)).transpose(1, 2) for one in self.queries(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        mixed += torch.arange(x.shape[1])[None, :, None] / 7
        mixed.mul_(scale[:, None, None])
        return self.out(self.conv((x + mixed).transpose(1, 2)).transpose(1, 2)) * torch.zeros_like(x).add_(2)


def inputs_of(rows: int, length: int = 6) -> list[torch.Tensor]:
    return [torch.randn(rows, length, 32), torch.rand(rows)]


def forward_of(net: nn.Module) -> Forward:
    return lambda inputs: net(*inputs)


def shape_key(inputs: Sequence[torch.Tensor]) -> Any:
    return tuple(one.shape for one in inputs)


def counted(forward: Forward) -> tuple[Forward, list[int]]:
    calls: list[int] = []

    def counting(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        return forward(inputs)

    return counting, calls


def test_new_inputs_give_the_bits_of_the_module_in_any_order_of_shapes(replays_of: Callable[..., Replays]) -> None:
    net = Net().eval()
    forward, calls = counted(forward_of(net))
    replays = replays_of(net, min_forwards=2)
    for _ in range(8):
        calls.clear()
        for rows, length in ((1, 6), (5, 6), (2, 40)):  # the workspace grows below those that are bound
            inputs = inputs_of(rows, length)
            assert torch.equal(replays.run((rows, length), inputs, forward), net(*inputs))
    assert not calls


def test_a_forward_is_bound_and_tried_on_other_inputs_before_it_is_replayed() -> None:
    forward, calls = counted(lambda inputs: inputs[0] * 2)
    replays = Replays(min_forwards=2)
    for _ in range(8):
        replays.run("key", [torch.randn(3)], forward)
    assert len(calls) == 3  # one before it is recorded, the recorded one, and the one to compare with


def test_the_result_is_the_callers_own(replays_of: Callable[..., Replays]) -> None:
    net = Net().eval()
    replays = replays_of(net, min_forwards=1)
    inputs, found = inputs_of(2), []
    for _ in range(4):
        found.append(replays.run("key", inputs, forward_of(net)))
    kept = found[-1].clone()
    replays.run("key", inputs_of(2), forward_of(net))
    assert torch.equal(found[-1], kept)


def test_weights_are_read_where_they_are(replays_of: Callable[..., Replays]) -> None:
    net = Net().eval()
    replays = replays_of(net, min_forwards=1)
    for _ in range(3):
        replays.run("key", inputs_of(2), forward_of(net))
    net.out.weight.mul_(3)
    inputs = inputs_of(2)
    assert torch.equal(replays.run("key", inputs, forward_of(net)), net(*inputs))


def test_inputs_that_are_parts_of_others_are_read_like_their_copies(replays_of: Callable[..., Replays]) -> None:
    net = Net().eval()
    replays = replays_of(net, min_forwards=1)
    for _ in range(4):
        inputs = [torch.randn(4, 6, 64)[1:3, :, ::2], torch.rand(8)[::4]]
        assert torch.allclose(replays.run("key", inputs, forward_of(net)), net(*inputs), atol=1e-6)


class NamesOfCalls(DispatchMode):
    """Notes the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_a_replay_makes_no_tensor_but_its_result_and_by_operations_without_another_form() -> None:
    net = Net().eval()
    replays = Replays(min_forwards=1)
    for _ in range(2):
        replays.run("key", inputs_of(2), forward_of(net))
    inputs = inputs_of(2)
    with NamesOfCalls() as seen:
        replays.run("key", inputs, forward_of(net))
    makers = [str(op) for op in seen.ops if not is_written_to(op)]
    assert makers[-1] == "aten.clone.default"  # the result
    assert set(makers[:-1]) == {"aten._scaled_dot_product_flash_attention_for_cpu.default"}


def test_a_number_that_is_read_from_an_input_refuses_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    def forward(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return inputs[0] * 2 if inputs[1].sum().item() > 0 else inputs[0]

    caplog.set_level(logging.INFO, "deployments.engines.graph.replay")
    replays = Replays(min_forwards=1)
    for sign in (1, 1, -1):
        inputs = [torch.randn(3), torch.full((2,), float(sign))]
        assert torch.equal(replays.run("key", inputs, forward), forward(inputs))
    assert "aten._local_scalar_dense.default in the forward reads a number from an input" in caplog.text


def test_numbers_that_follow_from_shapes_may_be_read() -> None:
    def forward(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        ids = inputs[0].new_zeros(4)
        return inputs[0] * 2 if torch.equal(ids, torch.zeros(4)) else inputs[0]

    counting, calls = counted(forward)
    replays = Replays(min_forwards=1)
    for _ in range(5):
        inputs = [torch.randn(3)]
        assert torch.equal(replays.run("key", inputs, counting), forward(inputs))
    assert len(calls) == 2


HIDDEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "__array__": lambda x: np.asarray(x),
    "__dlpack__": lambda x: np.from_dlpack(x),
    "data_ptr": lambda x: (ctypes.c_int64 * len(x)).from_address(x.data_ptr()),
}


@pytest.mark.parametrize("teller", HIDDEN)
def test_values_that_no_operation_reads_refuse_the_recording(teller: str, caplog: pytest.LogCaptureFixture) -> None:
    """As the lengths of prompts by a mask: what they are tried on may have the same, and what comes later another."""

    def forward(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        lengths = inputs[1].sum(dim=1).contiguous()
        return torch.cat([row[: int(n)] for row, n in zip(inputs[0], HIDDEN[teller](lengths), strict=True)])

    caplog.set_level(logging.INFO, "deployments.engines.graph.replay")
    replays = Replays(min_forwards=1)
    for length in (4, 4, 4, 2, 3):
        inputs = [torch.randn(2, 5), (torch.arange(5) < length)[None].expand(2, -1)]
        assert torch.equal(replays.run("key", inputs, forward), forward(inputs))
    assert f"Tensor.{teller} in the forward reads a number from an input" in caplog.text


def test_values_of_constants_may_be_read_without_an_operation() -> None:
    def forward(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        sizes = (torch.arange(inputs[0].shape[0]) + 1).tolist()
        return inputs[0] * float(sum(sizes))

    counting, calls = counted(forward)
    replays = Replays(min_forwards=1)
    for _ in range(4):
        inputs = [torch.randn(3)]
        assert torch.equal(replays.run("key", inputs, counting), forward(inputs))
    assert len(calls) == 2


@pytest.mark.parametrize(
    "choose", [lambda x, mask: x[mask], torch.masked_select, lambda x, mask: x[mask.nonzero()[:, 0]]]
)
def test_a_shape_that_follows_from_values_refuses_the_recording(
    choose: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deployments.engines.graph.replay")
    replays = Replays(min_forwards=1)
    for count in (2, 2, 2, 4, 1):
        inputs = [torch.randn(5), torch.arange(5) < count]
        found = replays.run("key", inputs, lambda given: choose(*given) * 2)
        assert torch.equal(found, choose(*inputs) * 2)
    assert "in the forward gives depends on an input" in caplog.text


def test_rows_are_chosen_by_a_mask_that_is_a_constant() -> None:
    chosen = torch.tensor([True, False, True])
    counting, calls = counted(lambda inputs: inputs[0][chosen] + 1)
    replays = Replays(min_forwards=1)
    for _ in range(4):
        inputs = [torch.randn(3)]
        assert torch.equal(replays.run("key", inputs, counting), inputs[0][chosen] + 1)
    assert len(calls) == 2


def test_what_is_computed_beside_torch_is_found_by_trying(caplog: pytest.LogCaptureFixture) -> None:
    def forward(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        made, found = torch.empty(3), inputs[0] * 2
        ctypes.memmove(made.untyped_storage().data_ptr(), found.untyped_storage().data_ptr(), 12)  # as others' kernels
        return made + 1

    replays = Replays(min_forwards=1)
    for _ in range(4):
        inputs = [torch.randn(3)]
        assert torch.equal(replays.run("key", inputs, forward), forward(inputs))
    assert caplog.text.count("a recorded forward is not used") == 1


def test_a_checked_replay_that_differs_is_an_error(replays_of: Callable[..., Replays]) -> None:
    factor = 2.0
    replays = replays_of(min_forwards=1, is_checked=True)

    def forward(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return inputs[0] * factor

    for _ in range(4):
        replays.run("key", [torch.randn(3)], forward)
    factor = 3.0  # which is not in the key
    with pytest.raises(AssertionError, match="differs"):
        replays.run("key", [torch.randn(3)], forward)


@pytest.fixture
def pairs_added() -> Forward:
    """A forward of an input and, behind it, the halves of an adapter."""
    return lambda given: given[0] + given[0] @ given[1] @ given[2]


def halves() -> list[torch.Tensor]:
    return [torch.randn(8, 2), torch.randn(2, 8)]


def test_tensors_that_last_are_copied_once_and_others_take_their_place(
    replays_of: Callable[..., Replays], pairs_added: Forward
) -> None:
    replays, adapters = replays_of(min_forwards=1), [halves() for _ in range(3)]
    forward, calls = counted(pairs_added)
    copies = []
    with NamesOfCalls() as seen:
        for adapter in [adapters[place] for place in (0, 0, 0, 1, 1, 2, 0)]:
            inputs = [torch.randn(4, 8)]
            seen.ops.clear()
            found = replays.run("key", inputs, forward, adapter)
            copies.append(sum(str(op) == "aten.copy_.default" for op in seen.ops))
            assert torch.equal(found, pairs_added([*inputs, *adapter]))
    assert [count - copies[2] for count in copies[2:]] == [0, 2, 0, 2, 2]  # both halves where they are others
    assert len(calls) <= 3


def test_a_new_tensor_at_the_place_of_one_that_is_gone_is_copied(pairs_added: Forward) -> None:
    replays = Replays(min_forwards=1)
    for _ in range(20):
        adapter, inputs = halves(), [torch.randn(4, 8)]  # the ids of those before are given again
        assert torch.equal(replays.run("key", inputs, pairs_added, adapter), pairs_added([*inputs, *adapter]))


@pytest.mark.drawn
def test_a_recording_goes_with_those_whose_weights_it_reads(replays_of: Callable[..., Replays]) -> None:
    replays = replays_of(min_forwards=1)

    def run(net: nn.Module) -> list[int]:
        forward, calls = counted(lambda given: net(*given))
        for _ in range(4):
            inputs = [torch.randn(3, 8)]
            assert torch.equal(replays.run("key", inputs, forward, (), [net]), net(*inputs))
        return calls

    nets = [nn.Linear(8, 8), nn.Linear(8, 8)]
    for net in nets:
        assert len(run(net)) < 4
        assert not run(net)
    weights = [weakref.ref(net.weight.untyped_storage()) for net in nets]
    net = nets.pop()
    del net
    gc.collect()
    assert [one() is None for one in weights] == [False, True]
    assert not run(nets[0])


def test_copies_of_what_lasts_have_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deployments.engines.graph.replay")
    replays = Replays(min_forwards=1, max_lasting_bytes=100)
    forward, calls = counted(lambda given: given[0] + given[1])
    for key, size in (("large", 30), ("a", 12), ("b", 12), ("c", 13)):
        lasting = [torch.randn(size)]
        for _ in range(3):
            inputs = [torch.randn(size)]
            assert torch.equal(replays.run(key, inputs, forward, lasting), inputs[0] + lasting[0])
    assert "copies of its adapters would be 120 bytes" in caplog.text
    calls.clear()
    for key, size, count in (("c", 13, 0), ("b", 12, 0), ("a", 12, 1)):  # "a" made room for "c"
        replays.run(key, [torch.randn(size)], forward, [torch.randn(size)])
        assert len(calls) == count
    assert sum(known.lasting_bytes for known in replays._known.values() if known.bound is not None) <= 100


def test_a_forward_that_makes_much_and_one_that_returns_its_input_run_as_before() -> None:
    calls_of = HostCalls(max_bytes=1000)
    replays = Replays(min_forwards=1, binder=calls_of)
    for forward in (lambda inputs: (inputs[0] + 1).repeat(100) * 2, lambda inputs: inputs[0]):
        counting, calls = counted(forward)
        for _ in range(3):
            inputs = [torch.randn(30)]
            assert torch.equal(replays.run(forward, inputs, counting), forward(inputs))
        assert len(calls) == 4  # the recorded one once more
    assert calls_of.workspace.nbytes() == 0


def test_an_error_of_the_forward_is_the_callers(replays_of: Callable[..., Replays]) -> None:
    def forward(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    replays = replays_of(min_forwards=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not enough memory"):
            replays.run("key", [torch.randn(3)], forward)


def test_few_recordings_are_kept_those_that_were_used_last(replays_of: Callable[..., Replays]) -> None:
    forward, calls = counted(lambda inputs: inputs[0] * 2)
    replays = replays_of(min_forwards=1)
    for size in range(1, MAX_RECORDINGS + 2):
        for _ in range(3):
            replays.run(size, [torch.randn(size)], forward)
    calls.clear()
    replays.run(MAX_RECORDINGS + 1, [torch.randn(MAX_RECORDINGS + 1)], forward)
    assert not calls
    replays.run(1, [torch.randn(1)], forward)
    assert calls


@pytest.mark.parametrize("name", ["add.Tensor", "addmm.default", "native_layer_norm.default", "cat.default"])
def test_forms_that_write_into_given_tensors_take_the_same_arguments(name: str) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    form = out_form(op)
    assert form is not None
    assert is_written_to(form.op)
    assert not is_written_to(op)
    assert out_form(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default) is None
