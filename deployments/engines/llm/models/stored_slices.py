"""The parts of a decoder's stored matrices that one rank of several needs: what it reads, and what its device holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig

from deployments.engines.building.build import blank_language_model
from deployments.engines.libraries.library_seam import checkpoint_layout
from deployments.engines.llm.models.decoder_tensors import renamed_experts
from deployments.engines.llm.models.packed import PackedSource
from deployments.engines.llm.models.planned_share import PlannedShare
from deployments.engines.llm.models.rank_share import DecoderShare, Slice
from deployments.engines.llm.models.registry import decoder_spec, decoder_tensors, headed_name, is_stock, load_config
from deployments.engines.nn.packed_weights import GROUP_INT8
from weights.records.dtypes import BLOCK_SIZES, GROUP_INT8_METHOD

_PLAIN: Final = frozenset({"F32", "F16", "BF16"})
_DIVISIBLE: Final = frozenset({*_PLAIN, "I8", *BLOCK_SIZES})
_SCALES: Final = ".scales"


def stored_slices(folder: Path, dtypes: Mapping[str, str], rank: int, size: int) -> dict[str, Slice]:
    """Return the slices of rank `rank` of `size` by the stored names of matrices, of those that it needs no whole of.

    `dtypes` are those of all tensors. Packed weights are cut at whole blocks or groups; the scales of a matrix's
    columns, which lie apart, and experts of one tensor are whole: a rank cuts them when it has read them. Raises
    EngineError for a model that ranks cannot divide.
    """
    config = load_config(folder)
    if not _DIVISIBLE.issuperset(dtypes.values()):
        return {}
    if is_stock(config):
        return _planned_slices(config, dtypes, rank, size)
    # By the decoder's names the stored ones: a model that reads more than text has others for them.
    own = renamed_experts(decoder_tensors(config, {name: name for name in dtypes}))
    source: PackedSource | None = getattr(config, "packed_source", None)
    if source is None:
        source = _grouped(getattr(config, "quantization_config", None), dtypes, own)
    if source is None and not _PLAIN.issuperset(dtypes.values()):
        return {}
    share = DecoderShare.of_stored(decoder_spec(config), rank, size, source)
    found = {}
    for name, stored in own.items():
        full = headed_name(name) if source is None else source.names.get(name)
        if full is not None and "*" not in full:
            found[stored] = share.slice_of(full)
        elif source is not None and name.endswith(_SCALES):
            of_matrix = source.names.get(name.removesuffix(_SCALES) + ".weight")
            found[stored] = None if of_matrix is None else share.slice_of_scales(of_matrix, source.group_size)
    return {name: part for name, part in found.items() if part is not None}


def copied_bytes(folder: Path, sizes: Mapping[str, int], size: int) -> int:
    """Return the bytes that each of `size` ranks copies of tensors of these sizes. Raises as `stored_slices`."""
    config = load_config(folder)
    if not is_stock(config):
        return 0
    named, module = decoder_tensors(config, sizes), blank_language_model(config)
    return PlannedShare(module, 0, size).copied_bytes(checkpoint_layout(module, named), named)


def _planned_slices(config: PretrainedConfig, names: Iterable[str], rank: int, size: int) -> dict[str, Slice]:
    """Return those of a model that transformers computes."""
    stored, module = decoder_tensors(config, {name: name for name in names}), blank_language_model(config)
    parts = PlannedShare(module, rank, size).stored_slices(checkpoint_layout(module, stored))
    return {stored[name]: part for name, part in parts.items()}


def _grouped(quantization: Any, dtypes: Mapping[str, str], own: Mapping[str, str]) -> PackedSource | None:
    """Return the source of int8 groups; None for what is stored in another way."""
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != GROUP_INT8_METHOD:
        return None
    names = {name: headed_name(name) for name in own if not name.endswith(_SCALES)}
    kinds = {name: GROUP_INT8 if dtypes[own[name]] == "I8" else dtypes[own[name]] for name in names}
    return PackedSource(names, kinds, group_size=quantization["group_size"])
