"""Tensors of any format: type, shape, and access to the bytes; several matrices in one tensor taken apart.

Some encoders' files have matrices one above the other. transformers splits them when it loads such a file, and joins
them again when it saves. Here a part is a run of the file, so nothing is copied. Source: transformers 5.23,
`conversion_mapping.py`, whose other names are renamed later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from weights.formats.untrusted import shown
from weights.records.errors import FormatError

_HEADS: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FUSED: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {  # by model_type, of a module's name
    "gte": {"attention.qkv_proj": _HEADS, "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")},
    "jina_embeddings_v3": {"mixer.Wqkv": _HEADS},
    "nomic_bert": {"attn.Wqkv": _HEADS},
}


class ReadableTensor(Protocol):
    """A tensor whose bytes can be read. `dtype` is a name of `weights.records.dtypes`; bytes are C order,
    little-endian."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...

    def read(self) -> bytes | memoryview:
        """Return the bytes. Raises FormatError naming the file when they cannot be had."""
        ...


class SourceTensor(ReadableTensor, Protocol):
    """A tensor in a file of a checkpoint."""

    @property
    def file(self) -> Path:
        """File that the bytes come from."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor that lies in a file as it is: `nbytes` bytes from byte `offset` on."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> bytes:
        """Return the bytes. Raises FormatError when the file ends before them, as one that shrinks meanwhile does."""
        parts, position = [], 0
        try:
            with self.file.open("rb", buffering=0) as file:
                while position < self.nbytes:
                    part = os.pread(file.fileno(), self.nbytes - position, self.offset + position)
                    if not part:
                        raise FormatError(
                            f"{self.file}: ends at byte {self.offset + position}, a tensor needs bytes up to "
                            f"{self.offset + self.nbytes}"
                        )
                    parts.append(part)
                    position += len(part)
        except OSError as error:
            raise FormatError(f"{self.file}: {error.strerror or error}") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)


def split_rows(model_type: str, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return the tensors with those of several parts split. Raises FormatError for one of no whole parts."""
    found: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        fused = _FUSED.get(model_type, {})
        stem = next((stem for stem in fused if module.endswith(f".{stem}")), None)
        if stem is None or not isinstance(tensor, FileTensor):
            found[name] = tensor
            continue
        count = len(fused[stem])
        if not tensor.shape or tensor.shape[0] % count:
            raise FormatError(
                f"{tensor.file}: tensor {shown(name)} has shape {list(tensor.shape)}, expected {count} parts of rows"
            )
        nbytes, shape = tensor.nbytes // count, (tensor.shape[0] // count, *tensor.shape[1:])
        for place, part in enumerate(fused[stem]):
            offset = tensor.offset + place * nbytes
            renamed = f"{module.removesuffix(stem)}{part}.{leaf}"
            found[renamed] = FileTensor(tensor.file, offset, nbytes, tensor.dtype, shape)
    return found
