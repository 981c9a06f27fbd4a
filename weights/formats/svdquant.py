"""Matrices that SVDQuant quantized, as nunchaku and diffusers ("nunchaku_lite") have them in files.

A matrix is 4-bit numbers with a scale for each run of 64 (int4) or 16 (E2M1, scales in E4M3), divided by a factor of
each column, plus a product of low rank, which sees the columns as they are:

    W = Q * wscales [* wtscale * wcscales] / smooth + lora_up @ lora_down

All parts lie in the order in which NVIDIA's matrix units read them; the numbers of the tiles below are theirs. Layers
that modulate others are AWQ's: 4 bits, scale and zero for each run of 64. Activations, which nunchaku rounds to 4 bits,
are not rounded here.

diffusers' form has the names and layers of the class itself. nunchaku's own files of Flux and Qwen-Image put queries,
keys and values together, cut Flux's last product of single blocks in two, interleave the parts of a modulation and add
the 1 of its scales to the bias. With int4, a product behind a GELU reads what is moved up by a constant, and its bias
has that taken off.
Sources: nunchaku, `lora/flux/packer.py`, `models/linear.py`, `models/transformers/transformer_qwenimage.py`,
`src/kernels/zgemm`; deepcompressor, `backend/nunchaku`; diffusers 0.42, `quantizers/nunchaku`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from weights.formats.quantized import FLOATS, Array, Quantized, e2m1, nibbles, read_all, read_rows
from weights.formats.scaled_matrices import Weights
from weights.formats.tensors import SourceTensor
from weights.formats.untrusted import shown
from weights.records.errors import FormatError

METHOD: Final = "nunchaku_lite"
_CODES: Final = ".qweight"
_SCALES: Final = ".wscales"
_ZEROS: Final = ".wzeros"
_CLASS: Final = "model_class"  # in the metadata of nunchaku's own files
# The names of parts in newer files and in older ones.
_SMOOTH: Final = (".smooth_factor", ".smooth")
_DOWN: Final = (".proj_down", ".lora_down")
_UP: Final = (".proj_up", ".lora_up")
_BESIDE: Final = (
    _SCALES,
    _ZEROS,
    ".wtscale",
    ".wcscales",
    ".smooth_factor_orig",
    ".smooth_orig",
    *_SMOOTH,
    *_DOWN,
    *_UP,
)
_ROWS: Final = 128  # of a tile, and the columns that two of them have together
_PACK: Final = 16  # the sides of a tile of low rank
_RUN: Final = 64
_SHORT_RUN: Final = 16  # of E2M1
_GELU_SHIFT: Final = 0.171875  # as nunchaku's kernels have it
_SIXTEEN: Final = ("F16", "BF16")


class _Place(NamedTuple):
    """The place of a layer of nunchaku's files in diffusers' classes. Several names share its rows."""

    names: Sequence[str]
    parts: int = 1  # interleaved, of a modulation
    is_shifted: bool = False


_QKV: Final = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV: Final = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_BLOCK: Final = re.compile(r"((?:single_)?transformer_blocks)\.(\d{1,4})\.(.+)")
_OUTPUT: Final = "proj_out"  # of a single block: two products in nunchaku's files
_FLUX: Final[Mapping[str, _Place]] = {
    "transformer_blocks.norm1.linear": _Place(["norm1.linear"], 6),
    "transformer_blocks.norm1_context.linear": _Place(["norm1_context.linear"], 6),
    "transformer_blocks.qkv_proj": _Place(_QKV),
    "transformer_blocks.qkv_proj_context": _Place(_ADDED_QKV),
    "transformer_blocks.out_proj": _Place(["attn.to_out.0"]),
    "transformer_blocks.out_proj_context": _Place(["attn.to_add_out"]),
    "transformer_blocks.mlp_fc1": _Place(["ff.net.0.proj"]),
    "transformer_blocks.mlp_fc2": _Place(["ff.net.2"], is_shifted=True),
    "transformer_blocks.mlp_context_fc1": _Place(["ff_context.net.0.proj"]),
    "transformer_blocks.mlp_context_fc2": _Place(["ff_context.net.2"], is_shifted=True),
    "single_transformer_blocks.norm.linear": _Place(["norm.linear"], 3),
    "single_transformer_blocks.qkv_proj": _Place(_QKV),
    "single_transformer_blocks.mlp_fc1": _Place(["proj_mlp"]),
    "single_transformer_blocks.out_proj": _Place([f"{_OUTPUT}.0"]),
    "single_transformer_blocks.mlp_fc2": _Place([f"{_OUTPUT}.1"], is_shifted=True),
}
_QWEN: Final[Mapping[str, _Place]] = {
    "transformer_blocks.img_mod.1": _Place(["img_mod.1"], 6),
    "transformer_blocks.txt_mod.1": _Place(["txt_mod.1"], 6),
    "transformer_blocks.attn.to_qkv": _Place(_QKV),
    "transformer_blocks.attn.add_qkv_proj": _Place(_ADDED_QKV),
    "transformer_blocks.img_mlp.net.2": _Place(["img_mlp.net.2"], is_shifted=True),
    "transformer_blocks.txt_mlp.net.2": _Place(["txt_mlp.net.2"], is_shifted=True),
}
_PLACES: Final = {
    "NunchakuFluxTransformer2dModel": _FLUX,
    "NunchakuFluxTransformer2DModelV2": _FLUX,
    "NunchakuQwenImageTransformer2DModel": _QWEN,
}
_NORM: Final = re.compile(r"((?:single_)?transformer_blocks\.\d{1,4}\.)(norm_(?:added_)?[qk]\.weight)")


def take_svdquant(path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]) -> Weights:
    """Take the matrices of SVDQuant and the biases beside them from among tensors, under diffusers' names.

    Raises FormatError: files of other classes, parts that do not fit.
    """
    modules = [name.removesuffix(_CODES) for name in tensors if name.endswith(_CODES)]
    modules = [module for module in modules if f"{module}{_SCALES}" in tensors]
    if not modules:
        return Weights(dict(tensors), {})
    places = _places(path, modules, metadata)
    taken = {f"{module}{end}" for module in modules for end in (_CODES, ".bias", *_BESIDE)}
    found: dict[str, Quantized] = {}
    for module in modules:
        prefix, place = _place_of(module, places)
        layer = _awq(path, module, tensors, place) if f"{module}{_ZEROS}" in tensors else _svd(path, module, tensors)
        found |= _placed(prefix, place, layer, _bias(path, module, tensors, place, layer))
    for name in [name.removesuffix(".0.weight") for name in found if name.endswith(f".{_OUTPUT}.0.weight")]:
        found |= _joined(path, name, found)
    kept = {name: one for name, one in tensors.items() if name not in taken}
    for name in [name for name in kept if places is _FLUX and _NORM.fullmatch(name)]:
        same = kept.pop(name)
        found[_NORM.sub(r"\1attn.\2", name)] = Quantized(same.file, same.shape, _Same(same))
    anything = tensors[f"{modules[0]}{_CODES}"]
    return Weights(kept | dict.fromkeys(found, anything), found)


def nunchaku_class(path: Path, tensors: Collection[str], metadata: Mapping[str, str]) -> str | None:
    """Return the class in diffusers of a file of nunchaku's own, None for another file. Raises FormatError."""
    modules = [name.removesuffix(_CODES) for name in tensors if name.endswith(_CODES)]
    places = _places(path, modules, metadata)
    return "FluxTransformer2DModel" if places is _FLUX else "QwenImageTransformer2DModel" if places is _QWEN else None


