"""A Hugging Face checkpoint in a smaller form: the forms by name."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, get_args

from infra.offline.folders import Progress, QuantizationReport, read_model
from infra.offline.gguf_export import BlockKind, export_gguf
from infra.offline.group_int8 import export_group_int8, export_kuiper
from weights.records.errors import WeightsError

Form = Literal["kuiper-int8", "gguf-f32", "gguf-f16", "gguf-bf16", "gguf-q8_0", "gguf-q4_0", "int8-group"]
_BLOCK_KINDS: Final[dict[str, BlockKind]] = {
    "gguf-f32": "F32",
    "gguf-f16": "F16",
    "gguf-bf16": "BF16",
    "gguf-q8_0": "Q8_0",
    "gguf-q4_0": "Q4_0",
}
FORMS: Final[tuple[str, ...]] = get_args(Form)
_MAX_GROUP_SIZE: Final = 4096


def quantize_checkpoint(
    source: Path,
    target: Path,
    form: Form,
    *,
    group_size: int = 64,
    progress: Progress = lambda done, total: None,
) -> QuantizationReport:
    """Write the model of the folder `source` to `target`: a file for GGUF, a folder for the others, new in any case.

    One tensor is in memory at a time. `group_size` is that of int8. Raises WeightsError; then `target` is not there.
    """
    if not 1 <= group_size <= _MAX_GROUP_SIZE:
        raise WeightsError(f"group size {group_size}, expected 1 to {_MAX_GROUP_SIZE}")
    model = read_model(source)
    if form == "kuiper-int8":
        return export_kuiper(model, target, group_size, progress)
    if form == "int8-group":
        return export_group_int8(model, target, group_size, progress)
    return export_gguf(model, target, _BLOCK_KINDS[form], progress)
