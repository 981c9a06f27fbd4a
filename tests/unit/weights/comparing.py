"""Tensors, manifests and folders in forms that tests compare."""

from __future__ import annotations

from pathlib import Path

import torch

from weights.platform.torch_dtypes import TORCH_DTYPES
from weights.records.manifest import Manifest, TensorRef


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    def value(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        return tensor.dtype, tensor.shape, raw(tensor)

    return {name: value(tensor) for name, tensor in ours.items()} == {
        name: value(tensor) for name, tensor in theirs.items()
    }


def refs(manifest: Manifest) -> list[TensorRef]:
    return [ref for part in manifest.components.values() for ref in part.tensors.values()]


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def flip(file: Path, position: int) -> None:
    """Change a bit of a file's byte."""
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 0x10]))


def random_tensors() -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, a scalar, an empty one, and the same bytes twice."""
    tensors = {}
    for number, (name, dtype) in enumerate(TORCH_DTYPES.items()):
        data = torch.randint(
            0, 2 if dtype is torch.bool else 256, (number * 37 + 1, 3, dtype.itemsize), dtype=torch.uint8
        )
        tensors[name] = data.view(dtype).squeeze(-1)
    equal = {"first": torch.arange(5.0), "second": torch.arange(5.0)}
    return tensors | equal | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
