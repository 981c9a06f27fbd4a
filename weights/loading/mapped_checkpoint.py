"""The tensors of a checkpoint as views of its own files, without a store: for what reads a model once and judges it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from weights.errors import FormatError
from weights.formats.checkpoint import read_checkpoint
from weights.formats.tensors import FileTensor
from weights.loading.views import Tensors, memory_form


def mapped_tensors(model: Path) -> tuple[Path, Tensors, int]:
    """Return what describes a checkpoint, its tensors as views of the mapped files, and the number of their elements.

    A folder describes it, or a GGUF file itself: beside it there may be others.

    The checkpoint is a language model's: one component. Raises FormatError for a folder or file of no known format.
    """
    (component,) = read_checkpoint(model).components
    stored = {name: tensor for name, tensor in component.tensors.items() if isinstance(tensor, FileTensor)}
    if len(stored) < len(component.tensors):
        raise FormatError(f"{model}: quantized by another program; import it into a store to read it")
    num_elements = sum(math.prod(tensor.shape) for tensor in stored.values())
    return (model if model.is_dir() or model.suffix == ".gguf" else model.parent), mapped_views(stored), num_elements


def mapped_views(stored: Mapping[str, FileTensor]) -> Tensors:
    """Return tensors of one file or several in their forms in memory, views of the mapped files.

    What is written there stays this process's own. Raises FormatError.
    """
    maps: dict[Path, npt.NDArray[np.uint8]] = {}
    found = {}
    for name, tensor in stored.items():
        if tensor.file not in maps:
            try:
                maps[tensor.file] = np.memmap(tensor.file, np.uint8, "c")
            except (OSError, ValueError) as error:
                raise FormatError(f"{tensor.file}: {error}") from None
        dtype, shape = memory_form(tensor.dtype, tensor.shape)
        # Cut before torch sees it: each tensor has a storage of its own, by which others know it.
        flat = maps[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.offset % dtype.itemsize:  # a file may have an alignment of its own
            flat = flat.copy()
        found[name] = torch.from_numpy(flat).view(dtype).view(shape)
    return found
