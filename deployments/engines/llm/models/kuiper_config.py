"""Map the tensors of a KuiperLLama or llama2.c file to a model. Facts that the file lacks are in config.json beside it.

Rows of q and k are in halves, as Hugging Face has them, and in neighbouring pairs in llama2.c's: RoPE's convention is
defined by the file's format.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig

from deployments.engines.llm.models.decoder_tensors import check_kuiper_decoder
from deployments.engines.llm.models.packed import PackedSource
from deployments.engines.nn.packed_weights import GROUP_INT8
from deployments.engines.records.protocol import EngineError
from weights.formats.kuiper import LAYER_NAMES, TOP_NAMES, KuiperHeader, parse_kuiper, read_kuiper
from weights.records.errors import FormatError


def kuiper_header(folder: Path) -> KuiperHeader | None:
    """Return the header of the Kuiper model in `folder` (its file, or what the store keeps of it), None without one.

    Raises EngineError naming a file that cannot be read.
    """
    kept, files = sorted(folder.glob("*.bin.header")), sorted(folder.glob("*.bin"))
    try:
        if kept:
            return parse_kuiper(kept[0].read_bytes())
        if len(files) == 1 and not sorted(folder.glob("*.safetensors")):
            return read_kuiper(files[0])
    except (FormatError, OSError) as error:
        raise EngineError(f"{folder}: {error}") from None
    return None


def kuiper_source(header: KuiperHeader, config: PretrainedConfig) -> PackedSource:
    """Return the source of the decoder's tensors. Raises EngineError when config.json has other dimensions or kind."""
    check_kuiper_decoder(header, config.to_dict())
    names, kinds = {}, {}
    for name, dtype, _ in header.layout():
        module, _, leaf = name.rpartition(".")
        top, _, rest = module.partition(".")
        if leaf == "scales" or top in ("freqs_cos", "freqs_sin"):
            continue
        if top == "layers":
            layer, _, kind = rest.partition(".")
            names[name] = f"model.layers.{layer}.{LAYER_NAMES[kind]}.{leaf}"
        else:
            names[name] = f"{TOP_NAMES[module]}.{leaf}"
        kinds[name] = GROUP_INT8 if dtype == "I8" else dtype
    scales = (name for name, _, _ in header.layout() if name.endswith(".scales"))
    biases = {f"layers.{i}.{kind}.bias" for i in range(header.num_layers) for kind in ("wq", "wk", "wv")}
    for name in biases:  # their presence is checked at their assignment
        _, layer, kind, _ = name.split(".")
        names[name], kinds[name] = f"model.layers.{layer}.{LAYER_NAMES[kind]}.bias", "F32"
    ignored = frozenset((*scales, "freqs_cos", "freqs_sin"))
    group_size = header.group_size or 0
    return PackedSource(names, kinds, is_interleaved=header.is_llama2c, group_size=group_size, ignored=ignored)
