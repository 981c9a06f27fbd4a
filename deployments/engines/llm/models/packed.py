"""Decoders around packed tensors: the names in their file, and their placement in the modules."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from deployments.engines.nn.packed_linear import PackedEmbedding, PackedLinear, product_path
from deployments.engines.nn.packed_weights import GROUP_INT8, Arithmetic, PackedWeight, group_int8_weight, packed_weight
from deployments.engines.records.protocol import EngineError

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True)
class PackedSource:
    """The mapping from the tensors of a GGUF or Kuiper file to those of a Hugging Face checkpoint.

    `names` and `kinds`: the Hugging Face name and the stored type, by stored name; `*` in a name stands for the numbers
    of the experts whose matrices are one tensor. `is_interleaved` says that the rows of q and k are in the order of
    neighbouring RoPE pairs. `frequency_factors` names the tensor that divides RoPE's inverse frequencies (llama3
    scaling), and `rope_magnitude` multiplies cosine and sine. `ignored` tensors are computed from the config instead.
    """

    names: Mapping[str, str]
    kinds: Mapping[str, str]
    is_interleaved: bool = False
    frequency_factors: str | None = None
    rope_magnitude: float = 1.0
    group_size: int = 0
    ignored: frozenset[str] = frozenset()


class Cuts(Protocol):
    """The share of a rank in packed matrices (`rank_share.py`)."""

    def cut_packed(self, name: str, weight: PackedWeight) -> PackedWeight:
        """Return the rank's part of a matrix. Raises EngineError."""

    def cut_scales(self, name: str, data: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
        """Return the scales of a matrix's data, which may be the rank's part already. Raises EngineError."""


def compute_dtype(arithmetic: Arithmetic) -> torch.dtype:
    """Return the dtype of activations and of the KV cache."""
    return torch.float32 if arithmetic == "exact" else torch.bfloat16


def place_packed(
    module: nn.Module,
    source: PackedSource,
    tensors: Mapping[str, torch.Tensor],
    arithmetic: Arithmetic,
    share: Cuts | None = None,
) -> dict[str, torch.Tensor]:
    """Put the packed matrices of `tensors` (by stored names) into `module`, which was built on the meta device.

    With a `share` the module is one rank's, and takes the parts that are its. Returns the rest, norms and biases, by
    the module's names and in float32, which most files have them in.
    Without a head of its own the module uses the embedding's matrix; surplus tensors are left out with a
    warning. Raises EngineError naming a tensor that is missing, of another shape, or of an unsupported type.
    """
    dtype = compute_dtype(arithmetic)
    weights, vectors = _sorted_out(source, tensors, share)
    weights.setdefault(f"{_HEAD}.weight", weights.get(f"{_EMBEDDING}.weight", _NOTHING))
    if share is not None:
        weights = {name: one if one is _NOTHING else share.cut_packed(name, one) for name, one in weights.items()}
    for path, old in list(module.named_modules()):
        if not isinstance(old, nn.Linear | nn.Embedding):
            continue
        name = f"{path}.weight"
        weight = weights.pop(name, _NOTHING)
        if weight is _NOTHING:
            raise EngineError(f"tensor {name!r} is missing ({_stored_name(source, name)})")
        if (weight.rows, weight.columns) != tuple(old.weight.shape):
            raise EngineError(
                f"tensor {_stored_name(source, name)} has shape {[weight.rows, weight.columns]}, "
                f"expected {list(old.weight.shape)}"
            )
        new: nn.Module
        if isinstance(old, nn.Embedding):
            new = PackedEmbedding(weight, dtype)
        else:
            bias = vectors.pop(f"{path}.bias", None)
            if (bias is None) != (old.bias is None):
                raise EngineError(f"tensor {path + '.bias'!r} is {'missing' if bias is None else 'unknown here'}")
            new = PackedLinear(weight, bias, arithmetic)
        parent, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(parent), leaf, new)
    if weights:
        warn_of_surplus(list(weights))
    return vectors


def warn_of_surplus(names: Sequence[str]) -> None:
    """Warn that tensors are left out, as transformers does."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    logger.warning("tensor %r%s is no part of the model, and is left out", names[0], more)


def uses_torch_products(module: nn.Module) -> bool:
    """Return whether any linear layer leaves its product to torch."""
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear | PackedLinear)]
    return any(
        isinstance(layer, nn.Linear) or product_path(layer.packed, layer.arithmetic) in ("torch", "unpack")
        for layer in linears
    )


_NOTHING = PackedWeight("", torch.empty(0), 0, 0)


def _sorted_out(
    source: PackedSource, tensors: Mapping[str, torch.Tensor], share: Cuts | None
) -> tuple[dict[str, PackedWeight], dict[str, torch.Tensor]]:
    """Return matrices and vectors by the names of the module's parameters."""
    weights: dict[str, PackedWeight] = {}
    vectors: dict[str, torch.Tensor] = {}
    if surplus := [stored for stored in tensors if _is_surplus(source, stored)]:
        warn_of_surplus(surplus)
    for stored, tensor in tensors.items():
        name, kind = source.names.get(stored), source.kinds.get(stored)
        if name is None or kind is None or stored in source.ignored or stored == source.frequency_factors:
            continue
        if "*" in name and tensor.dim() == 3:
            for expert, matrix in enumerate(tensor):
                weights[name.replace("*", str(expert))] = packed_weight(stored, kind, matrix)
        elif tensor.dim() == 1 and tensor.is_floating_point():
            vectors[name] = tensor.float()
        elif kind == GROUP_INT8:
            scales = tensors.get(stored.replace(".weight", ".scales"))
            if scales is None:
                raise EngineError(f"tensor {stored!r} has no scales")
            if share is not None:
                scales = share.cut_scales(name, tensor, scales, source.group_size)
            weights[name] = group_int8_weight(stored, tensor, scales, source.group_size)
        else:
            weights[name] = packed_weight(stored, kind, tensor)
    return weights, vectors


def _is_surplus(source: PackedSource, stored: str) -> bool:
    is_known = stored in source.names and stored in source.kinds
    return not is_known and stored not in source.ignored and stored != source.frequency_factors


def _stored_name(source: PackedSource, name: str) -> str:
    return next((stored for stored, given in source.names.items() if given == name), name)
