"""The tensors of a checkpoint as views of its own files, without a store: for what reads a model once and judges it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
    maps: dict[Path, torch.Tensor] = {}
    tensors, num_elements = {}, 0
    for name, tensor in component.tensors.items():
        if not isinstance(tensor, FileTensor):
            raise FormatError(f"{model}: quantized by another program; import it into a store to read it")
        if tensor.file not in maps:
            # Private pages: torch wants memory that may be written, and nothing is ever written.
            maps[tensor.file] = torch.from_numpy(np.memmap(tensor.file, np.uint8, "c"))
        dtype, shape = memory_form(tensor.dtype, tensor.shape)
        raw = maps[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]
        aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
        tensors[name] = aligned.view(dtype).view(shape)
        num_elements += int(np.prod(tensor.shape))
    return (model if model.is_dir() or model.suffix == ".gguf" else model.parent), tensors, num_elements
