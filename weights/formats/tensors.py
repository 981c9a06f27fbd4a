"""Tensors of any format: type, shape, and access to the bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weights.errors import FormatError


class ReadableTensor(Protocol):
    """A tensor whose bytes can be read. `dtype` is a name of `weights.dtypes`; bytes are C order, little-endian."""

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
