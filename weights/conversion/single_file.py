"""Pipelines in one file, as trainers and UIs write them: the file's tensors, under diffusers' names.

diffusers translates the names (by the tables of its `from_single_file`), with a mapped file in the place of loaded
tensors: nothing is read before it is hashed but what diffusers computes itself. A tensor has the bytes that it has in
the folder form of the same model, so the store keeps it once.

In GGUF, as ComfyUI's users write it, a file has the denoiser alone, with blocks of packed tensors in the place of their
elements: diffusers cuts fused matrices into runs of whole rows, and a row is whole blocks, so what it cuts or puts
together is exact. A packed matrix of a linear layer stays packed; what cannot is unpacked to float32.

Imported by `weights.formats.checkpoint` alone, when a file comes with a pipeline that it is like.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import diffusers
import numpy as np
import torch
import transformers
from diffusers.loaders import single_file_utils
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from weights.conversion.torch_file import TorchTensor
from weights.formats.checkpoint import plain_configs, weighted_parts
from weights.formats.folder import read_json
from weights.formats.ggml_values import UNPACKED_KINDS, unpack_blocks
from weights.formats.gguf import DENOISERS, TEXT_ENCODERS, gguf_set, read_gguf_model
from weights.formats.gguf_names import t5_name
from weights.formats.low_precision import most_common_float, read_quantized_parts, wide_type, widened
from weights.formats.published_quantization import ComputedTensor
from weights.formats.quantized import Array, Quantized, round_to
from weights.formats.safetensors import SafetensorsHeader, read_header
from weights.formats.source import BasePipeline, Checkpoint, SourceComponent
from weights.formats.svdquant import nunchaku_class
from weights.formats.tensors import FileTensor, SourceTensor
from weights.formats.untrusted import shown
from weights.loading.views import mapped_views
from weights.platform.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES
from weights.records.dtypes import BLOCK_SIZES, tensor_nbytes
from weights.records.errors import FormatError

_Tensors = dict[str, torch.Tensor]
_Shapes = Mapping[tuple[str, ...], tuple[int, ...]]
_VAE_PREFIXES: Final = ("first_stage_model.", "vae.")
_VAE_NAMES: Final = ("decoder.conv_in.weight", "encoder.conv_in.weight")
_TEXT_PREFIXES: Final = ("cond_stage_model.", "conditioner.", "text_encoders.")
# Of two encoders, the one that is not the component's: diffusers tells them by their widths, which may be equal.
_OTHER_TEXTS: Final = {"text_encoder": ("conditioner.embedders.1.",), "text_encoder_2": ("conditioner.embedders.0.",)}
_MAX_NAMES: Final = 3
_SOLVER: Final = "scheduler/scheduler_config.json"
_GGUF_FILE: Final = "diffusion_pytorch_model.gguf"
_GGUF_PREFIX: Final = "model.diffusion_model."
_GGUF_TYPES: Final = ("F32", "F16", "BF16", *UNPACKED_KINDS)


def read_single_file(path: Path, base: BasePipeline) -> Checkpoint:
    """Return the pipeline of `path` with the skeleton of `base`, and of its components those that the file lacks.

    HAZARD: the file is mapped, so one that is cut short while it is open ends the process with SIGBUS.
    Raises FormatError: no tensors of any component, a component of which only a part is there, one that neither has,
    names that diffusers cannot translate, matrices in a low precision that is not read.
    """
    header = read_header(path)
    mapped, quantized = _mapped(path, header)
    classes = weighted_parts(base.folder)
    kind = nunchaku_class(path, header.tensors, header.metadata)
    if kind not in (None, *(class_name for _, class_name in classes.values())):
        raise FormatError(f"{path}: SVDQuant of a {kind}, which {base.name!r}, given as its `like`, does not have")
    components, found = [], list[str]()
    named = {name: part for name, part in _under_own_names(mapped, base).items() if name in classes}
    taken = {key for name in named for key in _all_names(base, name, *classes[name])}
    others = {key: tensor for key, tensor in mapped.items() if key not in taken}
    for name, (library, class_name) in classes.items():
        tensors = named.get(name) or _translated(path, others, base, name, library, class_name, quantized)
        if tensors is not None:
            part = _component(path, name, library, class_name, tensors)
            components.append(_computed(part, quantized))
            found.append(name)
        elif name in base.components:
            components.append(base.components[name])
        else:
            raise FormatError(f"{path}: has no {name}, and neither has {base.name!r}, given as its `like`")
    if not found:
        known = ", ".join(classes)
        raise FormatError(f"{path}: none of its {len(mapped)} tensors are of a component of {base.name!r} ({known})")
    class_name = str(read_json(base.folder / "model_index.json").get("_class_name"))
    headers = _marked_solver(header.tensors, header.metadata, base) | plain_configs(base.folder, components)
    return Checkpoint(path, "diffusion", class_name, tuple(components), headers, skeleton=base.folder)


def _under_own_names(mapped: Mapping[str, torch.Tensor], base: BasePipeline) -> dict[str, _Tensors]:
    """Return the components of `base` that a file has as they are in its folder, as files of one encoder are."""
    found: dict[str, _Tensors] = {}
    for name, part in base.components.items():
        shapes = {key: tensor.shape for key, tensor in part.tensors.items()}
        is_here = all(key in mapped and tuple(mapped[key].shape) == shape for key, shape in shapes.items())
        if shapes and is_here and not any(other.keys() & shapes.keys() for other in found.values()):
            found[name] = {key: mapped[key] for key in shapes}
    return found


def _all_names(base: BasePipeline, name: str, library: str, class_name: str) -> set[str]:
    """Return all names of a component's tensors: a tied one is often in a file several times."""
    own = set(base.components[name].tensors)
    model_class = getattr({"diffusers": diffusers, "transformers": transformers}.get(library), class_name, None)
    try:
        expected = _expected_shapes(_blank_model(model_class, base.folder / name)) if model_class else {}
    except Exception:  # a class of another version: its config says why when it is built
        return own
    return own.union(*expected)


