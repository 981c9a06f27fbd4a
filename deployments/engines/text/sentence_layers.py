"""The layers above a sentence encoder's transformer, read from a sentence-transformers folder.

Pooling makes one vector of many token vectors. Dense makes class scores, or vectors of another size, of pooled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.nn import functional as F

from deployments.engines.libraries.embedding_rules import read_pooling_rule
from deployments.engines.records.protocol import ComputationFailed, EngineError
from deployments.engines.text.known import ACTIVATIONS, POOLINGS, SOFTMAX, ScoringRule, check_head
from weights.formats.dense_head import DenseConfig, check_dense_tensors, read_dense_config
from weights.formats.encoder_files import SentenceStage
from weights.platform.torch_dtypes import DTYPE_NAMES
from weights.records.errors import FormatError

_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = dict(
    zip(ACTIVATIONS, (lambda scores_BC: scores_BC, torch.tanh, torch.relu, F.gelu, torch.sigmoid), strict=True)
)


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of token vectors into one vector: `modes` are concatenated, `normalize` scales the result to length 1.

    `later` are the stages that make the embedding from it, if there are any.
    """

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False
    later: tuple[SentenceStage, ...] = ()

    def __call__(self, hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        """Pool (B, L, D) under a 0/1 mask (B, L): (B, D * len(modes))."""
        pooled = torch.cat([_pool(mode, hidden_BLD, mask_BL) for mode in self.modes], dim=-1)
        return torch.nn.functional.normalize(pooled, p=2, dim=-1) if self.normalize else pooled


def load_pooling(folder: Path) -> Pooling:
    """Read the pooling of `folder`'s modules.json; mean pooling without one, as sentence-transformers does."""
    rule = read_pooling_rule(folder, POOLINGS, takes_dense=True)
    return Pooling(rule.modes or ("mean",), rule.normalize, rule.later) if rule else Pooling()


def apply_stages(
    stages: Sequence[SentenceStage], heads: Mapping[str, DenseHead], pooled: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Apply the stages after the pooling to vectors (D,); `heads` are the Dense layers by folder.

    Raises EngineError and ComputationFailed as `DenseHead.apply` does.
    """
    x_BD = torch.stack([vector.float() for vector in pooled])
    for stage in stages:
        x_BD = heads[stage.folder].apply(x_BD) if stage.folder in heads else F.normalize(x_BD, dim=-1)
    return list(x_BD)


def _pool(mode: str, hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    if mode == "cls":
        return hidden_BLD[:, 0]
    mask_BL1 = mask_BL.unsqueeze(-1)
    if mode == "max":
        return hidden_BLD.masked_fill(mask_BL1 == 0, float("-inf")).amax(dim=1)
    if mode == "lasttoken":
        last_B = mask_BL.sum(dim=1) - 1
        return hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B]
    # Sums of half-precision vectors lose bits; the stock library adds them up in float32 as well.
    weights_BL1 = mask_BL1.float()
    if mode == "weightedmean":  # later tokens count more
        weights_BL1 = weights_BL1.cumsum(dim=1) * mask_BL1
        summed_BD = (hidden_BLD * weights_BL1).sum(dim=1)
    else:
        summed_BD = (hidden_BLD * mask_BL1.to(hidden_BLD.dtype)).sum(dim=1, dtype=torch.float32)
    size_B1 = weights_BL1.sum(dim=1).clamp(min=1)
    return (summed_BD / (size_B1.sqrt() if mode == "mean_sqrt_len_tokens" else size_B1)).to(hidden_BLD.dtype)


def scores_of(logits_C: torch.Tensor, rule: ScoringRule) -> torch.Tensor:
    """Return a classifier's scores of one text, float32 (C,)."""
    if rule.activation == SOFTMAX:
        return logits_C.float().softmax(-1)
    return _ACTIVATIONS[rule.activation](logits_C.float())


class DenseHead:
    """`sentence_transformers`' Dense around existing tensors; nothing is copied or written. Thread-safe."""

    def __init__(self, config: DenseConfig, tensors: Mapping[str, torch.Tensor], where: Path) -> None:
        """`where` is named in errors. Raises EngineError for tensors that do not fit, and for unknown activations."""
        try:
            check_dense_tensors(
                where, config, {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
            )
        except FormatError as error:
            raise EngineError(str(error)) from None
        check_head(config, where)
        self.in_features = config.in_features
        self.out_features = config.out_features
        self.labels = config.labels
        self._weight_CD = tensors["linear.weight"]
        self._bias_C = tensors.get("linear.bias")
        self._activation = _ACTIVATIONS[config.activation_function]
        self._use_residual = config.use_residual
        self._residual_CD = tensors.get("residual.weight")
        # Half-precision weights are read in float32: scores of close classes differ by less than half precision.
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
