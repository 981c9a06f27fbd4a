"""Recordings: what a forward of known operations leaves behind, on fake tensors and of a real call."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deployments.engines.graph.recording import Recorder, Recording, Slot, fake_weights, record, tensors_in
from infra.bench.best_fit import best_fit_bytes
from weights.memory.lifetimes import place
from weights.platform.torch_seam import fake_mode

HOST = torch.device("cpu")


class Branches(nn.Module):
    """`wide` holds its input until the sum; a view and an operation in place make no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.outer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.full([8], 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(x) * self.scale
        made.add_(1.0)
        return self.outer(made.view(-1, 8) + x)


def fake_recording(rows: int) -> Recording:
    module, mode = Branches(), fake_mode()
    fake_weights(module, mode, HOST)
    with mode:
        x = torch.empty(rows, 8)
    return record(lambda: module(x), Recorder(HOST, is_fake=True), {"net": module}, mode)


def test_buffers_and_layers_are_those_of_the_forward() -> None:
    found = fake_recording(100)
    made = [(node.layer, [found.buffers[one].nbytes for one in node.makes]) for node in found.nodes if node.makes]
    row = 100 * 4
    assert made == [
        ("net.inner.0", [32 * row]),
        ("net.inner.1", [32 * row]),
        ("net.inner.2", [8 * row]),
        ("net", [8 * row]),
        ("net", [8 * row]),
        ("net.outer", [4 * row]),
    ]
    assert found.eager_peak() == 64 * row  # in the GELU; `inner` lets go of its first sum at once
    assert [buffer.died is None for buffer in found.buffers] == [False] * 5 + [True]
    assert not any(node.call for node in found.nodes)


def test_a_plan_takes_less_than_eager_and_than_best_fit() -> None:
    found = fake_recording(64)
    plan = place(found.lifetimes())
    assert plan.live_bytes == plan.nbytes <= best_fit_bytes(found.lifetimes())
    assert plan.nbytes <= found.eager_peak()


def test_what_python_holds_counts_for_eager_and_not_for_a_plan() -> None:
    def run() -> torch.Tensor:
        first = x * 2
        second = first * 3  # nobody uses `first` any more, but its name holds it
        third = second * 4
        return third + 1

    mode = fake_mode()
    with mode:
        x = torch.empty(1024)
    found = record(run, Recorder(HOST, is_fake=True), {}, mode)
    assert found.eager_peak() == 4 * 4096
    assert place(found.lifetimes()).nbytes == 2 * 4096


def test_bytes_come_in_the_steps_of_the_device() -> None:
    mode = fake_mode()
    meta = torch.device("meta")  # stands for a device with an allocator
    with mode:
        x = torch.empty(3, device=meta)
    found = record(lambda: x + 1, Recorder(meta, is_fake=True), {}, mode)
    assert [buffer.nbytes for buffer in found.buffers] == [512]


def laid_out(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in C order, with two dimensions exchanged, or of a part of a longer one."""
    tensor = torch.rand(*shape).to(dtype)
    if random.random() < 0.2 and len(shape) > 1:
        return torch.rand(*shape[:-2], shape[-1], shape[-2]).to(dtype).transpose(-1, -2)
    return torch.cat([tensor, tensor], -1)[..., : shape[-1]] if random.random() < 0.2 else tensor


BINARY = (torch.add, torch.sub, torch.mul, torch.div)
UNARY = (F.silu, torch.neg, torch.rsqrt, torch.exp, torch.sin, torch.cos, torch.clone)
# Operations with a form of their own on fake tensors, and views.
CALLS: list[Callable[[Any], Any]] = [
    *(lambda t, op=op: [op(t.full, t.row), op(t.one, t.full), op(t.column, t.row), op(t.full, 2)] for op in BINARY),
    lambda t: [torch.add(t.full, t.one, alpha=2), t.full * (t.full + 1j), t.full**2, t.full * 0.5],
    lambda t: [op(t.full) for op in UNARY],
    lambda t: [F.gelu(t.full, approximate="tanh"), t.full.clone(memory_format=torch.contiguous_format)],
    lambda t: [t.a @ t.b, torch.addmm(t.row, t.a, t.b), F.linear(t.full, t.square, t.row), F.linear(t.full, t.square)],
    lambda t: [F.layer_norm(t.full, t.row.shape), F.layer_norm(t.full, t.row.shape, t.row, t.row)],
    lambda t: [F.group_norm(t.image, 2), F.group_norm(t.image, 2, t.weights, t.weights)],
    lambda t: torch.mkldnn_convolution(t.image, t.kernel, None, (1, 0), (2, 1), (1, 1), 1),
    lambda t: [torch.cat([t.full, t.full, t.full[:, :, :]], dim) for dim in (0, 1, -1)],
    lambda t: torch.cat([t.image, t.image.contiguous(memory_format=torch.channels_last)], 1),
    lambda t: t.full.transpose(0, 1)[:, :1].unsqueeze(0).expand(3, -1, -1, -1),
    lambda t: t.image.unflatten(1, (2, 2)).permute(0, 2, 1, 3, 4).flatten(0, 1),
    lambda t: [*t.image.split(3, 1), *t.image.unbind(1), t.image.unbind(1)[2].reshape(-1)],
]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS)
def test_fake_results_have_the_sizes_and_the_memory_of_real_ones(
    call: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    for _ in range(8):
        r, c, k = (random.randint(1, 9) for _ in range(3))
        shapes = {"full": (2, r, c), "row": (c,), "one": (1, 1, c), "column": (r, 1), "square": (c, c), "a": (r, k)}
        shapes |= {"b": (k, c), "image": (2, 4, r + 4, c + 4), "kernel": (6, 4, 3, 3), "weights": (4,)}
        given, mode = {name: laid_out(*shape, dtype=dtype) for name, shape in shapes.items()}, fake_mode()
        fakes = {name: mode.from_tensor(tensor) for name, tensor in given.items()}
        with torch.no_grad():
            expected = call(SimpleNamespace(**given))
        found: list[Any] = []
        run = partial(lambda given, made: made.append(call(given)), SimpleNamespace(**fakes), found)
        record(run, Recorder(HOST, is_fake=True), {}, mode)
        assert [memory_of(one) for one in tensors_in(found)] == [memory_of(one) for one in tensors_in(expected)]


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's bytes and its layout: strides but those of dimensions of one element."""
    strides = tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return tensor.dtype, tuple(tensor.shape), strides, tensor.storage_offset(), tensor.untyped_storage().nbytes()


def test_hooks_are_gone_also_after_a_failure() -> None:
    module = Branches()
    with pytest.raises(RuntimeError):
        record(lambda: module(torch.ones(2, 7)), Recorder(HOST), {"net": module})
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def replay(found: Recording, inputs: dict[int, torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Run kept calls in order, each buffer filled with NaN behind its last use. `inputs` replace what was given."""
    given = [inputs.get(number, storage) for number, storage in enumerate(found.given)]
    ends = {one.key: one.last for one in found.lifetimes()}
    storages: dict[int, torch.UntypedStorage] = {}

    def resolve(value: Any) -> Any:
        if isinstance(value, Slot):
            storage = given[value.number] if value.is_given else storages[value.number]
            storage = storage.untyped_storage() if isinstance(storage, torch.Tensor) else storage
            return torch.empty(0, dtype=value.dtype).set_(storage, value.offset, value.size, value.stride)
        if isinstance(value, tuple | list):
            return type(value)(resolve(one) for one in value)
        return value

    for at, node in enumerate(found.nodes):
        assert node.call is not None
        results = node.call.op(*resolve(node.call.args), **{k: resolve(v) for k, v in node.call.kwargs.items()})
        slots = node.call.results if isinstance(node.call.results, tuple) else (node.call.results,)
        for slot, made in zip(slots, results if isinstance(results, tuple) else (results,), strict=True):
            if isinstance(slot, Slot) and slot.number in node.makes and not slot.is_given:
                storages[slot.number] = made.untyped_storage()
        for number, storage in storages.items():
            if ends[number] == at < len(found.nodes) - 1:
                torch.empty(0).set_(storage).fill_(torch.nan)
    return storages


def test_kept_calls_give_the_same_bits_again_and_need_no_buffer_longer_than_told() -> None:
    module = Branches().requires_grad_(False)
    x, other = torch.randn(5, 8), torch.randn(5, 8)
    found = record(lambda: module(x), Recorder(HOST, keeps_calls=True), {"net": module})
    place_of_x = next(n for n, storage in enumerate(found.given) if storage.data_ptr() == x.data_ptr())
    assert sum(buffer.died is None for buffer in found.buffers) == 1
    for inputs, expected in (({}, module(x)), ({place_of_x: other}, module(other))):
        storages = replay(found, inputs)
        result = found.nodes[-1].call.results  # type: ignore[union-attr]
        again = torch.empty(0).set_(storages[result.number], result.offset, result.size, result.stride)
        assert torch.equal(again, expected)
