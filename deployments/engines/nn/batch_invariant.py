"""Layers whose result for a row does not depend on the rows beside it, bit for bit, on the CPU.

Torch chooses its float32 kernels on a CPU by the number of rows (2.13). MKL multiplies one row, two or three, and four
or more in three ways, with AVX-512 up to 16 rows in two more, by the size of the weight, with several threads the first
dozen rows in yet others, and with less than a dozen outputs a row by its place among the others; a convolution goes to
oneDNN or elsewhere by the size of the batch. Here few rows, and few outputs, are padded, and every convolution goes to
the compiled kernels (`few_rows.py`) or to oneDNN, whose fixed cost of about 60 us is felt by convolutions of less than
a million multiplications only. HAZARD: on
Intel's processors, with several threads, products of a thousand inputs and more differ even so where there are 70 rows
or more, and with AVX2 alone every product does; MKL_CBWR=AUTO,STRICT in the environment of the processes is MKL's own
way to have all of them alike (as fast from 16 rows on, and up to half as fast with one). A half precision product goes
to oneDNN where the processor has its instructions, but for those of 16^3 multiplications and less
(mkldnn_gemm_min_size), so that a row of a small layer alone goes elsewhere: it is padded beyond that. HAZARD: with AMX,
products in half precision of some 500 inputs and more differ by their number of rows;
ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 is oneDNN's way to do without it. Other operations that diffusers' models use need
nothing of this (tests/unit/deployments/engines/nn/test_batch_invariant.py looks at each), as long as a row has a
multiple of 32 elements: what is left over after pairs of vectors, of 8 floats with AVX2 and of 16 with AVX-512, is
computed by other code in an elementwise function.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import torch.utils.deterministic
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from deployments.engines.nn.few_rows import HOSTS, attend_any, convolve_any, multiply_any

_uninitialized_memory: Any = torch.utils.deterministic  # a module with properties, which its types do not have
_MIN_ROWS_PER_THREAD: Final = 8  # with more than one thread; found with two
_MIN_OUTPUTS: Final = 12  # of float32; found on a Zen 5
_MAX_SMALL_PRODUCT: Final = 16**3  # multiplications; of half precision, a larger one goes to oneDNN


@functools.cache
def settled_rows() -> int:
    """Return from how many rows on one thread's product gives a row the same bits whatever their number.

    A multiple of it does so on every processor that was tried; with AVX-512 of 250 shapes of weights each did.
    """
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 4


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `F.linear`.

    Torch chooses by the order of memory as well: the kernel, and for tensors of three dimensions and more whether the
    bias is added before the sums are rounded. Here all are multiplied in C order, and the bias is added where it is for
    a batch of one: before, of a part of a longer sequence, and behind, of what no batch has in C order.
    """
    if not x.is_contiguous() and x.device.type in HOSTS:
        adds_behind = x.dim() > 2 and not x[:1].is_contiguous()
        x = x.contiguous()
        if bias is not None and adds_behind:
            return linear(x, weight) + bias
    if (found := multiply_any(x, weight, bias)) is not None:
        return found
    num_rows = x.numel() // max(1, x.shape[-1])
    if few := _missing_outputs(x, weight):
        wide = linear(x, F.pad(weight, (0, 0, 0, few)), None if bias is None else F.pad(bias, (0, few)))
        return wide[..., : len(weight)].contiguous()
    min_rows = _min_rows(x, weight)
    if not 0 < num_rows < min_rows:
        return F.linear(x, weight, bias)
    padded = F.pad(x.reshape(num_rows, -1), (0, 0, 0, min_rows - num_rows))
    return F.linear(padded, weight, bias)[:num_rows].reshape(*x.shape[:-1], -1)


def add_product(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: float) -> None:
    """Add `factor * F.linear(x, weight)` to the result (..., N), in place and in one call, rounded once."""
    own, rows = result.reshape(-1, result.shape[-1]), x.reshape(-1, x.shape[-1])
    missing, few = max(0, _min_rows(x, weight) - len(rows)), _missing_outputs(x, weight)
    if (missing or few) and len(rows):
        factors = F.pad(rows, (0, 0, 0, missing)), F.pad(weight, (0, 0, 0, few)).T
        padded = F.pad(own, (0, few, 0, missing)).addmm_(*factors, alpha=factor)
        result.copy_(padded[: len(rows), : len(weight)].reshape(result.shape))
        return
    own.addmm_(rows, weight.T, alpha=factor)
    if own.untyped_storage().data_ptr() != result.untyped_storage().data_ptr():  # reshape has copied
        result.copy_(own.view(result.shape))