def _places(path: Path, modules: Sequence[str], metadata: Mapping[str, str]) -> Mapping[str, _Place]:
    """Return the places of layers in a file of nunchaku's own; none for one in a class's own layers."""
    said = metadata.get(_CLASS, "")
    if said.startswith("Nunchaku"):
        if said not in _PLACES:
            raise FormatError(f"{path}: SVDQuant of a {shown(said)}, which is not read; read are {', '.join(_PLACES)}")
        return _PLACES[said]
    if any(module.endswith(".qkv_proj") for module in modules):
        return _FLUX
    return _QWEN if any(module.endswith(".attn.to_qkv") for module in modules) else {}


def _place_of(module: str, places: Mapping[str, _Place]) -> tuple[str, _Place]:
    """Return the place of a layer, and the prefix of its names."""
    match = _BLOCK.fullmatch(module)
    place = places.get(f"{match[1]}.{match[3]}") if match else None
    return (f"{match[1]}.{match[2]}.", place) if match and place else ("", _Place([module]))


def _placed(prefix: str, place: _Place, layer: Quantized, bias: Quantized | None) -> Iterator[tuple[str, Quantized]]:
    """Yield the matrix and the bias of a layer by the names that share its rows."""
    count = layer.shape[0] // len(place.names)
    for number, name in enumerate(place.names):
        for end, one in (("weight", layer), ("bias", bias)):
            if one is not None:
                yield f"{prefix}{name}.{end}", one.rows(number * count, (number + 1) * count)


