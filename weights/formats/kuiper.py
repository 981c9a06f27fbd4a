"""KuiperLLama's model files: version 3 (group-wise int8) and version 0 (fp32). Reading and writing.

No magic and no version number: eight int32 (version 0: seven, without group_size), then the tensors without padding,
each kind over all layers before the next. So a file is taken for one only if the header's arithmetic gives its exact
length. Source: KuiperLLama tools/export.py, `legacy_export_quant` and `legacy_export`.

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

from weights.dtypes import tensor_nbytes
from weights.errors import FormatError
from weights.formats.tensors import FileTensor

MAX_LAYERS = 1024  # a damaged number must not become millions of tensors
_FIELDS_V3, _FIELDS_V0 = struct.Struct("<8i"), struct.Struct("<7i")
_LLAMA2_C_MAGIC = 0x616B3432

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

    `shared_classifier`: the output projection is the fp32 embedding, there is no `output.weight`.
    The file says nothing of RoPE's base and pairing, nor of the norms' epsilon: whoever runs it must know.
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
    tensors: Mapping[str, FileTensor] = field(default_factory=dict)

    @property
    def raw(self) -> bytes:
        """The header as it lies in the file: 32 bytes, 28 in version 0."""
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
        if self.group_size is not None:
            yield from self._matrices(attention | ffn)
            yield from self._named(classifier)
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
        yield from self._named(classifier)
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
            yield from self._named({f"layers.{layer}.{kind}": shape for layer in range(self.num_layers)})

    def _named(self, matrices: Mapping[str, tuple[int, int]]) -> Iterator[TensorSpec]:
        for name, shape in matrices.items():
            if self.group_size is None:
                yield f"{name}.weight", "F32", shape
            else:
                yield f"{name}.weight", "I8", shape
                yield f"{name}.scales", "F32", (math.prod(shape) // self.group_size,)


def read_kuiper(path: Path) -> KuiperHeader:
    """Parse the header of `path` and check the file's exact length against it.

    Raises FormatError saying what neither version explains; llama2.c's own versions 1 and 2 are named as such.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            raw = file.read(_FIELDS_V3.size)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if len(raw) >= 4 and int.from_bytes(raw[:4], "little") == _LLAMA2_C_MAGIC:
        raise FormatError(f"{path}: a llama2.c file (magic 'ak42'), which is another format than KuiperLLama's")
    problems = []
    for fields in (_FIELDS_V3, _FIELDS_V0):
        try:
            return _with_tensors(path, parse_kuiper(raw[: fields.size]), file_bytes)
        except FormatError as error:
            problems.append(str(error))
    raise FormatError(f"{path}: not a KuiperLLama file; as int8 (v3): {problems[0]}; as fp32 (v0): {problems[1]}")


def parse_kuiper(raw: bytes) -> KuiperHeader:
    """Parse a header of 32 bytes (version 3) or 28 (version 0). Raises FormatError for impossible dimensions."""
    if len(raw) not in (_FIELDS_V3.size, _FIELDS_V0.size):
        raise FormatError(f"{len(raw)} bytes are no header (32 for int8, 28 for fp32)")
    *numbers, group_size = _FIELDS_V3.unpack(raw) if len(raw) == _FIELDS_V3.size else (*_FIELDS_V0.unpack(raw), None)
    dim, hidden_dim, num_layers, num_heads, num_kv_heads, vocab, max_seq_len = numbers
    positive = (dim, hidden_dim, num_layers, num_heads, num_kv_heads, abs(vocab), max_seq_len)
    if min(positive) <= 0 or num_layers > MAX_LAYERS or (group_size is not None and group_size <= 0):
        raise FormatError(
            f"the header has {[*numbers, group_size]}, expected positive sizes, {MAX_LAYERS} layers at most"
        )
    if dim % num_heads or num_heads % num_kv_heads or dim // num_heads % 2:
        raise FormatError(f"dim {dim} cannot be {num_heads} heads of even size over {num_kv_heads} key/value heads")
    header = KuiperHeader(
        dim, hidden_dim, num_layers, num_heads, num_kv_heads, abs(vocab), max_seq_len, group_size, vocab > 0
    )
    if group_size is not None:
        for name, dtype, shape in header.layout():
            if dtype == "I8" and math.prod(shape) % group_size:
                raise FormatError(f"{name} {list(shape)} is no whole number of groups of {group_size}")
    return header


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
    biased = dataclasses.replace(header, has_biases=True)
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
