"""The parts of a decoder's stored matrices that one rank of several needs: what it reads, and what its device holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from deployments.engines.llm.models.rank_share import DecoderShare, Slice
from deployments.engines.llm.models.registry import decoder_spec, decoder_tensors, headed_name, is_stock, load_config

_PLAIN: Final = frozenset({"F32", "F16", "BF16"})


def stored_slices(folder: Path, dtypes: Mapping[str, str], rank: int, size: int) -> dict[str, Slice]:
    """Return the slices of rank `rank` of `size` by the stored names of matrices, of those that it needs no whole of.

    `dtypes` are those of all tensors. Packed weights have none: their rows are in blocks, and a rank cuts them when it
    has read them. Raises EngineError for a decoder that ranks cannot divide.
    """
    config = load_config(folder)
    if is_stock(config) or getattr(config, "quantization_config", None) or not _PLAIN.issuperset(dtypes.values()):
        return {}
    share = DecoderShare(decoder_spec(config), rank, size)
    # By the decoder's names the stored ones: a model that reads more than text has others for them.
    own = decoder_tensors(config, {name: name for name in dtypes})
    found = {stored: share.slice_of(headed_name(name)) for name, stored in own.items()}
    return {name: part for name, part in found.items() if part is not None}
