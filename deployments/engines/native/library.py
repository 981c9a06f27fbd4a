"""The compiled kernels as functions over torch tensors, and the variant that this processor runs."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from deployments.engines.native.building import VARIANTS, BuildFailed, built_library
from weights.platform.private_folder import cache_folder, check_cache_folder
from weights.platform.processor import processor_flags

logger = logging.getLogger(__name__)

# Numbers of enum Type in blocks.h (ggml's own).
KERNEL_TYPES: Final = {
    "F32": 0,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "BF16": 30,
    "MXFP4": 39,
    "GROUP_INT8": 100,
}
ELEMENTS: Final = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_PAIR: Final = (*(_POINTER, _POINTER, _SIZE, _SIZE, _SIZE), *(_POINTER, _SIZE, ctypes.c_float, _POINTER, ctypes.c_int))
_LINEAR: Final = (_POINTER, ctypes.c_int, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, ctypes.c_int)


class PackedMatrix(NamedTuple):
    """A [rows, columns] matrix for the kernels; `scales` and `group_size` are those of GROUP_INT8.

    Of kinds F32 and BF16 `NativeDecoder` alone has any: `matmul` and `unpack_rows` take packed ones.
    """

    kind: str
    data: torch.Tensor
    rows: int
    columns: int
    scales: torch.Tensor | None = None
    group_size: int = 0

    def pointers(self) -> MatrixPointers:
        """Return the pointers for the kernels. The caller has checked that each row is contiguous, on the host."""
        return MatrixPointers(
            KERNEL_TYPES[self.kind],
            self.data.data_ptr(),
            None if self.scales is None else self.scales.data_ptr(),
            self.group_size,
            self.rows,
            self.columns,
            self.data.stride(0) * self.data.itemsize,
        )


class MatrixPointers(ctypes.Structure):
    """`Matrix` of blocks.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    )


class Convolution(ctypes.Structure):
    """`Convolution` of convolution.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "x", "y")),
        *((name, ctypes.c_int64) for name in ("images", "inputs", "height", "width")),
        *((name, ctypes.c_int64) for name in ("outputs", "kernel", "stride", "padding")),
    )


class FullAttention(ctypes.Structure):
    """`FullAttention` of full_attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "y")),
        *((f"strides_of_{name}", ctypes.c_int64 * 3) for name in ("q", "k", "v", "y")),
        *((name, ctypes.c_int64) for name in ("images", "heads", "queries", "keys", "size")),
        ("scale", ctypes.c_double),
    )


class Affine(ctypes.Structure):
    """`Affine` of encoder.h."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class EncoderLayer(ctypes.Structure):
    """`EncoderLayer` of encoder.h."""

    _fields_ = tuple((name, Affine) for name in ("q", "k", "v", "output", "attention_norm", "up", "down", "norm"))


class Encoder(ctypes.Structure):
    """`Encoder` of encoder.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(EncoderLayer)),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "intermediate", "num_heads")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class Texts(ctypes.Structure):
    """`Texts` of encoder.h."""

    _fields_ = (
        *(("x", ctypes.c_void_p), ("y", ctypes.c_void_p)),
        *(("lengths", ctypes.c_void_p), ("count", ctypes.c_int64)),
    )


class DrawnRow(ctypes.Structure):
    """`DrawnRow` of draws.h: a row of logits, the number in [0, 1) that is drawn for it, and its filters."""

    _fields_ = (
        ("row", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("best", "draw", "temperature", "top_p", "min_p", "typical_p")),
    )


class Product(ctypes.Structure):
    """`Product` of quantized.cpp: what `linear` or, with a rank, `add_pair` computes, bound to its memory."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "beside", "x", "y")),
        *((name, ctypes.c_int64) for name in ("outputs", "columns", "m", "rank")),
        ("factor", ctypes.c_float),
        ("element", ctypes.c_int32),
    )


def convolved_shape(x: torch.Tensor, weight: torch.Tensor, stride: int, padding: int) -> tuple[int, ...]:
    """Return the shape of a convolution of images (N, in, height, width) with (out, in, side, side)."""
    sides = ((size + 2 * padding - weight.shape[-1]) // stride + 1 for size in x.shape[2:])
    return len(x), len(weight), *sides


def attended(query: torch.Tensor) -> torch.Tensor:
    """Return memory for an attention's result (N, heads, queries, size), which has the heads behind the tokens."""
    images, heads, queries, size = query.shape
    return query.new_empty(images, queries, heads, size).transpose(1, 2)


