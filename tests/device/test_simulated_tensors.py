"""Tensors of a simulated device beside the same computation on the host: values, aliasing, memory, refusals."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.seeding import seeded_random
from torch.nn import functional as F

from infra.sim import simulate

Tensors = dict[str, torch.Tensor]

OPS: dict[str, Callable[[Tensors], Any]] = {
    "matmul": lambda t: t["a"] @ t["b"],
    "linear": lambda t: F.linear(t["a"], t["b"].T, t["row"]),
    "half": lambda t: (t["a"].bfloat16() @ t["b"].bfloat16()).float(),
    "norm": lambda t: F.layer_norm(t["a"], [12], t["row"], t["row"]),
    "group": lambda t: F.group_norm(t["image"], 2, t["row"][:4], t["row"][:4]),
    "rms": lambda t: F.rms_norm(t["a"], [12], t["row"]),
    "softmax": lambda t: (t["a"] * 3).softmax(-1),
    "gelu": lambda t: F.gelu(t["a"], approximate="tanh") + F.silu(t["a"]),
    "convolution": lambda t: F.conv2d(t["image"], t["kernel"], padding=1, stride=2),
    "upsample": lambda t: F.interpolate(t["image"], scale_factor=2.0, mode="nearest"),
    "attention": lambda t: F.scaled_dot_product_attention(t["q"], t["q"], t["q"], is_causal=True),
    "masked": lambda t: F.scaled_dot_product_attention(
        t["q"], t["q"], t["q"], attn_mask=t["q"][0, 0] @ t["q"][0, 0].T > 0
    ),
    "index": lambda t: t["a"][t["ids"]] + t["a"].index_select(0, t["ids"]),
    "embedding": lambda t: F.embedding(t["ids"], t["a"]),
    "where": lambda t: torch.where(t["a"] > 0, t["a"], -1.0),
    "cat": lambda t: torch.cat([t["a"], t["b"].T[:, :12]]),
    "sort": lambda t: t["a"].sort(dim=-1),
    "sums": lambda t: (t["a"].sum(), t["a"].mean(0), t["a"].var(-1), *t["a"].max(dim=-1)),
    "views": lambda t: t["a"].T[2:5].unflatten(1, (4, 3)).permute(2, 0, 1).contiguous().flatten(),
    "complex": lambda t: torch.polar(t["a"].abs(), t["a"]).conj().real.clone(),
    "pad": lambda t: F.pad(t["a"], (1, 2, 0, 1)),
    "einsum": lambda t: torch.einsum("ij,jk->ki", t["a"], t["b"]),
    "numbers": lambda t: 2 ** t["a"] + (t["a"] // 0.5) - 1 / (t["a"] + 10),
    "types": lambda t: (t["ids"] * 1.5, t["ids"] / 2, t["a"].to(torch.int32), t["a"].view(torch.int32)),
    "made": lambda t: (
        torch.arange(7, device=t["a"].device) + torch.zeros_like(t["ids"])[0] + torch.full_like(t["ids"], 3)[1]
    ),
    "triangle": lambda t: torch.ones(5, 5, device=t["a"].device).tril(1).bool(),
    "cumulative": lambda t: (t["a"].cumsum(0), torch.searchsorted(t["a"][0].sort().values, t["row"])),
    "fft": lambda t: torch.fft.rfft(t["a"]).abs(),
}


def tensors() -> Tensors:
    return {
        "a": torch.randn(12, 12),
        "b": torch.randn(12, 12),
        "row": torch.randn(12),
        "image": torch.randn(2, 4, 8, 8),
        "kernel": torch.randn(3, 4, 3, 3),
        "q": torch.randn(1, 2, 6, 8),
        "ids": torch.randint(0, 12, (5,)),
    }


def flat(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_results_are_those_of_the_host_bit_for_bit(
    name: str, mode: Callable[[], Any], device: torch.device, module: Any
) -> None:
    with mode():
        given = tensors()
        expected = flat(OPS[name](given))
        found = flat(OPS[name]({key: tensor.to(device) for key, tensor in given.items()}))
        assert len(found) == len(expected)
        for own, host in zip(found, expected, strict=True):
            assert own.device == device
            assert (own.dtype, own.shape) == (host.dtype, host.shape)
            assert torch.equal(own.cpu(), host)


def test_random_chains_of_views_and_writes_alias_as_on_the_host(device: torch.device, module: Any) -> None:
    for _ in range(60):
        steps = random.choices(range(6), k=8)
        draws = [(random.randrange(4), random.random()) for _ in steps]

        def run(base: torch.Tensor, steps: list[int] = steps, draws: list[tuple[int, float]] = draws) -> torch.Tensor:
            view = base
            for step, (number, value) in zip(steps, draws, strict=True):
                if step == 0:
                    view = view.transpose(0, 1)
                elif step == 1:
                    view = view[number % len(view) :]
                elif step == 2:
                    view += value
                elif step == 3:
                    view[0].mul_(value)
                elif step == 4:
                    view.copy_(base.flatten()[: view.numel()].clone().view(view.shape))
                else:
                    view[view > 0.5] = -value
            return base

        start = torch.rand(6, 7)
        assert torch.equal(run(start.to(device)).cpu(), run(start.clone()))


def test_memory_is_counted_in_steps_and_freed_with_the_last_view(device: torch.device, module: Any) -> None:
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    tensor = torch.zeros(1000, device=device)
    view = tensor[5:10]
    assert module.memory_allocated(device) - before == 4096
    del tensor
    assert module.memory_allocated(device) - before == 4096
    free, total = module.mem_get_info(device)
    assert total - free == module.memory_allocated(device)
    del view
    assert module.memory_allocated(device) == before
    assert module.max_memory_allocated(device) == before + 4096


def test_what_is_too_large_raises_and_less_is_served_afterwards(device: torch.device, module: Any) -> None:
    before = module.memory_allocated(device)
    _, total = module.mem_get_info(device)
    with pytest.raises(torch.OutOfMemoryError, match=rf"{device} out of memory\. Tried to allocate \d+ bytes"):
        torch.empty(total + 1, dtype=torch.uint8, device=device)
    small = torch.ones(total // 3, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        small.float()
    assert module.memory_allocated(device) - before == -(-small.nbytes // 512) * 512
    assert int(small[:10].sum()) == 10


def test_bytes_over_the_link_are_counted_each_way(device: torch.device, second_device: torch.device) -> None:
    link = torch.sim.memory_of(device)  # type: ignore[attr-defined]
    link.reset_link()
    tensor = torch.zeros(1000, device=device)
    assert (link.uploaded_bytes, link.downloaded_bytes) == (0, 0)
    tensor.copy_(torch.ones(1000))
    assert (link.uploaded_bytes, link.downloaded_bytes) == (4000, 0)
    assert tensor[3].item() == 1.0
    assert link.downloaded_bytes == 4
    tensor.to(second_device)
    assert (link.uploaded_bytes, link.downloaded_bytes) == (4000, 4004)
    assert link.copied_s > 0
    assert link.link_s == pytest.approx(8004 / (link.link_s and 25e9))


@pytest.mark.parametrize(
    "mix",
    [
        lambda own, other: own + other,
        lambda own, other: torch.cat([own, other]),
        lambda own, other: own.add_(other),
        lambda own, other: torch.add(own, own, out=other),
        lambda own, other: F.linear(own, other),
        lambda own, other: F.conv2d(own[None, None], other[None, None]),
        lambda own, other: F.scaled_dot_product_attention(own[None], other[None], other[None]),
        lambda own, other: own.index_put_((torch.tensor([0, 1]),), other[:2]),
        lambda own, other: torch.where(own > 0, own, other),
        lambda own, other: own.masked_fill_(other > 0, 1),
    ],
)
@pytest.mark.parametrize("where", ["cpu", "sim:1"])
def test_mixing_devices_raises(mix: Callable[..., Any], where: str, device: torch.device, module: Any) -> None:
    own, other = torch.rand(3, 3, device=device), torch.rand(3, 3, device=where)
    with pytest.raises(RuntimeError, match=r"same device|two devices|different device"):
        mix(own, other)


def test_the_host_cannot_be_written_by_accident(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.tensor(1.0).add_(torch.tensor(2.0, device=device))
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        torch.ones(2, device=device).numpy()
    # As on CUDA: numbers and indices may be the host's.
    own = torch.rand(3, device=device)
    assert (own + torch.tensor(1.0)).device == own[torch.tensor([0, 1])].device == device


def test_modules_copies_and_gradients(device: torch.device, module: Any) -> None:
    net = torch.nn.Linear(4, 3).to(device)
    twin = copy.deepcopy(net)
    x = torch.randn(2, 4)
    net(x.to(device)).square().sum().backward()
    host = torch.nn.Linear(4, 3)
    host.load_state_dict(twin.state_dict())
    host(x).square().sum().backward()
    assert torch.equal(net.weight.grad.cpu(), host.weight.grad)


def test_an_output_that_does_not_fit_grows(device: torch.device, module: Any) -> None:
    out = torch.empty(0, device=device)
    torch.add(torch.ones(1000, device=device), 1, out=out)
    assert out.shape == (1000,)
    assert out.sum().item() == 2000
    out.resize_(2000)
    assert (out.shape, out[:1000].sum().item()) == ((2000,), 2000)


def test_threads_count_together(device: torch.device, module: Any) -> None:
    before = module.memory_allocated(device)
    held: list[list[torch.Tensor]] = [[] for _ in range(4)]

    def churn(own: list[torch.Tensor]) -> None:
        draw = seeded_random()
        for _ in range(300):
            if own and draw.random() < 0.5:
                own.pop(draw.randrange(len(own)))
            else:
                own.append(torch.empty(draw.randrange(5000), dtype=torch.uint8, device=device))

    threads = [threading.Thread(target=churn, args=(own,)) for own in held]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    charged = sum(-(-tensor.nbytes // 512) * 512 for own in held for tensor in own)
    assert module.memory_allocated(device) - before == charged
    held.clear()
    threads.clear()
    gc.collect()


def test_a_second_simulation_is_the_first_one() -> None:
    assert simulate() is torch.sim  # type: ignore[attr-defined]


def test_draws_within_a_fork_leave_the_streams_as_they_were(device: torch.device) -> None:
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = torch.randn(4, device=device)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng(), torch.random.fork_rng(device_type="sim"):
        torch.manual_seed(3)
        assert torch.equal(torch.randn(4), first.cpu())
    with pytest.raises(RuntimeError, match="no device"):
        torch.sim.get_rng_state(99)  # type: ignore[attr-defined]


def test_inference_tensors_are_as_on_the_host(device: torch.device) -> None:
    for where in (torch.device("cpu"), device):
        with torch.inference_mode():
            made = torch.ones(3, device=where)
            made += 1
        assert made.is_inference()
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            made += 1
        free = torch.ones(3, device=where)
        free += made
        assert not free.is_inference()
