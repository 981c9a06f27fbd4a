"""The denoiser of a pipeline in a GGUF file, as ComfyUI's users write them: tensors of the model's original code.

diffusers translates the names, as for other single files, with the blocks of packed tensors in the place of their
elements: it cuts fused matrices into runs of whole rows, and a row is whole blocks, so what it cuts or puts together is
exact. A packed matrix of a linear layer stays packed; what cannot is unpacked to float32.

Imported by `weights.formats.checkpoint` alone, when a file comes with a pipeline that it is like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import diffusers
import numpy as np
import numpy.typing as npt
import torch

from weights.base_pipeline import BasePipeline
from weights.dtypes import BLOCK_SIZES, tensor_nbytes
from weights.errors import FormatError
from weights.formats.checkpoint import Checkpoint, SourceComponent, weighted_parts
from weights.formats.ggml_values import UNPACKED_KINDS, unpack_blocks
from weights.formats.gguf_model import DENOISERS, gguf_set, read_gguf_model
from weights.formats.published_quantization import ComputedTensor
from weights.formats.single_file import (
    WithoutCopies,
    blank_model,
    convert_denoiser,
    expected_shapes,
    matched,
    unlike,
    unreadable,
)
from weights.formats.tensors import FileTensor, SourceTensor
from weights.formats.torch_file import TorchTensor
from weights.formats.untrusted import shown
from weights.formats.weight_files import read_json
from weights.loading.views import memory_form
from weights.torch_dtypes import DTYPE_NAMES

FILE: Final = "diffusion_pytorch_model.gguf"
_PREFIX: Final = "model.diffusion_model."


def read_gguf_denoiser(path: Path, base: BasePipeline) -> Checkpoint:
    """Return the pipeline `base` with the denoiser of a GGUF file, or of the split set that `path` is one of.

    HAZARD: the file is mapped, so one that is cut short while it is open ends the process with SIGBUS.
    Raises FormatError: another architecture, a type that nothing here unpacks, missing tensors, names that diffusers
    cannot translate, a component that `base` has no weights of.
    """
    model = read_gguf_model(gguf_set(path))
    classes = weighted_parts(base.folder)
    name = _denoiser_of(path, model.architecture, base, classes)
    unknown = next((item for item in model.tensors.items() if item[1].dtype not in _KNOWN), None)
    if unknown:
        raise FormatError(f"{path}: tensor {shown(unknown[0])} is {unknown[1].dtype}; known are {', '.join(_KNOWN)}")
    components = []
    for part, (library, class_name) in classes.items():
        if part == name:
            tensors = _translated(path, model.tensors, base, name, class_name)
            metadata = {"general.architecture": str(model.architecture)}
            components.append(SourceComponent(name, library, class_name, name, tensors, metadata, (FILE,), "gguf"))
        elif part in base.components:
            components.append(base.components[part])
        else:
            raise FormatError(f"{path}: has no {part}, and neither has {base.name!r}, which it is said to be like")
    class_name = str(read_json(base.folder / "model_index.json").get("_class_name"))
    return Checkpoint(path, "diffusion", class_name, tuple(components), skeleton=base.folder)


_KNOWN: Final = ("F32", "F16", "BF16", *UNPACKED_KINDS)


def _denoiser_of(
    path: Path, architecture: str | None, base: BasePipeline, classes: Mapping[str, tuple[str, str]]
) -> str:
    """Return the component of `base` that a file of this architecture is. Raises FormatError."""
    wanted = DENOISERS.get(architecture or "")
    if wanted is None:
        raise FormatError(
            f"{path}: GGUF architecture {shown(architecture)} is no denoiser that is read (known: "
            f"{', '.join(DENOISERS)})"
        )
    found = next((name for name, (_, class_name) in classes.items() if class_name in wanted), None)
    if found is None:
        has = ", ".join(f"{name} {class_name}" for name, (_, class_name) in classes.items())
        raise FormatError(
            f"{path}: GGUF architecture {architecture!r} is a {' or '.join(wanted)}, and {base.name!r}, which it is "
            f"said to be like, has none ({has})"
        )
    return found


def _translated(
    path: Path, stored: Mapping[str, FileTensor], base: BasePipeline, name: str, class_name: str
) -> dict[str, SourceTensor]:
    """Return the denoiser's tensors under diffusers' names."""
    model_class = getattr(diffusers, class_name)
    mapped = _mapped(stored)
    kinds = {key.removeprefix(_PREFIX): tensor.dtype for key, tensor in stored.items()}
    tracked = _Blocks(mapped, kinds)
    try:
        model = blank_model(model_class, base.folder / name)
        with tracked:
            tensors = convert_denoiser(mapped, model_class, base.folder, name)
    except Exception as error:
        raise unreadable(path, name, class_name, base, error) from None
    packable = {f"{key}.weight" for key, part in model.named_modules() if type(part) is torch.nn.Linear}
    found: dict[str, SourceTensor] = {}
    for key, shape in matched(path, name, base, expected_shapes(model), tensors).items():
        tensor, kind = tensors[key], tracked.kind_of(tensors[key])
        if kind is None and tensor.dtype == torch.uint8:
            raise FormatError(f"{path}: {name}: diffusers computes with the elements of {key}, which are packed")
        form = tuple(tensor.shape) if kind is None else _elements(kind, tuple(tensor.shape))
        if _without_ones(form) != _without_ones(shape):
            raise unlike(path, name, key, form, base, shape)
        found[key] = _source(path, tensor, kind, shape, stays=key in packable)
    return found


def _source(path: Path, tensor: torch.Tensor, kind: str | None, shape: tuple[int, ...], *, stays: bool) -> SourceTensor:
    """Return a tensor as it comes into the store, of the shape that the model has it in."""
    if kind is None:
        return TorchTensor(path, DTYPE_NAMES[tensor.dtype], tensor.reshape(shape))
    if stays:
        return BlockTensor(path, kind, shape, tensor)
    return ComputedTensor(path, "F32", shape, lambda: unpack_blocks(kind, tensor).reshape(shape).numpy())


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A packed matrix: rows of blocks as bytes, views of a mapped file or put together of such."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    rows: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return tensor_nbytes(self.dtype, self.shape)

    def read(self) -> memoryview:
        """Return the bytes."""
        return self.rows.numpy().reshape(-1).data


class _Blocks(WithoutCopies):
    """Knows the types of packed tensors through what diffusers does with them: views, and joins of one type."""

    def __init__(self, mapped: Mapping[str, torch.Tensor], kinds: Mapping[str, str]) -> None:
        super().__init__(mapped.values())
        packed = {key: tensor for key, tensor in mapped.items() if kinds[key] in BLOCK_SIZES}
        self._kinds = {_place(tensor): kinds[key] for key, tensor in packed.items()}
        self._joined: list[torch.Tensor] = []  # kept, for a place that was let go could be another one's

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func is torch.cat and isinstance(result, torch.Tensor):
            kinds = {self.kind_of(part) for part in args[0]}
            is_by_rows = (kwargs or {}).get("dim", args[1] if len(args) > 1 else 0) == 0
            if len(kinds) == 1 and (kind := kinds.pop()) and is_by_rows:
                self._kinds[_place(result)] = kind
                self._joined.append(result)
        return result

    def kind_of(self, tensor: torch.Tensor) -> str | None:
        """Return the type of packed rows, None for other tensors and for what is no run of whole rows."""
        kind = self._kinds.get(_place(tensor))
        return kind if kind and tensor.dtype == torch.uint8 and tensor.is_contiguous() else None


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _mapped(stored: Mapping[str, FileTensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file or several in their forms in memory, views of the mapped files."""
    files = {file: _bytes_of(file) for file in {tensor.file for tensor in stored.values()}}
    found = {}
    for key, tensor in stored.items():
        dtype, shape = memory_form(tensor.dtype, tensor.shape)
        flat = files[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.offset % dtype.itemsize:  # a file may have an alignment of its own
            flat = flat.copy()
        found[key.removeprefix(_PREFIX)] = torch.from_numpy(flat).view(dtype).view(shape)
    return found


def _bytes_of(file: Path) -> npt.NDArray[np.uint8]:
    """Map a file; what is written there stays this process's own. Raises FormatError."""
    try:
        return np.memmap(file, np.uint8, "c")
    except (OSError, ValueError) as error:
        raise FormatError(f"{file}: {error}") from None


def _elements(kind: str, form: tuple[int, ...]) -> tuple[int, ...]:
    elements, nbytes = BLOCK_SIZES[kind]
    return (*form[:-1], form[-1] // nbytes * elements)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape as ggml keeps it: without leading sizes of 1."""
    first = next((place for place, size in enumerate(shape[:-1]) if size != 1), len(shape) - 1)
    return shape[first:]
