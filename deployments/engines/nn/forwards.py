"""Forwards in place of a module's own: another one for a while, or stock's without what it does again in every call.

Parameters stay where they are, untouched. A quick forward's results are stock's, bit for bit, but for attention and
gated features in bfloat16 that the compiled kernels compute (`few_rows.py`): they have other roundings. A small
model's step is a thousand such calls, and spends more of its time in Python than in kernels: stock's attention looks up
the signature of its processor, 20 to 40 us each time, and Flux makes its rotary angles anew at every step, 3 ms of an
image of the demo's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deployments.engines.libraries.library_seam import (
    QUICK_ATTENTION,
    QUICK_GATES,
    QUICK_POSITIONS,
    has_known_forward,
)
from deployments.engines.nn.batch_invariant import OwnAttention, make_batch_invariant
from deployments.engines.nn.few_rows import HOSTS, are_kernels_faster, gate_any, has_half_products


@contextlib.contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let each module run the given function in place of its `forward` within the block; its hooks stay.

    Blocks may be nested. HAZARD: one thread at a time may run the modules.
    """
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, earlier in before.items():
            if earlier is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = earlier


def outer_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that a module runs one after the other: those of its lists that lie in no other list."""
    found: list[nn.Module] = []
    for child in module.children():
        found += child.children() if isinstance(child, nn.ModuleList) else outer_blocks(child)
    return found


@contextlib.contextmanager
def checked_blocks(blocks: Iterable[nn.Module], check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before each of the blocks within the context: what it raises ends the forward there.

    HAZARD: hooks belong to the blocks, so one thread at a time may run them; no hook is left behind in any case.
    """
    handles = [block.register_forward_pre_hook(lambda *_: check(), prepend=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def make_quick(module: nn.Module) -> None:
    """Let the attention, the positions and the gated features of a module, weights and hooks as they are, be quick.

    Those whose forward is not the one that is known stay as they are.
    """
    for part in module.modules():
        stock: Any = type(part)
        if has_known_forward(stock, QUICK_ATTENTION):
            part.__class__ = _quick_attention(stock)
        elif has_known_forward(stock, QUICK_POSITIONS):
            part.__class__ = _quick_positions(stock)
        elif has_known_forward(stock, QUICK_GATES):
            part.__class__ = _quick_gates(stock)


def make_half_quick(module: nn.Module) -> None:
    """Let a module on the host that has weights in bfloat16 convolve and attend by the compiled kernels.

    Others stay as they are, so that their results are stock's bit for bit.
    """
    if any(one.dtype == torch.bfloat16 and one.device.type in HOSTS for one in module.parameters()):
        make_batch_invariant(module)
        make_quick(module)


@functools.cache
def _quick_attention(stock: Any) -> Any:
    """Return a class of attention that asks its processor without looking its signature up again."""

    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        if options.keys() <= _parameters(type(self.processor).__call__):
            hidden = inputs[0] if inputs else options.get("hidden_states")
            with OwnAttention() if _may_gain(hidden) else contextlib.nullcontext():
                return self.processor(self, *inputs, **options)
        return stock.forward(self, *inputs, **options)  # which leaves out what the processor does not take, and says so

    return type(f"Quick{stock.__name__}", (stock,), {"forward": forward, "__module__": __name__})


def _may_gain(hidden: Any) -> bool:
    """Return whether the kernels may attend: each function of torch in a mode costs a microsecond."""
    is_half = isinstance(hidden, torch.Tensor) and hidden.dtype == torch.bfloat16 and hidden.device.type in HOSTS
    return is_half and are_kernels_faster() and has_half_products()


@functools.cache
def _quick_positions(stock: Any) -> Any:
    """Return a class of positions that keeps its last angles, on the host: to compare positions there is cheap."""

    def forward(self: Any, ids: torch.Tensor) -> Any:
        kept = self.__dict__.get("last_angles")
        if ids.device.type != "cpu" or type(ids) is not torch.Tensor:  # a fake one has no values to compare
            return stock.forward(self, ids)
        if kept is None or kept[0].dtype != ids.dtype or not torch.equal(kept[0], ids):
            kept = self.__dict__["last_angles"] = ids, stock.forward(self, ids)
        return kept[1]

    return type(f"Quick{stock.__name__}", (stock,), {"forward": forward, "__module__": __name__})


@functools.cache
def _quick_gates(stock: Any) -> Any:
    """Return a class of gated features that computes them in one pass where there is a kernel."""

    def forward(self: Any, x: torch.Tensor, *inputs: Any, **options: Any) -> Any:
        if inputs or options:
            return stock.forward(self, x, *inputs, **options)  # which warns
        features = self.proj(x)
        if (found := gate_any(features)) is not None:
            return found
        kept, gate = features.chunk(2, dim=-1)
        return kept * F.gelu(gate)

    return type(f"Quick{stock.__name__}", (stock,), {"forward": forward, "__module__": __name__})


@functools.cache
def _parameters(call: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(call).parameters)
