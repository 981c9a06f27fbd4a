"""The step's inputs for the modules of a stock language model; its linear layers and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from deployments.engines.libraries.library_seam import apply_gate
from deployments.engines.nn.batch_invariant import settled_rows
from deployments.engines.nn.few_rows import multiply_any, multiply_rows
from weights.platform.torch_seam import is_fake

STEP_INPUTS: Final = "atelier_step_inputs"
_PRODUCTS: Final = frozenset(
    {
        *("linear", "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "addmm", "addmv", "addbmm", "baddbmm"),
        *("einsum", "conv1d", "conv2d"),
    }
)
_VECTORS: Final = 32  # elements: elementwise functions of whole vectors use one code path (`nn/batch_invariant.py`)


@dataclass(slots=True, eq=False)
class StepRows:
    """The rows of a batch (*shape, ...) whose products the kernels compute; torch computes the others.

    The others are padded to a multiple of `row_multiple`, for which a row's result does not depend on their number.
    """

    shape: tuple[int, ...]
    by_kernels: int | torch.Tensor | None  # the first rows, if the rest is padding; rows by their numbers; none
    row_multiple: int = 1

    def are_those_of(self, batch: torch.Tensor) -> bool:
        """Return whether a batch has these rows. Latent keys have an axis for their one head before theirs."""
        axes = batch.shape[:-1]
        return axes == self.shape or axes == (*[1] * (len(axes) - len(self.shape)), *self.shape)


@dataclass(slots=True, eq=False)
class StepInputs:
    """The inputs of the step that a model runs. All its modules share them, under the name `STEP_INPUTS`."""

    attention: Any = None
    states: Any = None
    rows: StepRows | None = None


def step_inputs_of(module: nn.Module) -> StepInputs:
    """Return the step inputs of the model that a module is a part of."""
    inputs: StepInputs = getattr(module, STEP_INPUTS)
    return inputs


class StepLinear(nn.Linear):
    """A linear layer of a decoder. Torch computes batches of other shapes, those of experts say."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = step_inputs_of(self).rows
        if rows is not None and not rows.are_those_of(input):
            rows = None
        chosen = None if rows is None else rows.by_kernels
        if isinstance(chosen, int) and (found := multiply_rows(self, input, chosen)) is not None:
            return found
        if (found := multiply_any(input, self.weight, self.bias)) is not None:
            return found
        if rows is None:
            return super().forward(input)
        flat = input.reshape(-1, self.in_features)
        padded = F.pad(flat, (0, 0, 0, -len(flat) % rows.row_multiple))
        result = super().forward(padded)[: len(flat)]
        if isinstance(chosen, torch.Tensor) and (found := multiply_rows(self, flat[chosen])) is not None:
            result[chosen] = found
        return result.view(*input.shape[:-1], -1)


class OtherProducts(TorchFunctionMode):
    """Looks for products of rows outside linear layers in a forward of one token: `found` tells whether there are any.

    Such models' rows of a step are padded. A product with an inner size of 1 has no sum.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._weights = {id(part.weight) for part in module.modules() if isinstance(part, StepLinear)}
        self.found = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _PRODUCTS:
            first, second, *_ = (*args, *(kwargs or {}).values())
            if not isinstance(first, torch.Tensor):  # of einsum, a text
                self.found = True
            elif first.shape[-1] != 1:
                self.found |= id(second) not in self._weights or not StepRows((1, 1), None).are_those_of(first)
        return func(*args, **(kwargs or {}))


def padded_multiple(module: nn.Module) -> int:
    """Return the multiple of rows for which a model's result of one does not depend on the others, on the host.

    Where a layer makes a few elements of a row, a gate say, elementwise functions of them go by whole vectors of rows.
    """
    is_even = all(part.out_features % _VECTORS == 0 for part in module.modules() if isinstance(part, nn.Linear))
    return settled_rows() if is_even else max(settled_rows(), _VECTORS)


def compute_experts(
    experts: Any, hidden_NC: torch.Tensor, chosen_NU: torch.Tensor, weights_NU: torch.Tensor
) -> torch.Tensor:
    """Return the output of each token's chosen experts, in place of transformers' functions for all experts.

    A token's output does not depend on an expert's other rows: their number is padded, and a token sums its outputs
    in the order of the experts. A choice with a number that no expert has is left out.
    """
    out_NC = torch.zeros_like(hidden_NC)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    for expert, tokens, places in _chosen_rows(chosen_NU, len(experts.down_proj)):
        padded = F.pad(hidden_NC[tokens], (0, 0, 0, -len(tokens) % settled_rows()))
        inner = _multiply(experts, name, expert, padded)
        inner = apply_gate(experts, inner) if experts.has_gate else experts.act_fn(inner)
        made = _multiply(experts, "down_proj", expert, inner)
        if experts.has_post_expert_norm:
            made = experts.post_expert_norm(made)
        out_NC.index_add_(0, tokens, (made[: len(tokens)] * weights_NU[tokens, places, None]).to(out_NC.dtype))
    return out_NC


def _chosen_rows(chosen_NU: torch.Tensor, num_experts: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield each chosen expert with its tokens, and the place among each token's choices.

    In a recording, whose tokens choose nothing, all choose one: no other choice takes more memory.
    """
    if is_fake(chosen_NU):
        tokens = torch.arange(len(chosen_NU), device=chosen_NU.device)
        yield 0, tokens, torch.zeros_like(tokens)
        return
    for expert in sorted({one for one in chosen_NU.flatten().tolist() if one < num_experts}):
        yield expert, *torch.where(chosen_NU == expert)


def _multiply(experts: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    weight = weight.T if experts.is_transposed else weight
    found = multiply_any(x, weight, bias)
    return F.linear(x, weight, bias) if found is None else found
