"""KuiperLLama's model files, version 3 (group-wise int8) and version 0 (fp32), and version 2 (int8) of llama2.c.

KuiperLLama's have no magic and no version number: eight int32 (version 0: seven, without group_size), then the tensors
without padding, each kind over all layers before the next. So a file is taken for one only if the header's arithmetic
gives its exact length. Source: KuiperLLama tools/export.py, `legacy_export_quant` and `legacy_export`.

llama2.c's begin with a magic, are int8 in the embedding as well, and have the rows of q and k in neighbouring RoPE
pairs. Source: llama2.c export.py, `version2_export`.

Qwen2's biases of q, k and v, which that exporter drops, lie behind everything else here: KuiperLLama looks at nothing
there, and the length says that they are.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from weights.formats.tensors import FileTensor
from weights.records.dtypes import tensor_nbytes
from weights.records.errors import FormatError

MAX_LAYERS = 1024  # a damaged number must not become millions of tensors
_FIELDS_V3, _FIELDS_V0 = struct.Struct("<8i"), struct.Struct("<7i")
_FIELDS_LLAMA2C = struct.Struct("<Ii7iBi")  # magic, version, sizes, whether the classifier is shared, group_size
_LLAMA2C_BYTES: Final = 256  # of its header, with padding
_LLAMA2C_MAGIC, _LLAMA2C_VERSION = 0x616B3432, 2

TensorSpec = tuple[str, str, tuple[int, ...]]
# Names in KuiperLLama's export.py -> those of Hugging Face's Llama and Qwen2, in a layer and outside of all.
LAYER_NAMES: Final = {
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES: Final = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class KuiperHeader:
    """Dimensions of a Llama-like model; `group_size` elements share a scale, None stands for fp32 (version 0).

    `shared_classifier`: the output projection is the embedding, there is no `output.weight`.
    The file says nothing of RoPE's base, nor of the norms' epsilon: whoever runs it must know.
    """

    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_seq_len: int
    group_size: int | None
    shared_classifier: bool
    has_biases: bool = False  # not in the header: it follows from the length
    is_llama2c: bool = False
    tensors: Mapping[str, FileTensor] = field(default_factory=dict)

    @property
    def raw(self) -> bytes:
        """The header as it lies in the file: 32 bytes, 28 in version 0, 256 of llama2.c."""
        if self.is_llama2c:
            sizes = (self.dim, self.hidden_dim, self.num_layers, self.num_heads, self.num_kv_heads, self.vocab_size)
            known = (_LLAMA2C_MAGIC, _LLAMA2C_VERSION, *sizes, self.max_seq_len)
            packed = _FIELDS_LLAMA2C.pack(*known, self.shared_classifier, self.group_size)
            return packed.ljust(_LLAMA2C_BYTES, b"\0")
        vocab = self.vocab_size if self.shared_classifier else -self.vocab_size
        numbers = (self.dim, self.hidden_dim, self.num_layers, self.num_heads, self.num_kv_heads, vocab)
        if self.group_size is None:
            return _FIELDS_V0.pack(*numbers, self.max_seq_len)
        return _FIELDS_V3.pack(*numbers, self.max_seq_len, self.group_size)

    def layout(self) -> Iterator[TensorSpec]:
        """Name, dtype and shape of every tensor in the file's order; `x.scales` (flat groups) follows `x.weight`."""
        kv_dim = self.dim // self.num_heads * self.num_kv_heads
        attention = {"wq": (self.dim, self.dim), "wk": (kv_dim, self.dim), "wv": (kv_dim, self.dim)}
        attention["wo"] = (self.dim, self.dim)
        ffn = {"w1": (self.hidden_dim, self.dim), "w2": (self.dim, self.hidden_dim), "w3": (self.hidden_dim, self.dim)}
        embedding = ("tok_embeddings.weight", "F32", (self.vocab_size, self.dim))
        classifier = {} if self.shared_classifier else {"output": (self.vocab_size, self.dim)}
        if self.is_llama2c:
            yield from self._norms("attention_norm")
            yield from self._norms("ffn_norm")
            yield "norm.weight", "F32", (self.dim,)
            yield from self._matrix_specs({"tok_embeddings": (self.vocab_size, self.dim)})
            yield from self._matrices(attention | ffn)
            yield from self._matrix_specs(classifier)
            return
        if self.group_size is not None:
            yield from self._matrices(attention | ffn)
            yield from self._matrix_specs(classifier)
            yield embedding
            yield from self._norms("attention_norm")
            yield from self._norms("ffn_norm")
            yield "norm.weight", "F32", (self.dim,)
            yield from self._biases(kv_dim)
            return
        yield embedding
        yield from self._norms("attention_norm")
        yield from self._matrices(attention)
        yield from self._norms("ffn_norm")
        yield from self._matrices(ffn)
        yield "norm.weight", "F32", (self.dim,)
        rope = (self.max_seq_len, self.dim // self.num_heads // 2)
        yield "freqs_cos", "F32", rope
        yield "freqs_sin", "F32", rope
        yield from self._matrix_specs(classifier)
        yield from self._biases(kv_dim)

    def _biases(self, kv_dim: int) -> Iterator[TensorSpec]:
        for layer in range(self.num_layers if self.has_biases else 0):
            for kind, size in {"wq": self.dim, "wk": kv_dim, "wv": kv_dim}.items():
                yield f"layers.{layer}.{kind}.bias", "F32", (size,)

    def _norms(self, kind: str) -> Iterator[TensorSpec]:
        for layer in range(self.num_layers):
            yield f"layers.{layer}.{kind}.weight", "F32", (self.dim,)

    def _matrices(self, kinds: Mapping[str, tuple[int, int]]) -> Iterator[TensorSpec]:
        for kind, shape in kinds.items():
            yield from self._matrix_specs({f"layers.{layer}.{kind}": shape for layer in range(self.num_layers)})

    def _matrix_specs(self, matrices: Mapping[str, tuple[int, int]]) -> Iterator[TensorSpec]:
        for name, shape in matrices.items():
            if self.group_size is None:
                yield f"{name}.weight", "F32", shape
            else:
                yield f"{name}.weight", "I8", shape
                yield f"{name}.scales", "F32", (math.prod(shape) // self.group_size,)


def read_kuiper(path: Path) -> KuiperHeader:
    """Parse the header of `path` and check the file's exact length against it.

    Raises FormatError saying what no version explains.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            raw = file.read(_LLAMA2C_BYTES)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if len(raw) >= 4 and int.from_bytes(raw[:4], "little") == _LLAMA2C_MAGIC:
        try:
            return _with_tensors(path, parse_kuiper(raw), file_bytes)
        except FormatError as error:
            raise FormatError(f"{path}: not a llama2.c file of version 2: {error}") from None
    problems = []
    for fields in (_FIELDS_V3, _FIELDS_V0):
        try:
            return _with_tensors(path, parse_kuiper(raw[: fields.size]), file_bytes)
        except FormatError as error:
            problems.append(str(error))
    raise FormatError(f"{path}: not a KuiperLLama file; as int8 (v3): {problems[0]}; as fp32 (v0): {problems[1]}")


def parse_kuiper(raw: bytes) -> KuiperHeader:
    """Parse a header of 32 bytes (version 3), 28 (version 0) or 256 (llama2.c).

    Raises FormatError for impossible dimensions.
    """
    is_llama2c = raw[:4] == struct.pack("<I", _LLAMA2C_MAGIC)
    if is_llama2c:
        numbers, group_size = _llama2c_fields(raw)
    elif len(raw) not in (_FIELDS_V3.size, _FIELDS_V0.size):
        raise FormatError(f"{len(raw)} bytes are no header (32 for int8, 28 for fp32, 256 for llama2.c)")
    elif len(raw) == _FIELDS_V3.size:
        *numbers, group_size = _FIELDS_V3.unpack(raw)
    else:
        numbers, group_size = [*_FIELDS_V0.unpack(raw)], None
    dim, hidden_dim, num_layers, num_heads, num_kv_heads, vocab, max_seq_len = numbers
    positive = (dim, hidden_dim, num_layers, num_heads, num_kv_heads, abs(vocab), max_seq_len)
    if min(positive) <= 0 or num_layers > MAX_LAYERS or (group_size is not None and group_size <= 0):
        raise FormatError(
            f"the header has {[*numbers, group_size]}, expected positive sizes, {MAX_LAYERS} layers at most"
        )
    if dim % num_heads or num_heads % num_kv_heads or dim // num_heads % 2:
        raise FormatError(f"dim {dim} cannot be {num_heads} heads of even size over {num_kv_heads} key/value heads")
    header = KuiperHeader(
        dim,
        hidden_dim,
        num_layers,
        num_heads,
        num_kv_heads,
        abs(vocab),
        max_seq_len,
        group_size,
        shared_classifier=vocab > 0,
        is_llama2c=is_llama2c,
    )
    if group_size is not None:
        for name, dtype, shape in header.layout():
            if dtype == "I8" and math.prod(shape) % group_size:
                raise FormatError(f"{name} {list(shape)} is no whole number of groups of {group_size}")
    return header


def _llama2c_fields(raw: bytes) -> tuple[list[int], int]:
    """Return the seven sizes, as KuiperLLama has them (a classifier of its own makes the vocabulary negative), and the
    size of a group. Raises FormatError for another version, and for what the padding hides.
    """
    if len(raw) != _LLAMA2C_BYTES:
        raise FormatError(f"{len(raw)} bytes are no header of llama2.c (256)")
    _, version, *numbers, is_shared, group_size = _FIELDS_LLAMA2C.unpack_from(raw)
    if version != _LLAMA2C_VERSION:
        raise FormatError(f"version {version} of llama2.c; known is {_LLAMA2C_VERSION} (int8)")
    if is_shared not in (0, 1) or any(raw[_FIELDS_LLAMA2C.size :]) or numbers[5] <= 0:
        raise FormatError(f"vocabulary {numbers[5]}, shared flag {is_shared}: expected 1 or more, 0 or 1, zeros behind")
    numbers[5] *= 1 if is_shared else -1
    return numbers, group_size


def write_kuiper(path: Path, header: KuiperHeader, tensors: Mapping[str, Callable[[], bytes | memoryview]]) -> None:
    """Write the tensors, name -> read, as the header's layout has them. Not synced to disk: the caller's to decide.

    Raises FormatError for a tensor that is missing, unknown, or of another size than its shape takes.
    """
    has_biases = any(name.endswith(".bias") for name in tensors)
    specs = list(dataclasses.replace(parse_kuiper(header.raw), has_biases=has_biases).layout())
    wrong = {name for name, _, _ in specs} ^ tensors.keys()
    if wrong:
        raise FormatError(f"{path}: missing or unknown tensors: {', '.join(sorted(wrong))}")
    with path.open("wb") as file:
        file.write(header.raw)
        for name, dtype, shape in specs:
            data = memoryview(tensors[name]())
            expected = tensor_nbytes(dtype, shape)
            if data.nbytes != expected:
                raise FormatError(f"{path}: tensor {name!r} takes {expected} bytes, {data.nbytes} came")
            file.write(data)


def _with_tensors(path: Path, header: KuiperHeader, file_bytes: int) -> KuiperHeader:
    """Return the header with its tensors' places. Raises FormatError for a length that fits neither layout."""
    biased = dataclasses.replace(header, has_biases=not header.is_llama2c)
    num_bytes = len(header.raw) + sum(tensor_nbytes(dtype, shape) for _, dtype, shape in biased.layout())
    if num_bytes == file_bytes:
        header = biased
    tensors: dict[str, FileTensor] = {}
    position = len(header.raw)
    for name, dtype, shape in header.layout():
        nbytes = tensor_nbytes(dtype, shape)
        tensors[name] = FileTensor(path, position, nbytes, dtype, shape)
        position += nbytes
    if position != file_bytes:
        raise FormatError(
            f"dim {header.dim}, {header.num_layers} layers, vocabulary {header.vocab_size} take {position} bytes, "
            f"the file has {file_bytes}"
        )
    return dataclasses.replace(header, tensors=tensors)
