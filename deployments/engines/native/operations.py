"""Products of the compiled kernels as operations of torch: recordings and simulated devices know them as any other."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from deployments.engines.native.library import ELEMENTS, Kernels, Product, attended, convolved_shape, load_kernels

BoundCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Operations:
    """The operations of some kernels, which torch knows for the life of the process."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        make_library: Any = torch.library.Library
        self._library = make_library("atelier", "DEF")  # torch forgets its operations when it goes
        arguments = "Tensor x, Tensor weight, Tensor? bias=None"
        self._library.define(f"linear({arguments}) -> Tensor")
        self._library.define(f"linear.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)")
        self._library.impl("linear", self._linear, "CPU")
        self._library.impl("linear.out", self._linear, "CPU")
        self._library.impl("linear", _sized, "Meta")
        self._library.define("add_pair(Tensor(a!) result, Tensor x, Tensor down, Tensor up, float factor) -> ()")
        self._library.impl("add_pair", self._add_pair, "CPU")
        self._library.impl("add_pair", _nothing, "Meta")
        self._library.define("conv2d(Tensor x, Tensor weight, Tensor? bias, int stride, int padding) -> Tensor")
        self._library.impl("conv2d", self._conv2d, "CPU")
        self._library.impl("conv2d", _convolved, "Meta")
        self._library.define("attend(Tensor query, Tensor key, Tensor value, float scale) -> Tensor")
        self._library.impl("attend", self._attend, "CPU")
        self._library.impl("attend", _attended, "Meta")
        self._library.define("gate(Tensor x) -> Tensor")
        self._library.impl("gate", self._gate, "CPU")
        self._library.impl("gate", _gated, "Meta")
        self.attend: Any = torch.ops.atelier.attend.default
        self.conv2d: Any = torch.ops.atelier.conv2d.default
        self.gate: Any = torch.ops.atelier.gate.default
        self.linear: Any = torch.ops.atelier.linear.default
        self.add_pair: Any = torch.ops.atelier.add_pair.default
        self._products: dict[Any, Callable[..., Product]] = {
            torch.ops.atelier.linear.out: _linear_product,
            self.add_pair: _pair_product,
        }

    def joined(self, calls: Iterable[BoundCall], workspace: torch.UntypedStorage) -> Iterator[BoundCall]:
        """Yield calls that do the same, those of our operations that follow each other as one."""
        for is_ours, run in itertools.groupby(calls, self._is_product):
            if is_ours:
                yield _JoinedProducts(self, [_ProductCall(*call) for call in run], workspace), (), {}
            else:
                yield from run

    def bound(self, calls: Sequence[_ProductCall]) -> ctypes.Array[Product]:
        """Return the products of some calls, bound to where their tensors are now."""
        return (Product * len(calls))(*(self._products[call.op](*call.args, **call.kwargs) for call in calls))

    def run(self, products: ctypes.Array[Product]) -> None:
        """Compute products, one after the other. Raises MemoryError."""
        self._kernels.run(products)

    def _is_product(self, call: BoundCall) -> bool:
        op, args, kwargs = call
        tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        return op in self._products and all(one.is_contiguous() for one in tensors)

    def _linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernels.linear(x.contiguous(), weight, bias, out=out)

    def _conv2d(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: int
    ) -> torch.Tensor:
        return self._kernels.conv2d(x.contiguous(), weight.contiguous(), bias, stride, padding)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
        return self._kernels.attend(q, k, v, scale)

    def _gate(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.gate(x.contiguous())

    def _add_pair(
        self, result: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, factor: float
    ) -> None:
        self._kernels.add_pair(result, x.contiguous(), down, up, factor)


class _ProductCall(NamedTuple):
    """A call of one of our operations."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _JoinedProducts:
    """Products that follow each other, in one call: of few rows, a call of Python takes longer than a product."""

    def __init__(self, operations: Operations, calls: Sequence[_ProductCall], workspace: torch.UntypedStorage) -> None:
        """Bind the calls. Of the memory of their tensors that of the workspace alone moves."""
        self._operations = operations
        self._calls = calls
        self._workspace = workspace
        self._address: int | None = None
        self._products = operations.bound(())

    def __call__(self) -> None:
        if self._address != (address := self._workspace.data_ptr()):
            self._address, self._products = address, self._operations.bound(self._calls)
        self._operations.run(self._products)


def _linear_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor
) -> Product:
    (outputs, columns), beside = weight.shape, None if bias is None else bias.data_ptr()
    rows, element = x.numel() // columns, ELEMENTS[x.dtype]
    return Product(weight.data_ptr(), beside, x.data_ptr(), out.data_ptr(), outputs, columns, rows, 0, 0.0, element)


def _pair_product(
    result: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, factor: float
) -> Product:
    (rank, columns), (outputs, _) = down.shape, up.shape
    pointers = down.data_ptr(), up.data_ptr(), x.data_ptr(), result.data_ptr()
    return Product(*pointers, outputs, columns, x.numel() // columns, rank, factor, ELEMENTS[x.dtype])


def _nothing(*_: Any) -> None:
    """Return nothing, as an operation that writes in place."""


def _sized(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: int
) -> torch.Tensor:
    return x.new_empty(convolved_shape(x, weight, stride, padding))


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    return attended(query)


def _gated(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@functools.cache
def load_operations() -> Operations | None:
    """Return the operations of the kernels, None where there are no kernels."""
    kernels = load_kernels()
    return None if kernels is None else Operations(kernels)


def joined(calls: Iterable[BoundCall], workspace: torch.UntypedStorage) -> list[BoundCall]:
    """Return calls that do the same, bound to the workspace and to memory that stays, with fewer calls of Python."""
    operations = load_operations()
    return list(calls if operations is None else operations.joined(calls, workspace))