class Kernels:
    """The functions of one library that this processor can run."""

    def __init__(self, path: Path, processor: frozenset[str]) -> None:
        library = ctypes.CDLL(str(path))
        usable = [name for name, (_, needed) in VARIANTS.items() if needed <= processor]
        if not usable:
            raise BuildFailed("the processor has no AVX2")
        self.variant = usable[0]
        self._matmul = getattr(library, f"atelier_matmul_{self.variant}")
        self._unpack = getattr(library, f"atelier_unpack_{self.variant}")
        self._exponential_sums = getattr(library, f"atelier_exponential_sums_{self.variant}")
        self._draw = getattr(library, f"atelier_draw_{self.variant}")
        self._linear = getattr(library, f"atelier_linear_{self.variant}")
        self._linear.argtypes = _LINEAR
        self._add_pair = getattr(library, f"atelier_add_pair_{self.variant}")
        self._add_pair.argtypes = _PAIR
        self._run = getattr(library, f"atelier_run_{self.variant}")
        self._run.argtypes = (_POINTER, _SIZE, ctypes.c_int)
        self.has_half_products = self.variant == "avx512" and "avx512_bf16" in processor
        self._convolve = getattr(library, f"atelier_convolve_{self.variant}") if self.has_half_products else None
        self._attend = getattr(library, f"atelier_attend_{self.variant}") if self.has_half_products else None
        self._encode = getattr(library, f"atelier_encode_{self.variant}")
        self._gate = getattr(library, f"atelier_gate_{self.variant}") if self.has_half_products else None
        self.decode = getattr(library, f"atelier_decode_{self.variant}")

    def matmul(self, matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T of a contiguous float32 or bfloat16 `x` (rows, columns), in its dtype.

        A row's result does not depend on the other rows, bit for bit. Raises MemoryError.
        """
        y = torch.empty(len(x), matrix.rows, dtype=x.dtype)
        element = ELEMENTS[x.dtype]
        failed = self._matmul(
            ctypes.byref(matrix.pointers()),
            ctypes.c_void_p(x.data_ptr()),
            element,
            ctypes.c_int64(len(x)),
            ctypes.c_void_p(y.data_ptr()),
            element,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for a product of {len(x)} x {matrix.columns} x {matrix.rows}")
        return y

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_rows: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x W^T + bias, in `out` if given: (..., columns) and (outputs, columns) -> (..., outputs).

        With `num_rows`, only the first of all rows are computed, and the others are zeros. All are contiguous float32
        on the host, or bfloat16 with `has_half_products`, and 16 divides the columns. A row's result does not depend on
        the other rows, bit for bit. Raises MemoryError.
        """
        outputs, columns = weight.shape
        all_rows = x.numel() // columns
        rows = all_rows if num_rows is None else num_rows
        y = x.new_empty(*x.shape[:-1], outputs) if out is None else out
        if rows < all_rows:
            y.view(all_rows, outputs)[rows:] = 0
        offset = None if bias is None else bias.data_ptr()
        given = weight.data_ptr(), ELEMENTS[x.dtype], outputs, columns, offset, x.data_ptr(), rows, y.data_ptr()
        if self._linear(*given, torch.get_num_threads()):
            raise MemoryError(f"no memory for a product of {rows} x {columns} x {outputs}")
        return y

    def conv2d(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: int
    ) -> torch.Tensor:
        """Return the convolution of images (N, in, height, width) with (out, in, side, side), of side 1 or 3.

        With `has_half_products` alone. The stride is 1 or 2, and all are contiguous float32 or bfloat16 on the host. An
        image's result does not depend on the others, bit for bit. Raises MemoryError.
        """
        assert self._convolve is not None
        y = x.new_empty(convolved_shape(x, weight, stride, padding))
        offset = None if bias is None else bias.data_ptr()
        pointers = weight.data_ptr(), offset, x.data_ptr(), y.data_ptr()
        given = Convolution(*pointers, *x.shape, len(weight), weight.shape[-1], stride, padding)
        if self._convolve(ctypes.byref(given), ELEMENTS[x.dtype], torch.get_num_threads()):
            raise MemoryError(f"no memory for a convolution of {tuple(x.shape)} with {tuple(weight.shape)}")
        return y

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention of all queries (N, heads, queries, size) to all keys (N, heads, keys, size).

        With `has_half_products` alone. The size is even, and all are bfloat16 on the host; a token's elements follow
        each other. An image's result does not depend on the others, bit for bit. Raises MemoryError.
        """
        assert self._attend is not None
        y, keys = attended(query), key.shape[2]
        tensors = query, key, value, y
        pointers, strides = (
            (one.data_ptr() for one in tensors),
            ((ctypes.c_int64 * 3)(*one.stride()[:3]) for one in tensors),
        )
        given = FullAttention(*pointers, *strides, *query.shape[:3], keys, query.shape[3], scale)
        if self._attend(ctypes.byref(given), torch.get_num_threads()):
            raise MemoryError(f"no memory for attention of {tuple(query.shape)} to {keys} keys")
        return y

    def encode(self, encoder: Encoder, x_ND: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the last layer's vectors of the embeddings (N, D) of texts that follow each other.

        `lengths`, int64, has the number of each text's tokens, N together. `x_ND` is of the encoder's dtype: float32,
        or bfloat16 with `has_half_products`. All are contiguous on the host, and 16 divides the size of a head and
        the intermediate size. A text's result does not depend on the others, bit for bit. Raises MemoryError.
        """
        y_ND = torch.empty_like(x_ND)
        texts = Texts(x_ND.data_ptr(), y_ND.data_ptr(), lengths.data_ptr(), len(lengths))
        if self._encode(ctypes.byref(encoder), ctypes.byref(texts), ELEMENTS[x_ND.dtype], torch.get_num_threads()):
            raise MemoryError(f"no memory to encode {len(lengths)} texts, of {len(x_ND)} tokens together")
        return y_ND

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first half of features (..., 2 N), by the GELU of the second.

        With `has_half_products` alone, of contiguous bfloat16 on the host.
        """
        assert self._gate is not None
        size = x.shape[-1] // 2
        y = x.new_empty(*x.shape[:-1], size)
        rows, width = ctypes.c_int64(y.numel() // size), ctypes.c_int64(size)
        self._gate(ctypes.c_void_p(x.data_ptr()), rows, width, ctypes.c_void_p(y.data_ptr()), torch.get_num_threads())
        return y

    def add_pair(
        self, result: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, factor: float
    ) -> None:
        """Add factor (x down^T) up^T to `result` (..., outputs), of x (..., columns) and two matrices.

        `down` is (rank, columns), `up` (outputs, rank). All are contiguous float32 on the host; 4 divides the columns
        and the rank. A row's result does not depend on the other rows, bit for bit. Raises MemoryError.
        """
        (rank, columns), outputs = down.shape, len(up)
        given = down.data_ptr(), up.data_ptr(), rank, columns, outputs, x.data_ptr(), x.numel() // columns, factor
        if self._add_pair(*given, result.data_ptr(), torch.get_num_threads()):
            raise MemoryError(f"no memory for a pair of rank {rank}")

    def run(self, products: ctypes.Array[Product]) -> None:
        """Compute some products, one after the other. Raises MemoryError."""
        if self._run(products, len(products), torch.get_num_threads()):
            raise MemoryError(f"no memory for {len(products)} products")

    def unpack_rows(self, matrix: PackedMatrix, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` as float32."""
        out = torch.empty(stop - start, matrix.columns)
        span = map(ctypes.c_int64, (start, stop - start))
        if self._unpack(
            ctypes.byref(matrix.pointers()), *span, ctypes.c_void_p(out.data_ptr()), torch.get_num_threads()
        ):
            raise MemoryError(f"no memory to unpack rows of {matrix.columns} elements")
        return out

    def exponential_sums(
        self, x_NV: torch.Tensor, rows: list[int], best: torch.Tensor, factors: list[float], block: int
    ) -> torch.Tensor:
        """Return the sums of e^((x - best) factor) by `block` elements of the rows (rows, blocks), in float64.

        `x_NV` is contiguous float32, `best` and `factors` have a number for each of the rows.
        """
        size = x_NV.shape[1]
        sums = torch.empty(len(rows), -(-size // block), dtype=torch.float64)
        best, scales, places = best.float().contiguous(), torch.tensor(factors), torch.tensor(rows)
        self._exponential_sums(
            ctypes.c_void_p(x_NV.data_ptr()),
            ctypes.c_int64(size),
            ctypes.c_void_p(places.data_ptr()),
            ctypes.c_int64(len(rows)),
            ctypes.c_void_p(best.data_ptr()),
            ctypes.c_void_p(scales.data_ptr()),
            ctypes.c_int64(block),
            ctypes.c_void_p(sums.data_ptr()),
            torch.get_num_threads(),
        )
        return sums

    def draw_tokens(
        self, x_NV: torch.Tensor, maxima_NB: torch.Tensor, block: int, draws: Sequence[DrawnRow]
    ) -> list[int]:
        """Return the token that each of `draws` chooses of its row of the float32 logits, whose maximum is finite.

        `maxima_NB` has the maxima of all rows by `block` tokens. Both are contiguous. Raises MemoryError.
        """
        tokens = (ctypes.c_int64 * len(draws))()
        if self._draw(
            ctypes.c_void_p(x_NV.data_ptr()),
            ctypes.c_int64(x_NV.shape[1]),
            ctypes.c_void_p(maxima_NB.data_ptr()),
            ctypes.c_int64(block),
            (DrawnRow * len(draws))(*draws),
            ctypes.c_int64(len(draws)),
            tokens,
            torch.get_num_threads(),
        ):
            raise MemoryError(f"no memory to draw one of {x_NV.shape[1]} tokens")
        return list(tokens)


@functools.cache
def load_kernels() -> Kernels | None:
    """Return the kernels, compiled when need be; None, with the reason in the log, where there are none.

    `ATELIER_NATIVE=0` asks for none. HAZARD: torch comes first, so that both share one OpenMP and its threads.
    """
    if os.environ.get("ATELIER_NATIVE") == "0":
        return None
    try:
        check_cache_folder(cache_folder())  # whoever can write there is trusted with code
        return Kernels(built_library(cache_folder() / "native"), processor_flags())
    except (BuildFailed, OSError, AttributeError) as error:
        logger.warning("language models and short texts are computed by torch, which is slower: %s", error)
        return None