def _marked_solver(tensors: Collection[str], metadata: Mapping[str, str], base: BasePipeline) -> dict[str, bytes]:
    """Return the solver's config in the place of the base's where a file says that its UNet predicts velocities.

    Empty tensors say so, `v_pred` and `ztsnr`, or the metadata. A schedule that ends without any signal begins at its
    last step. Sources: ComfyUI, `comfy/supported_models.py`; sd-scripts, `library/sai_model_spec.py`.
    """
    changes: dict[str, Any] = {}
    if "v_pred" in tensors or metadata.get("modelspec.prediction_type") == "v":
        changes["prediction_type"] = "v_prediction"
    if "ztsnr" in tensors or metadata.get("ss_zero_terminal_snr") == "True":
        changes |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    if not changes or not (base.folder / _SOLVER).is_file() or not (base.folder / "unet").is_dir():
        return {}
    return {_SOLVER: json.dumps(read_json(base.folder / _SOLVER) | changes, indent=2).encode()}


def read_vae_file(path: Path, checkpoint: Checkpoint) -> SourceComponent:
    """Return the VAE of a single file, as the class and config of a pipeline's own one read it. Raises FormatError."""
    own = next(part for part in checkpoint.components if part.name == "vae")
    base = BasePipeline(str(checkpoint.path), checkpoint.root, "", {})
    mapped, quantized = _mapped(path, read_header(path))
    tensors = _translated(path, mapped, base, "vae", own.library, str(own.class_name), quantized)
    if tensors is None:
        raise FormatError(f"vae: {path}: has no tensors of a VAE")
    return _computed(_component(path, "vae", own.library, str(own.class_name), tensors), quantized)


def _mapped(path: Path, header: SafetensorsHeader) -> tuple[_Tensors, dict[int, Quantized]]:
    """Return the file's tensors, mapped, and its matrices in low precision by the places of what stands for them.

    diffusers translates names, cuts tensors apart and puts them together. A matrix in low precision is not computed
    for that: something of its shape stands for it, in memory that is asked for and never touched.
    """
    found, mapped = read_quantized_parts(path, header.tensors, header.metadata), load_file(path)
    dtype = TORCH_DTYPES[wide_type(found.tensors)]
    matrices = {name: matrix for name, matrix in found.quantized.items() if math.prod(matrix.shape)}
    stand_ins = {name: torch.empty(matrix.shape, dtype=dtype) for name, matrix in matrices.items()}
    tensors = {name: stand_ins[name] if name in stand_ins else mapped[name] for name in found.tensors}
    return tensors, {_place(stand_ins[name]): matrix for name, matrix in matrices.items()}


