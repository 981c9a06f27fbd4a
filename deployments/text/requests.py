"""A request for conditioning, its answer, and tensors as they travel between processes.

Ray maps numpy arrays without a copy. It would pickle torch tensors, at seconds per GiB, and numpy has no bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from configs.model import LongText, TextPadding
from configs.options import PromptReading
from deployments.records import CacheUse


@dataclass(frozen=True, slots=True)
class ConditioningRequest(PromptReading):
    """The text half of an image request.

    `prompt_2` is read by all encoders but the first, in place of `prompt`. `use_negative` says that guidance will be
    run. `text_padding` and `long_text` are the model's (see
    `Family.texts.plan`). `priority` 0 is the encoder's default;
    `timeout_s` bounds the time in its admission queue. `adapters` are LoRAs by name and their strength; those that
    change no text encoder are passed over. `encodes_alone`: no text shares its forward, so that batch-mates change no
    bit. `images`, uint8 (height, width, 3), are seen with each of its texts. `arguments` are those of a stock
    pipeline's `encode_prompt` (`TextCall.arguments`): then the prompt only says who encodes it.
    """

    model: str
    prompt: str
    negative_prompt: str | None
    use_negative: bool
    model_version: str | None = None
    text_padding: TextPadding = "stock"
    long_text: LongText = "truncate"
    priority: int = 0
    timeout_s: float | None = None
    adapters: Mapping[str, float] = field(default_factory=dict)
    adapter_versions: Mapping[str, str] = field(default_factory=dict)
    encodes_alone: bool = False
    arguments: Mapping[str, Any] | None = None
    images: tuple[npt.NDArray[np.uint8], ...] = ()
    prompt_2: str | None = None


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as bytes: `data` in C order; `dtype` by its torch name, "bfloat16" say."""

    data: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Conditioning tensors by name, on their way to a worker."""

    tensors: dict[str, PackedTensor]
    encode_ms: float
    cache: CacheUse
    warnings: tuple[str, ...]


def pack(tensors: Mapping[str, torch.Tensor]) -> dict[str, PackedTensor]:
    """Return read-only views of the tensors that lie in memory in C order, and copies of the others."""
    return {name: _pack(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}


def unpack(packed: Mapping[str, PackedTensor]) -> dict[str, torch.Tensor]:
    """Return copies: tensors from Ray are read-only shared memory."""
    return {name: _unpack(record) for name, record in packed.items()}


def _pack(tensor: torch.Tensor) -> PackedTensor:
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    data.flags.writeable = False
    return PackedTensor(data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _unpack(record: PackedTensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, record.dtype)
    if record.data.size == 0:  # an array without bytes may have stride 0, which cannot be viewed as a wider type
        return torch.empty(record.shape, dtype=dtype)
    return torch.from_numpy(record.data.copy()).view(dtype).view(record.shape)
