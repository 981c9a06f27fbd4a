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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from weights.formats.checkpoint import weighted_parts
from weights.formats.float8 import Scaled, has_eight_bits, read_scales, wide, wide_type, widened
from weights.formats.folder import read_json
from weights.formats.ggml_values import UNPACKED_KINDS, unpack_blocks
from weights.formats.gguf import DENOISERS, gguf_set, read_gguf_model
from weights.formats.published_quantization import ComputedTensor
from weights.formats.safetensors import read_header
from weights.formats.source import BasePipeline, Checkpoint, SourceComponent
from weights.formats.tensors import FileTensor, SourceTensor
from weights.formats.untrusted import shown
from weights.loading.views import mapped_views
from weights.platform.torch_dtypes import DTYPE_NAMES
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
    names that diffusers cannot translate, matrices of 8 bits in a format that is not read.
    """
    header = read_header(path)
    weights, mapped = read_scales(path, header.tensors, header.metadata), load_file(path)
    scaled = {_place(mapped[name]): one for name, one in weights.scaled.items()}
    mapped = {name: mapped[name] for name in weights.tensors}
    places = {_place(tensor) for tensor in mapped.values()}
    classes = weighted_parts(base.folder)
    components, found = [], list[str]()
    for name, (library, class_name) in classes.items():
        tensors = _translated(path, mapped, base, name, library, class_name, scaled)
        if tensors is not None:
            part = _component(path, name, library, class_name, tensors)
            components.append(_without_float8(path, part, scaled, places))
            found.append(name)
        elif name in base.components:
            components.append(base.components[name])
        else:
            raise FormatError(f"{path}: has no {name}, and neither has {base.name!r}, which it is said to be like")
    if not found:
        known = ", ".join(classes)
        raise FormatError(f"{path}: none of its {len(mapped)} tensors are of a component of {base.name!r} ({known})")
    class_name = str(read_json(base.folder / "model_index.json").get("_class_name"))
    headers = _marked_solver(header.tensors, header.metadata, base)
    return Checkpoint(path, "diffusion", class_name, tuple(components), headers, skeleton=base.folder)


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
    read_header(path)
    tensors = _translated(path, load_file(path), base, "vae", own.library, str(own.class_name))
    if tensors is None:
        raise FormatError(f"vae: {path}: has no tensors of a VAE")
    return _component(path, "vae", own.library, str(own.class_name), tensors)


def _without_float8(
    path: Path, part: SourceComponent, scaled: Mapping[int, Scaled], places: Collection[int]
) -> SourceComponent:
    """Return a component with plain tensors in the place of those of 8 bits; `scaled` are those of the file, by place.

    Raises FormatError for one that lies elsewhere than the file's tensors, so that nobody knows its scales.
    """
    tensors: dict[str, TorchTensor] = part.tensors  # type: ignore[assignment]
    own: dict[str, Scaled] = {}
    for name, tensor in tensors.items():
        if (found := scaled.get(_place(tensor.tensor))) is not None:
            own[name] = _of_rows(tensor.tensor, found)
        elif scaled and tensor.dtype in ("F8_E4M3", "F8_E5M2", "I8") and _place(tensor.tensor) not in places:
            raise FormatError(
                f"{path}: {part.name}: the scales of {name}, which diffusers puts together, are not known"
            )
    if not own and not has_eight_bits(part.tensors):
        return part
    return replace(part, tensors=widened(part.tensors, own, wide_type(part.tensors)))


def _of_rows(tensor: torch.Tensor, scaled: Scaled) -> Scaled:
    """Return the scales of a run of whole rows of a mapped tensor."""
    rows = len(tensor)
    start = tensor.storage_offset() * rows // max(1, tensor.numel())
    return scaled.rows(start, start + rows)


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
    scaled: Mapping[int, Scaled] = MappingProxyType({}),
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
        with _WithoutCopies(own.values(), scaled):
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
    return FormatError(
        f"{path}: diffusers cannot read its {name} as the {class_name} of {base.name!r}, so it is hardly like that "
        f"model ({type(error).__name__}: {str(error)[:300]})"
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

    `scaled` are the mapped matrices of 8 bits with scales, by place: what is put together of such is wide.
    """

    def __init__(self, mapped: Iterable[torch.Tensor], scaled: Mapping[int, Scaled] = MappingProxyType({})) -> None:
        super().__init__()
        self._scaled = scaled
        self._files = {tensor.untyped_storage().data_ptr() for tensor in mapped}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.clone, torch.Tensor.to) and self._is_mapped(args[0]):
            return args[0]
        if func is torch.cat and len(args[0]) == 1 and self._is_mapped(args[0][0]):
            return args[0][0]
        if func is torch.cat and any(_place(part) in self._scaled for part in args[0]):  # whose scales may differ
            args = [self._wide(part) for part in args[0]], *args[1:]
        if func is torch.split and isinstance(args[1], tuple) and (kwargs or {}).get("dim", 0) == 0:
            args = args[0], _scaled(args[1], len(args[0]))
        return func(*args, **(kwargs or {}))

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._scaled.get(_place(tensor))
        if found is None:
            return tensor.float()
        source = TorchTensor(Path(), found.dtype, tensor)
        return torch.from_numpy(
            np.frombuffer(wide(source, _of_rows(tensor, found), "F32").read(), np.float32).copy()
        ).view(tensor.shape)

    def _is_mapped(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and tensor.untyped_storage().data_ptr() in self._files


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
    name = _denoiser_of(path, model.architecture, base, classes)
    unknown = next((item for item in model.tensors.items() if item[1].dtype not in _GGUF_TYPES), None)
    if unknown:
        raise FormatError(
            f"{path}: tensor {shown(unknown[0])} is {unknown[1].dtype}; known are {', '.join(_GGUF_TYPES)}"
        )
    components = []
    for part, (library, class_name) in classes.items():
        if part == name:
            tensors = _translated_blocks(path, model.tensors, base, name, class_name)
            metadata = {"general.architecture": str(model.architecture)}
            components.append(
                SourceComponent(name, library, class_name, name, tensors, metadata, (_GGUF_FILE,), "gguf")
            )
        elif part in base.components:
            components.append(base.components[part])
        else:
            raise FormatError(f"{path}: has no {part}, and neither has {base.name!r}, which it is said to be like")
    class_name = str(read_json(base.folder / "model_index.json").get("_class_name"))
    return Checkpoint(path, "diffusion", class_name, tuple(components), skeleton=base.folder)


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
