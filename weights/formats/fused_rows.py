"""Encoders whose files have several matrices in one tensor, one above the other: each becomes a tensor of its own.

transformers splits them when it loads such a file, and joins them again when it saves. Here a part is a run of the
file, so nothing is copied. Source: transformers 5.23, `conversion_mapping.py`, whose other names are renamed later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from weights.errors import FormatError
from weights.formats.tensors import FileTensor, SourceTensor
from weights.formats.untrusted import shown

_HEADS: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PARTS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {  # by model_type, of a module's name
    "gte": {"attention.qkv_proj": _HEADS, "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")},
    "jina_embeddings_v3": {"mixer.Wqkv": _HEADS},
    "nomic_bert": {"attn.Wqkv": _HEADS},
}


def split_rows(model_type: str, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return the tensors with those of several parts split. Raises FormatError for one of no whole parts."""
    found: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        fused = _PARTS.get(model_type, {})
        stem = next((stem for stem in fused if module.endswith(f".{stem}")), None)
        if stem is None or not isinstance(tensor, FileTensor):
            found[name] = tensor
            continue
        count = len(fused[stem])
        if not tensor.shape or tensor.shape[0] % count:
            raise FormatError(
                f"{tensor.file}: tensor {shown(name)} has shape {list(tensor.shape)}, expected {count} parts of rows"
            )
        nbytes, shape = tensor.nbytes // count, (tensor.shape[0] // count, *tensor.shape[1:])
        for place, part in enumerate(fused[stem]):
            offset = tensor.offset + place * nbytes
            renamed = f"{module.removesuffix(stem)}{part}.{leaf}"
            found[renamed] = FileTensor(tensor.file, offset, nbytes, tensor.dtype, shape)
    return found