@dataclass(frozen=True, slots=True)
class _Same:
    """Elements as they are."""

    tensor: SourceTensor

    def compute(self, start: int, stop: int) -> Array:
        return read_rows(self.tensor, start, stop).astype(np.float32)


def _svd(path: Path, module: str, tensors: Mapping[str, SourceTensor]) -> Quantized:
    codes, scales = tensors[f"{module}{_CODES}"], tensors[f"{module}{_SCALES}"]
    if codes.dtype not in ("I8", "U8") or len(codes.shape) != 2 or codes.shape[0] % _ROWS or codes.shape[1] % _RUN:
        raise _misfit(path, module, _CODES, codes, f"4-bit numbers in tiles of {_ROWS} rows and columns")
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    run = _SHORT_RUN if scales.dtype == "F8_E4M3" else _RUN
    if scales.dtype not in (*_SIXTEEN, "F8_E4M3") or scales.shape != (columns // run, rows):
        raise _misfit(path, module, _SCALES, scales, f"a scale for each {run} columns of {rows} rows")
    optional = {
        end: _vector(path, module, tensors, (end,), size, is_needed=False)
        for end, size in ((".wtscale", 1), (".wcscales", rows))
    }
    smooth = _vector(path, module, tensors, _SMOOTH, columns, is_needed=True)
    down, up = (_half(path, module, tensors, ends, side) for ends, side in ((_DOWN, columns), (_UP, rows)))
    if (down is None) != (up is None) or (down and up and down.shape[1] != up.shape[1]):
        raise FormatError(f"{path}: {shown(module)}: the two halves of a product of low rank do not go together")
    form = _Svd(codes, scales, run, smooth, down, up, optional[".wtscale"], optional[".wcscales"])
    return Quantized(codes.file, (rows, columns), form)


@dataclass(frozen=True, slots=True)
class _Svd:
    """4-bit numbers with scales of runs, over the factors of columns; and a product of low rank."""

    codes: SourceTensor
    scales: SourceTensor
    run: int
    smooth: SourceTensor | None
    down: SourceTensor | None
    up: SourceTensor | None
    of_all: SourceTensor | None
    of_rows: SourceTensor | None

    def compute(self, start: int, stop: int) -> Array:
        found = self.without_product(start, stop)
        if self.down is not None and self.up is not None:
            found = found + _from_packs(self.up)[start:stop] @ _from_packs(self.down, is_down=True)
        return found

    def without_product(self, start: int, stop: int) -> Array:
        """Return rows without the product of low rank."""
        first, last = start // _ROWS, -(-stop // _ROWS)
        codes = _from_tiles(read_rows(self.codes, first * _ROWS, last * _ROWS, "U8"), 2 * self.codes.shape[1])
        values = e2m1(codes) if self.run == _SHORT_RUN else ((codes ^ 8).astype(np.int8) - 8).astype(np.float32)
        values = values[start - first * _ROWS : stop - first * _ROWS]
        scales = _short_scales(self.scales) if self.run == _SHORT_RUN else _scales(self.scales)
        scales = scales.reshape(self.codes.shape[0], -1)[start:stop]
        values = (values.reshape(*scales.shape, self.run) * scales[..., None]).reshape(len(values), -1)
        if self.of_all is not None:
            values = values * read_all(self.of_all).reshape(())
        if self.of_rows is not None:
            values = values * _scales(self.of_rows)[start:stop, None]
        return values if self.smooth is None else values / _scales(self.smooth)


def _bias(
    path: Path, module: str, tensors: Mapping[str, SourceTensor], place: _Place, layer: Quantized
) -> Quantized | None:
    """Return the bias of a layer as a class adds it."""
    bias = tensors.get(f"{module}.bias")
    if bias is None:
        return None
    if bias.dtype not in FLOATS or bias.shape != layer.shape[:1]:
        raise _misfit(path, module, ".bias", bias, f"{layer.shape[0]} numbers")
    is_awq = isinstance(layer.form, _Awq)
    shifted = layer if place.is_shifted and isinstance(layer.form, _Svd) and layer.form.run == _RUN else None
    return Quantized(bias.file, layer.shape[:1], _Bias(bias, place.parts, is_awq, shifted))


@dataclass(frozen=True, slots=True)
class _Bias:
    """Numbers of rows, of a layer that is `shifted` with what the constant before it adds."""

    bias: SourceTensor
    parts: int
    is_awq: bool
    shifted: Quantized | None

    def compute(self, start: int, stop: int) -> Array:
        found = read_all(self.bias) if self.is_awq else _scales(self.bias)
        if self.parts > 1:
            found = _in_parts(found, self.parts)
            scales = np.zeros((self.parts, 1), np.float32)
            scales[[1, self.parts - 2]] = 1
            found = (found.reshape(self.parts, -1) - scales).reshape(-1)
        if self.shifted is not None and isinstance(self.shifted.form, _Svd):
            added = self.shifted.form.without_product(0, self.shifted.shape[0]).sum(1, dtype=np.float64)
            found = (found + added * _GELU_SHIFT).astype(np.float32)
        return found[start:stop]


def _awq(path: Path, module: str, tensors: Mapping[str, SourceTensor], place: _Place) -> Quantized:
    codes, scales, zeros = (tensors[f"{module}{end}"] for end in (_CODES, _SCALES, _ZEROS))
    is_fit = len(codes.shape) == 2 and codes.dtype in ("I32", "I16")
    rows = 4 * codes.shape[0] if is_fit else 0
    columns = codes.shape[1] * (2 if codes.dtype == "I32" else 1) if is_fit else 0
    if not rows or columns % _RUN or not columns or rows % place.parts:
        raise _misfit(path, module, _CODES, codes, "4-bit numbers, four rows together")
    for end, one in ((_SCALES, scales), (_ZEROS, zeros)):
        if one.dtype not in FLOATS or len(one.shape) != 2 or one.shape[1] != rows or one.shape[0] < columns // _RUN:
            raise _misfit(path, module, end, one, f"a number for each {_RUN} columns of {rows} rows")
    return Quantized(codes.file, (rows, columns), _Awq(codes, scales, zeros, columns, place.parts))


@dataclass(frozen=True, slots=True)
class _Awq:
    """4-bit numbers times a scale, plus a zero, for each run; four rows, and quarters of 32 columns, in each other."""

    codes: SourceTensor
    scales: SourceTensor
    zeros: SourceTensor
    columns: int
    parts: int

    def compute(self, start: int, stop: int) -> Array:
        packed = np.frombuffer(self.codes.read(), "<u2").reshape(-1, self.columns // _RUN, 4, 16)
        words = packed.transpose(0, 2, 1, 3).reshape(-1, 8)  # 8 words of 4 numbers, of 32 columns
        codes = np.stack([words >> shift & 15 for shift in (0, 4, 8, 12)], axis=1)
        runs = codes.reshape(-1, self.columns // _RUN, _RUN).astype(np.float32)
        scales, zeros = (
            read_all(one).reshape(one.shape)[: self.columns // _RUN].T[..., None] for one in (self.scales, self.zeros)
        )
        found = (runs * scales + zeros).reshape(-1, self.columns)
        return (_in_parts(found, self.parts) if self.parts > 1 else found)[start:stop]


def _joined(path: Path, name: str, found: dict[str, Quantized]) -> dict[str, Quantized]:
    """Put the two halves of a product together, whose columns lie side by side."""
    first, second = (found.pop(f"{name}.{number}.weight", None) for number in range(2))
    biases = [found.pop(f"{name}.{number}.bias", None) for number in range(2)]
    if first is None or second is None or first.shape[0] != second.shape[0]:
        raise FormatError(f"{path}: {shown(name)}: expected an out_proj and an mlp_fc2 of as many rows")
    shape = (first.shape[0], first.shape[1] + second.shape[1])
    joined = {f"{name}.weight": Quantized(first.file, shape, _SideBySide((first, second)))}
    added = tuple(one for one in biases if one is not None)
    return joined | ({f"{name}.bias": Quantized(first.file, shape[:1], _Sum(added))} if added else {})


@dataclass(frozen=True, slots=True)
class _SideBySide:
    """The columns of several matrices."""

    matrices: Sequence[Quantized]

    def compute(self, start: int, stop: int) -> Array:
        return np.concatenate([one.rows(start, stop).wide() for one in self.matrices], axis=1)


@dataclass(frozen=True, slots=True)
class _Sum:
    """Several tensors, added."""

    tensors: Sequence[Quantized]

    def compute(self, start: int, stop: int) -> Array:
        return sum((one.rows(start, stop).wide() for one in self.tensors), np.zeros(stop - start, np.float32))


def _vector(
    path: Path, module: str, tensors: Mapping[str, SourceTensor], ends: Sequence[str], size: int, *, is_needed: bool
) -> SourceTensor | None:
    end, tensor = _first(module, tensors, ends)
    if tensor is None:
        if is_needed:
            raise FormatError(f"{path}: {shown(module + end)} is missing, which a matrix of SVDQuant has")
        return None
    if tensor.dtype not in FLOATS or tensor.shape not in ((size,), () if size == 1 else (size,)):
        raise _misfit(path, module, end, tensor, f"{size} numbers")
    return tensor


def _half(
    path: Path, module: str, tensors: Mapping[str, SourceTensor], ends: Sequence[str], side: int
) -> SourceTensor | None:
    end, tensor = _first(module, tensors, ends)
    if tensor is None:
        return None
    is_matrix = tensor.dtype in _SIXTEEN and len(tensor.shape) == 2
    if not is_matrix or tensor.shape[0] != side or tensor.shape[1] % _PACK:
        raise _misfit(path, module, end, tensor, f"16-bit numbers ({side}, a rank in whole runs of {_PACK})")
    return tensor


def _first(module: str, tensors: Mapping[str, SourceTensor], ends: Sequence[str]) -> tuple[str, SourceTensor | None]:
    return next(((end, tensors[module + end]) for end in ends if module + end in tensors), (ends[0], None))


def _misfit(path: Path, module: str, end: str, tensor: SourceTensor, expected: str) -> FormatError:
    given = f"{tensor.dtype} {list(tensor.shape)}"
    return FormatError(f"{path}: {shown(module + end)} of SVDQuant is {given}, expected {expected}")


def _from_tiles(packed: Array, columns: int) -> Array:
    """Return 4-bit codes (rows, columns) of whole tiles: 8 x 8 x 2 rows, and 2 x 4 x 8 columns that lie together."""
    tiles = nibbles(packed, high_first=False).reshape(-1, columns // _RUN, 8, 8, 4, 2, 2, 8)
    return tiles.transpose(0, 2, 5, 3, 1, 6, 4, 7).reshape(-1, columns)


def _scales(tensor: SourceTensor) -> Array:
    """Return numbers of rows, (rows,) or (rows * runs,): 8 x 4 x 2 x 2 of 128 rows lie together, run after run."""
    flat = read_all(tensor)
    is_vector = len(tensor.shape) == 1
    runs = 1 if is_vector else tensor.shape[0]
    return flat.reshape(-1, runs, 8, 4, 2, 2).transpose(0, 2, 4, 3, 5, 1).reshape(-1)


def _short_scales(tensor: SourceTensor) -> Array:
    """Return the scales of runs of 16, (rows * runs,): four of them lie together, of each 64 columns."""
    flat = np.asarray(read_rows(tensor, 0, tensor.shape[0]), np.float32)
    tiles = flat.reshape(-1, tensor.shape[0] // 4, 8, 4, 4, 4)
    return tiles.transpose(0, 4, 3, 2, 1, 5).reshape(-1)


def _from_packs(tensor: SourceTensor, *, is_down: bool = False) -> Array:
    """Return one half of a product of low rank, (rows, rank) or, for what reads the columns, (rank, columns)."""
    side, rank = tensor.shape
    packs = read_all(tensor).reshape(side // _PACK, rank // _PACK, 8, 4, 2, 2, 2)
    packs = packs.transpose(0, 1, 4, 2, 5, 3, 6).reshape(side // _PACK, rank // _PACK, _PACK, _PACK)
    if is_down:
        return packs.transpose(1, 2, 0, 3).reshape(rank, side)
    return packs.transpose(0, 2, 1, 3).reshape(side, rank)


def _in_parts(rows: Array, parts: int) -> Array:
    """Return rows of several parts one part after the other, which lie in turn."""
    return rows.reshape(-1, parts, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)
