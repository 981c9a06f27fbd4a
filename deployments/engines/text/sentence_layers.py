"""The layers above a sentence encoder's transformer, read from a sentence-transformers folder.

Pooling makes one vector of many token vectors. Dense makes class scores, or vectors of another size, of pooled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.nn import functional as F

from deployments.engines.embedding_rules import read_pooling_rule
from deployments.engines.protocol import ComputationFailed, EngineError
from weights.errors import FormatError
from weights.formats.dense_head import POOLED, DenseConfig, check_dense_tensors, read_dense_config
from weights.torch_dtypes import DTYPE_NAMES

_MODES: Final = ("cls", "max", "mean")
# A closed table: the stock class imports whatever name the config has, which may be anybody's code.
ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "torch.nn.modules.linear.Identity": lambda scores_BC: scores_BC,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": F.gelu,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of token vectors into one vector: `modes` are concatenated, `normalize` scales the result to length 1."""

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False

    def __call__(self, hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        """(B, L, D) and a 0/1 mask (B, L) -> (B, D * len(modes))."""
        pooled = torch.cat([_pool(mode, hidden_BLD, mask_BL) for mode in self.modes], dim=-1)
        return torch.nn.functional.normalize(pooled, p=2, dim=-1) if self.normalize else pooled


def load_pooling(folder: Path) -> Pooling:
    """Read what `folder`'s modules.json says; mean pooling without one, as sentence-transformers does."""
    rule = read_pooling_rule(folder, _MODES)
    return Pooling(rule.modes or ("mean",), rule.normalize) if rule else Pooling()


def _pool(mode: str, hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    if mode == "cls":
        return hidden_BLD[:, 0]
    mask_BL1 = mask_BL.unsqueeze(-1)
    if mode == "max":
        return hidden_BLD.masked_fill(mask_BL1 == 0, float("-inf")).amax(dim=1)
    # Sums of half-precision vectors lose bits; the stock library adds them up in float32 as well.
    summed_BD = (hidden_BLD * mask_BL1.to(hidden_BLD.dtype)).sum(dim=1, dtype=torch.float32)
    return (summed_BD / mask_BL1.sum(dim=1).clamp(min=1)).to(hidden_BLD.dtype)


class DenseHead:
    """`sentence_transformers`' Dense around tensors that exist already; nothing is copied or written. Thread-safe."""

    def __init__(self, config: DenseConfig, tensors: Mapping[str, torch.Tensor], where: Path) -> None:
        """`where` is named in errors. Raises EngineError: tensors that do not fit, an activation that is not known."""
        try:
            check_dense_tensors(
                where, config, {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
            )
        except FormatError as error:
            raise EngineError(str(error)) from None
        if config.activation_function not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise EngineError(f"{where}: unknown activation_function {config.activation_function!r} (known: {known})")
        if config.module_input_name != POOLED:
            raise EngineError(f"{where}: a Dense module over {config.module_input_name!r}, expected {POOLED!r}")
        self.in_features = config.in_features
        self.out_features = config.out_features
        self.labels = config.labels
        self._weight_CD = tensors["linear.weight"]
        self._bias_C = tensors.get("linear.bias")
        self._activation = ACTIVATIONS[config.activation_function]
        self._use_residual = config.use_residual
        self._residual_CD = tensors.get("residual.weight")
        # Half-precision weights are read in float32: scores of close classes differ by less than a half can hold.
        self.dtype = torch.promote_types(self._weight_CD.dtype, torch.float32)

    def apply(self, x_BD: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Turn pooled vectors (B, D) of any floating dtype into (B, C) in `dtype`, float32 at least.

        The result is on the device of `x_BD`, or is `out`. Raises EngineError when shapes or dtypes do not fit or a
        feature is not finite, ComputationFailed when a score is not.
        """
        if x_BD.ndim != 2 or x_BD.shape[1] != self.in_features or not x_BD.is_floating_point():
            raise EngineError(f"expected floating vectors (B, {self.in_features}), got {_described(x_BD)}")
        if not x_BD.isfinite().all():
            raise EngineError("features: expected finite numbers, got NaN or infinity")
        if out is not None and (out.shape != (len(x_BD), self.out_features) or out.dtype != self.dtype):
            expected = f"{self.dtype} {[len(x_BD), self.out_features]}"
            raise EngineError(f"expected an output of {expected}, got {_described(out)}")
        with torch.no_grad():
            here_BD = x_BD.to(self._weight_CD.device, self.dtype)
            bias_C = None if self._bias_C is None else self._bias_C.to(self.dtype)
            scores_BC = self._activation(F.linear(here_BD, self._weight_CD.to(self.dtype), bias_C))
            if self._use_residual:
                straight_BC = here_BD
                if self._residual_CD is not None:
                    straight_BC = F.linear(here_BD, self._residual_CD.to(self.dtype))
                scores_BC = scores_BC + straight_BC
            if not scores_BC.isfinite().all():
                raise ComputationFailed("the head made scores of the features that are not finite")
            return scores_BC.to(x_BD.device) if out is None else out.copy_(scores_BC)


def load_dense_head(folder: Path, tensors: Mapping[str, torch.Tensor]) -> DenseHead:
    """Return the head of `folder`/config.json around `tensors`. Raises EngineError naming the file."""
    path = folder / "config.json"
    try:
        config = read_dense_config(path)
    except FormatError as error:
        raise EngineError(str(error)) from None
    return DenseHead(config, tensors, path)


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
