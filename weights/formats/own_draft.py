"""A draft model that a language model gets: a small one of the same vocabulary, as a component beside its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Final

from weights.formats.folder import read_json
from weights.formats.gguf import folder_files, read_gguf
from weights.formats.source import CONFIG_FILE, Checkpoint
from weights.formats.untrusted import shown
from weights.records.errors import FormatError

DRAFT: Final = "draft"  # the component and its folder
# Of its tensors among those of the model, where the two are one component; parts of a module's names have no slash.
PREFIX: Final = f"{DRAFT}/"
_TOKENIZER: Final = "tokenizer.json"


def with_draft(model: Checkpoint, draft: Checkpoint) -> Checkpoint:
    """Return the language model with the `draft`. Raises FormatError where these have no tokens in common."""
    for one, what in ((model, f"{model.path} has no use for one"), (draft, str(draft.path))):
        if one.kind != "llm":
            raise FormatError(f"{DRAFT}: {what}: it is of kind {one.kind!r}, expected a language model")
    formats = [one.components[0].format for one in (model, draft)]
    if formats[0] != formats[1]:
        raise FormatError(f"{DRAFT}: {draft.path}: in the format {formats[1]}, expected {formats[0]} as {model.path}")
    _check_vocabulary(model, draft)
    headers = {f"{DRAFT}/{name}": data for name, data in draft.headers.items()}
    if (file := draft.root / CONFIG_FILE).is_file():
        headers = {f"{DRAFT}/{CONFIG_FILE}": file.read_bytes()} | headers
    (part, *_) = draft.components
    component = replace(part, name=DRAFT, folder=(PurePosixPath(DRAFT) / part.folder).as_posix())
    return replace(model, components=(*model.components, component), headers={**model.headers, **headers}, draft=draft)


def _check_vocabulary(model: Checkpoint, draft: Checkpoint) -> None:
    """Raise FormatError unless each token is the same one in both, as far as their files tell."""
    own, given = _tokens(model), _tokens(draft)
    if own is None or given is None:
        sizes = [None if known is None else len(known) for known in (own, given)]
        sizes = [_size(one) if size is None else size for one, size in zip((model, draft), sizes, strict=True)]
        if sizes[0] == sizes[1]:
            return
        what = ""
    elif own == given:
        return
    else:
        sizes = [len(own), len(given)]
        number = min(number for number in own.keys() | given.keys() if own.get(number) != given.get(number))
        what = f"; token {number} is {shown(own.get(number))} there and {shown(given.get(number))} here"
    raise FormatError(
        f"{DRAFT}: {draft.path}: a vocabulary of {sizes[1]} tokens, that of {model.path} has {sizes[0]}: expected the "
        f"same tokens{what}"
    )


def _tokens(checkpoint: Checkpoint) -> Mapping[int, Any] | None:
    """Return the tokens by number, None where they are in a file of another kind."""
    if files := [checkpoint.path] if checkpoint.path.suffix == ".gguf" else folder_files(checkpoint.root):
        listed = read_gguf(files[0]).metadata.get("tokenizer.ggml.tokens")
        return dict(enumerate(listed)) if isinstance(listed, list) else None
    if not (checkpoint.root / _TOKENIZER).is_file():
        return None
    content = read_json(checkpoint.root / _TOKENIZER)
    part, added = content.get("model"), content.get("added_tokens")
    words = part.get("vocab") if isinstance(part, dict) else None
    found: dict[int, Any] = {}
    if isinstance(words, dict):
        found = {number: word for word, number in words.items() if type(number) is int}
    elif isinstance(words, list):  # each with its score
        found = {number: one[0] for number, one in enumerate(words) if isinstance(one, list) and one}
    for one in added if isinstance(added, list) else ():
        if isinstance(one, dict) and type(one.get("id")) is int:
            found[one["id"]] = one.get("content")
    return found or None


def _size(checkpoint: Checkpoint) -> Any:
    """Return the number of tokens that a config names."""
    config = checkpoint.config
    inner = config.get("text_config")
    return config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