def _computed(part: SourceComponent, quantized: Mapping[int, Quantized]) -> SourceComponent:
    """Return a component with what is computed in the place of what stands for it."""
    tensors: dict[str, TorchTensor] = part.tensors  # type: ignore[assignment]
    own = {
        name: _seen_through(tensor.tensor, quantized[place])
        for name, tensor in tensors.items()
        if (place := _place(tensor.tensor)) in quantized
    }
    if not own:
        return part
    others = {name: tensor for name, tensor in part.tensors.items() if name not in own}
    return replace(part, tensors=widened(part.tensors, own, wide_type(others)))


def _seen_through(view: torch.Tensor, matrix: Quantized) -> Quantized:
    """Return the quantized matrix that a view of a stand-in stands for."""
    shape, strides, offset = tuple(view.shape), view.stride(), int(view.storage_offset())
    if view.is_contiguous() and shape[1:] == matrix.shape[1:]:
        start = offset // max(1, math.prod(shape[1:]))
        return matrix.rows(start, start + len(view)) if shape else matrix

    return Quantized(matrix.file, shape, _View(matrix, shape, strides, offset))


@dataclass(frozen=True, slots=True)
class _View:
    """Elements of a matrix in another order."""

    matrix: Quantized
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def compute(self, start: int, stop: int) -> Array:
        whole = torch.from_numpy(np.ascontiguousarray(self.matrix.wide()))
        found: Array = whole.as_strided(self.shape, self.strides, self.offset).numpy()
        return found[start:stop] if self.shape else found


def _component(path: Path, name: str, library: str, class_name: str, tensors: _Tensors) -> SourceComponent:
    sources = {key: TorchTensor(path, DTYPE_NAMES[tensor.dtype], tensor) for key, tensor in tensors.items()}
    file = "diffusion_pytorch_model.safetensors" if library == "diffusers" else "model.safetensors"
    return SourceComponent(name, library, class_name, name, dict(sources), {"format": "pt"}, (file,))


def _translated(
    path: Path,
    mapped: Mapping[str, torch.Tensor],
    base: BasePipeline,
    name: str,
    library: str,
    class_name: str,
    quantized: Mapping[int, Quantized] = MappingProxyType({}),
) -> _Tensors | None:
    """Return the component's tensors under its own names, None if the file has none of them."""
    model_class = getattr({"diffusers": diffusers, "transformers": transformers}.get(library), class_name, None)
    if model_class is None:
        return None
    own = _own_tensors(mapped, name, model_class)
    if not own:
        return None
    convert = _text_encoder if library == "transformers" else _convert_denoiser
    try:
        expected = _expected_shapes(_blank_model(model_class, base.folder / name))
        with _WithoutCopies(own.values(), quantized):
            tensors = convert(own, model_class, base.folder, name)
    except Exception as error:
        raise _unreadable(path, name, class_name, base, error) from None
    kept = _Tensors()
    for key, shape in _matched(path, name, base, expected, tensors).items():
        if tuple(tensors[key].shape) != shape:
            raise _unlike(path, name, key, tensors[key].shape, base, shape)
        kept[key] = tensors[key]
    return kept


def _unreadable(path: Path, name: str, class_name: str, base: BasePipeline, error: Exception) -> FormatError:
    """Return the error for tensors that diffusers' conversion cannot take."""
    lacks = f"it has no {shown(str(error.args[0]))}" if isinstance(error, KeyError) and error.args else ""
    return FormatError(
        f"{path}: diffusers cannot read its {name} as the {class_name} of {base.name!r}, so it is hardly like that "
        f"model ({lacks or f'{type(error).__name__}: {str(error)[:300]}'})"
    )


def _unlike(
    path: Path, name: str, key: str, found: Sequence[int], base: BasePipeline, shape: Sequence[int]
) -> FormatError:
    """Return the error for a tensor of another shape than the base's config asks for."""
    return FormatError(
        f"{path}: {name}: {key} has shape {list(found)}, that of {base.name!r} is {list(shape)}: "
        "it is not like that model"
    )


