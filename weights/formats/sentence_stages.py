"""modules.json of sentence-transformers: the stages of an embedding model, in order.

Format: a list of objects with `type`, the dotted name of a class, and `path`, the folder of its files beside it, ""
for the folder itself. Source: sentence-transformers 6.2, `base/model.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from weights.errors import FormatError
from weights.formats.untrusted import load_json, shown
from weights.formats.weight_files import is_plain_name

STAGES_FILE: Final = "modules.json"
_MAX_STAGES: Final = 64
_LIBRARY: Final = "sentence_transformers."


class SentenceStage(NamedTuple):
    """A stage: the name of its class, and its folder, "" for the model's own.

    A class of sentence-transformers is named without its module; the whole name is that of code of the model's own.
    """

    name: str
    folder: str


def read_stages(folder: Path) -> tuple[SentenceStage, ...] | None:
    """Return the stages of a model's folder; None where it has no list of them. Raises FormatError naming the file."""
    path = folder / STAGES_FILE
    if not path.is_file():
        return None
    try:
        found = load_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(found, list) or len(found) > _MAX_STAGES or not all(map(_is_stage, found)):
        raise FormatError(f"{path}: expected a list of at most {_MAX_STAGES} objects with 'type' and 'path'")
    stages = tuple(SentenceStage(_name(stage["type"]), stage["path"].rstrip("/")) for stage in found)
    for stage in stages:
        if stage.folder and not is_plain_name(stage.folder):
            raise FormatError(f"{path}: {shown(stage.folder)} is not a folder beside it")
    return stages


def _name(dotted: str) -> str:
    return dotted.rsplit(".", 1)[-1] if dotted.startswith(_LIBRARY) else dotted


def _is_stage(stage: object) -> bool:
    return isinstance(stage, dict) and isinstance(stage.get("type"), str) and isinstance(stage.get("path"), str)