def _missing_outputs(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Return how many outputs a weight lacks for a row's product not to depend on the row's place."""
    is_judged = x.dtype == torch.float32 and x.device.type in HOSTS and weight.numel() > 0
    return max(0, _MIN_OUTPUTS - len(weight)) if is_judged else 0


def _min_rows(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the number of rows from which on a row's product does not depend on how many there are."""
    if x.device.type not in HOSTS or weight.numel() == 0:
        return 0
    if x.dtype == torch.float32:
        num_threads = torch.get_num_threads()
        return settled_rows() if num_threads == 1 else max(settled_rows(), _MIN_ROWS_PER_THREAD * num_threads)
    if x.dtype not in (torch.bfloat16, torch.float16):
        return 0
    return max(settled_rows(), _MAX_SMALL_PRODUCT // weight.numel() + 1)


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> torch.Tensor:
    """Return `F.conv2d`."""
    x = _in_c_order(x)
    if groups == 1 and (found := convolve_any(x, weight, bias, stride, padding, dilation)) is not None:
        return found
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if x.dtype != torch.float32 or x.device.type not in HOSTS or x.numel() == 0 or not has_onednn:
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    result: torch.Tensor = torch.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups)
    return result


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return `F.scaled_dot_product_attention`. Modes of functions see it as they see that."""
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    given = query, key, value
    if has_torch_function(given):
        handled: torch.Tensor = handle_torch_function(attention, given, *given, attn_mask=attn_mask, **options)
        return handled
    is_full = attn_mask is None and dropout_p == 0 and not is_causal and not enable_gqa
    if is_full and (found := attend_any(*given, scale)) is not None:
        return found
    return F.scaled_dot_product_attention(*given, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


class OwnAttention(TorchFunctionMode):
    """Has what runs in it attend by `attention`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (attention if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _in_c_order(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in C order on the CPU, where kernels are chosen by the order of memory as well.

    What was transposed before, by an attention block say, is in channels-last order, but for a batch of one in both.
    """
    return x if x.is_contiguous() or x.device.type not in HOSTS else x.contiguous()


class _BatchInvariantLinear(nn.Linear):
    """A linear layer over `linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class _BatchInvariantConv2d(nn.Conv2d):
    """A convolution over `conv2d`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return super().forward(input)
        return conv2d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class _BatchInvariantGroupNorm(nn.GroupNorm):
    """A group norm over tensors in C order."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(_in_c_order(input))


_INVARIANT: Final[dict[type[nn.Module], type[nn.Module]]] = {
    nn.Linear: _BatchInvariantLinear,
    nn.Conv2d: _BatchInvariantConv2d,
    nn.GroupNorm: _BatchInvariantGroupNorm,
}


@contextlib.contextmanager
def repeatable_kernels() -> Iterator[None]:
    """Have torch take kernels that give the same bits each time, in the whole process; an operation without any warns.

    What a row gives may still depend on the rows beside it. On a CPU nothing changes.
    """
    cudnn, memory = torch.backends.cudnn, _uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    choice = cudnn.benchmark, cudnn.deterministic
    fills = memory.fill_uninitialized_memory
    try:
        memory.fill_uninitialized_memory = False  # other threads allocate too, and gain nothing
        torch.use_deterministic_algorithms(True, warn_only=True)
        cudnn.benchmark, cudnn.deterministic = False, True
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = choice
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fills


def make_batch_invariant(module: nn.Module) -> None:
    """Let the layers of a module that depend on the batch, weights and hooks as they are, be the ones above."""
    for part in module.modules():
        if type(part) in _INVARIANT:
            part.__class__ = _INVARIANT[type(part)]


def is_batch_invariant(layer: nn.Module) -> bool:
    """Return whether a layer computes nothing but `linear` or `conv2d` of its weight and bias."""
    if type(layer) is _BatchInvariantConv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is _BatchInvariantLinear