def _matched(
    path: Path, name: str, base: BasePipeline, expected: _Shapes, tensors: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the shape that each weight of a model should have, by the name that it has in `tensors`.

    Raises FormatError for those that are not there.
    """
    kept, missing = dict[str, tuple[int, ...]](), []
    for names, shape in expected.items():
        key = next((key for key in names if key in tensors), None)
        if key is None:
            missing.append(names[0])
        else:
            kept[key] = shape
    if missing:
        shown = ", ".join(missing[:_MAX_NAMES])
        raise FormatError(
            f"{path}: its {name} lacks {len(missing)} of {len(expected)} tensors of {base.name!r}: {shown}"
        )
    return kept


def _own_tensors(mapped: Mapping[str, torch.Tensor], name: str, model_class: type) -> _Tensors:
    """Return the file's tensors for one component, under the file's names: what diffusers takes them from."""
    if model_class.__module__.startswith("transformers."):
        is_there = single_file_utils.is_clip_model_in_single_file(model_class, mapped) or (
            model_class.__name__ == "T5EncoderModel" and single_file_utils.is_t5_in_single_file(mapped)
        )
        texts = {key: value for key, value in mapped.items() if is_there and key.startswith(_TEXT_PREFIXES)}
        return {key: value for key, value in texts.items() if not key.startswith(_OTHER_TEXTS.get(name, ()))} or texts
    if name == "vae":
        is_bare = any(key in mapped for key in _VAE_NAMES)
        return {key: value for key, value in mapped.items() if is_bare or key.startswith(_VAE_PREFIXES)}
    if any(key in mapped for key in _VAE_NAMES):
        return {}
    others = (*_VAE_PREFIXES, *_TEXT_PREFIXES)
    return {key: value for key, value in mapped.items() if not key.startswith(others)}


def _convert_denoiser(tensors: _Tensors, model_class: Any, folder: Path, name: str) -> _Tensors:
    """Return a model's tensors under diffusers' names. Raises ValueError for a class that it reads from no file."""
    entry = next(
        (
            entry
            for known, entry in SINGLE_FILE_LOADABLE_CLASSES.items()
            if issubclass(model_class, getattr(diffusers, known))
        ),
        None,
    )
    if entry is None:
        raise ValueError(f"diffusers reads no {model_class.__name__} from a single file")
    convert: Callable[..., _Tensors] = entry["checkpoint_mapping_fn"]
    config = model_class.load_config(folder / name)
    takes = inspect.signature(convert).parameters
    more = {"config": config} if "config" in takes or "kwargs" in takes else {}
    return convert(checkpoint=dict(tensors), **more)


def _text_encoder(tensors: _Tensors, model_class: Any, folder: Path, name: str) -> _Tensors:
    make = (
        single_file_utils.create_diffusers_t5_model_from_checkpoint
        if model_class.__name__ == "T5EncoderModel"
        else single_file_utils.create_diffusers_clip_model_from_ldm
    )
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())  # of what is computed
    model = make(model_class, tensors, subfolder=name, config=str(folder), torch_dtype=dtype, local_files_only=True)
    return {key: tensor for key, tensor in model.state_dict().items() if not tensor.is_meta}


def _blank_model(model_class: Any, folder: Path) -> Any:
    """Return a model with the config in `folder`, built without memory."""
    with torch.device("meta"):
        if model_class.__module__.startswith("diffusers."):
            return model_class.from_config(model_class.load_config(folder))
        return model_class(model_class.config_class.from_pretrained(folder, local_files_only=True))


def _expected_shapes(model: torch.nn.Module) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the shape of each weight of a model, by its names: tied ones have several."""
    names: dict[int, list[str]] = {}
    weights = model.state_dict(keep_vars=True)
    for key, tensor in weights.items():
        names.setdefault(id(tensor), []).append(key)
    return {tuple(keys): tuple(weights[keys[0]].shape) for keys in names.values()}


class _WithoutCopies(TorchFunctionMode):
    """Gives the tensor itself where diffusers copies a mapped one as it is: copies of a file would fill the memory.

    `quantized` are matrices by the places of their stand-ins: what is no view of one is computed of its values.
    """

    def __init__(
        self, mapped: Iterable[torch.Tensor], quantized: Mapping[int, Quantized] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self._quantized = quantized
        self._files = {tensor.untyped_storage().data_ptr() for tensor in mapped}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.clone, torch.Tensor.to) and self._is_mapped(args[0]):
            return args[0]
        if func is torch.cat and len(args[0]) == 1 and self._is_mapped(args[0][0]):
            return args[0][0]
        if func is torch.split and isinstance(args[1], tuple) and kwargs.get("dim", 0) == 0:
            args = args[0], _scaled(args[1], len(args[0]))
        result = func(*args, **kwargs)
        if self._quantized and self._is_more_than_a_view(result, args):
            return func(*map(self._valued, args), **{name: self._valued(one) for name, one in kwargs.items()})
        return result

    def _is_more_than_a_view(self, result: Any, args: tuple[Any, ...]) -> bool:
        given = {_place(one) for one in _tensors_in(args)} & self._quantized.keys()
        return bool(given) and any(_place(one) not in given for one in _tensors_in(result))

    def _valued(self, value: Any) -> Any:
        """Return an argument with the values of what stands for matrices."""
        if isinstance(value, list | tuple):
            return type(value)(map(self._valued, value))
        if not isinstance(value, torch.Tensor) or (matrix := self._quantized.get(_place(value))) is None:
            return value
        return torch.from_numpy(np.ascontiguousarray(_seen_through(value, matrix).wide()))

    def _is_mapped(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and tensor.untyped_storage().data_ptr() in self._files


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)


def _scaled(sizes: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Return sizes in the same proportions whose sum is `total`: diffusers splits a Flux at the sizes of FLUX.1's."""
    scaled = tuple(size * total // sum(sizes) for size in sizes)
    return scaled if sum(scaled) == total else sizes


def read_gguf_denoiser(path: Path, base: BasePipeline) -> Checkpoint:
    """Return the pipeline `base` with the denoiser of a GGUF file, or of the split set that `path` is one of.

    HAZARD: the file is mapped, so one that is cut short while it is open ends the process with SIGBUS.
    Raises FormatError: another architecture, a type that nothing here unpacks, missing tensors, names that diffusers
    cannot translate, a component that `base` has no weights of.
    """
    model = read_gguf_model(gguf_set(path))
    classes = weighted_parts(base.folder)
    name = _part_of(path, model.architecture, base, classes)
    unknown = next((item for item in model.tensors.items() if item[1].dtype not in _GGUF_TYPES), None)
    if unknown:
        raise FormatError(
            f"{path}: tensor {shown(unknown[0])} is {unknown[1].dtype}; known are {', '.join(_GGUF_TYPES)}"
        )
    components = []
    for part, (library, class_name) in classes.items():
        if part == name and library == "transformers":
            components.append(_gguf_encoder(path, model.tensors, base, name, class_name))
        elif part == name:
            tensors = _translated_blocks(path, model.tensors, base, name, class_name)
            metadata = {"general.architecture": str(model.architecture)}
            components.append(
                SourceComponent(name, library, class_name, name, tensors, metadata, (_GGUF_FILE,), "gguf")
            )
        elif part in base.components:
            components.append(base.components[part])
        else:
            raise FormatError(f"{path}: has no {part}, and neither has {base.name!r}, given as its `like`")
    class_name = str(read_json(base.folder / "model_index.json").get("_class_name"))
    return Checkpoint(path, "diffusion", class_name, tuple(components), skeleton=base.folder)


def _part_of(path: Path, architecture: str | None, base: BasePipeline, classes: Mapping[str, tuple[str, str]]) -> str:
    """Return the component of `base` that a file of this architecture is. Raises FormatError."""
    known = {**DENOISERS, **TEXT_ENCODERS}
    wanted = known.get(architecture or "")
    if wanted is None:
        raise FormatError(
            f"{path}: GGUF architecture {shown(architecture)} is no part of a pipeline that is read (known: "
            f"{', '.join(known)})"
        )
    found = next((name for name, (_, class_name) in classes.items() if class_name in wanted), None)
    if found is None:
        has = ", ".join(f"{name} {class_name}" for name, (_, class_name) in classes.items())
        raise FormatError(
            f"{path}: GGUF architecture {architecture!r} is a {' or '.join(wanted)}, and {base.name!r}, given as "
            f"its `like`, has none ({has})"
        )
    return found


def _gguf_encoder(
    path: Path, stored: Mapping[str, FileTensor], base: BasePipeline, name: str, class_name: str
) -> SourceComponent:
    """Return a text encoder as a plain one, of the type that the base's own has: encoders compute with no blocks."""
    try:
        expected = _expected_shapes(_blank_model(getattr(transformers, class_name), base.folder / name))
    except Exception as error:
        raise _unreadable(path, name, class_name, base, error) from None
    mapped = {t5_name(key): tensor for key, tensor in mapped_views(stored).items()}
    kinds = {t5_name(key): tensor.dtype for key, tensor in stored.items()}
    own = base.components.get(name)
    dtype = most_common_float(own.tensors) if own else "BF16"
    found: dict[str, SourceTensor] = {}
    for key, shape in _matched(path, name, base, expected, mapped).items():
        kind, tensor = kinds[key], mapped[key]
        form = _elements(kind, tuple(tensor.shape)) if kind in BLOCK_SIZES else tuple(tensor.shape)
        if form != shape:
            raise _unlike(path, name, key, form, base, shape)
        found[key] = ComputedTensor(path, dtype, shape, partial(_unpacked, kind, tensor, dtype))
    return SourceComponent(name, "transformers", class_name, name, found, {"format": "pt"}, ("model.safetensors",))


def _unpacked(kind: str, tensor: torch.Tensor, dtype: str) -> Array:
    plain = unpack_blocks(kind, tensor) if kind in BLOCK_SIZES else tensor.float()
    return round_to(plain.numpy(), dtype)


def _translated_blocks(
    path: Path, stored: Mapping[str, FileTensor], base: BasePipeline, name: str, class_name: str
) -> dict[str, SourceTensor]:
    """Return the denoiser's tensors under diffusers' names."""
    model_class = getattr(diffusers, class_name)
    mapped = mapped_views({key.removeprefix(_GGUF_PREFIX): tensor for key, tensor in stored.items()})
    kinds = {key.removeprefix(_GGUF_PREFIX): tensor.dtype for key, tensor in stored.items()}
    tracked = _Blocks(mapped, kinds)
    try:
        model = _blank_model(model_class, base.folder / name)
        with tracked:
            tensors = _convert_denoiser(mapped, model_class, base.folder, name)
    except Exception as error:
        raise _unreadable(path, name, class_name, base, error) from None
    packable = {f"{key}.weight" for key, part in model.named_modules() if type(part) is torch.nn.Linear}
    found: dict[str, SourceTensor] = {}
    for key, shape in _matched(path, name, base, _expected_shapes(model), tensors).items():
        tensor, kind = tensors[key], tracked.kind_of(tensors[key])
        if kind is None and tensor.dtype == torch.uint8:
            raise FormatError(f"{path}: {name}: diffusers computes with the elements of {key}, which are packed")
        form = tuple(tensor.shape) if kind is None else _elements(kind, tuple(tensor.shape))
        if _without_ones(form) != _without_ones(shape):
            raise _unlike(path, name, key, form, base, shape)
        found[key] = _block_source(path, tensor, kind, shape, stays=key in packable)
    return found


def _block_source(
    path: Path, tensor: torch.Tensor, kind: str | None, shape: tuple[int, ...], *, stays: bool
) -> SourceTensor:
    """Return a tensor as it comes into the store, of the shape that the model has it in."""
    if kind is None:
        return TorchTensor(path, DTYPE_NAMES[tensor.dtype], tensor.reshape(shape))
    if stays:
        return _BlockTensor(path, kind, shape, tensor)
    return ComputedTensor(path, "F32", shape, lambda: unpack_blocks(kind, tensor).reshape(shape).numpy())


@dataclass(frozen=True, slots=True)
class _BlockTensor:
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


class _Blocks(_WithoutCopies):
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


def _elements(kind: str, form: tuple[int, ...]) -> tuple[int, ...]:
    elements, nbytes = BLOCK_SIZES[kind]
    return (*form[:-1], form[-1] // nbytes * elements)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape as ggml keeps it: without leading sizes of 1."""
    first = next((place for place, size in enumerate(shape[:-1]) if size != 1), len(shape) - 1)
    return shape[first:]
