"""Check of a folder's tokenizer, without torch: the registry asks before weights are read.

Loading asks `check_tokenizer_files` first and, when the library fails, `check_tokenizer` why: so a folder is refused
at import in the words that its first request would get. HAZARD: of files that are not there, transformers makes an
empty tokenizer, without a word. Rules: transformers 5.23, `models/auto/tokenization_auto.py`
and `tokenization_utils_tokenizers.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from deployments.engines.libraries.config_files import read_config
from deployments.engines.libraries.library_classes import has_part_class, library_folder, version
from deployments.engines.records.protocol import EngineError
from weights.formats.untrusted import shown
from weights.platform.panics import panics_as_errors

_VOCABULARIES: Final = frozenset({"tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "bpe.codes"})
_SENTENCEPIECE: Final = frozenset({".model", ".spm"})
_PACKAGES: Final = {".model": "sentencepiece", ".spm": "sentencepiece", ".tiktoken": "tiktoken"}  # that read them
_OF_BYTES: Final = frozenset({"ByT5Tokenizer", "CanineTokenizer"})  # classes of transformers without a vocabulary
_SETTINGS: Final = "tokenizer_config.json"
_OTHER_SETTINGS: Final = ("special_tokens_map.json", "added_tokens.json")
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "tokenizer_class": (str,),
    "model_max_length": (int, float),
    "padding_side": (str,),
    "chat_template": (str, list, dict),
    "auto_map": (dict, list),
    "added_tokens_decoder": (dict,),
    **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token"), (str, dict)),
}
_MODEL_TYPE: Final = re.compile(r'\(\s*"([\w.-]+)",\s*"(\w+)"')  # a line of the table of tokenizers


def check_tokenizer(folder: Path) -> None:
    """Raise EngineError for a folder from which no tokenizer can be loaded."""
    check_tokenizer_files(folder)
    if (whole := folder / "tokenizer.json").exists():
        _check_whole(whole)


def check_tokenizer_files(folder: Path) -> None:
    """Raise EngineError as `check_tokenizer`, but not for what is in a tokenizer.json: to read it may take a second."""
    settings = _read_settings(folder)
    if code := _own_code(folder, settings):
        raise EngineError(f"{folder}: its tokenizer is code that comes with the model ({code}), which is never run")
    if (folder / "tokenizer.json").exists() or settings.get("tokenizer_class") in _OF_BYTES:
        return
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if not any(file.name in _VOCABULARIES or file.suffix in _PACKAGES for file in files):
        raise EngineError(
            f"{folder}: there is no tokenizer (tokenizer.json, or vocab.json with merges.txt, vocab.txt, a .model file)"
        )
    config = _model_config(folder)
    class_name = settings.get("tokenizer_class") or config.get("tokenizer_class") or _class_of_model(config)
    if class_name is None or not has_part_class("transformers", class_name):
        known = f"transformers {version('transformers')} has no tokenizer class {class_name!r}"
        why = known if class_name else f"no class of tokenizers is named ({_SETTINGS})"
        raise EngineError(f"{folder}: there is no tokenizer.json, and {why}")
    _check_packages(folder, files)
    _check_words(folder)


def _check_packages(folder: Path, files: Sequence[Path]) -> None:
    """Raise EngineError for a vocabulary whose reader is not installed."""
    has_words = any((folder / name).exists() for name in ("vocab.json", "vocab.txt"))
    for file in files:
        package = "mistral_common" if file.name == "tekken.json" else _PACKAGES.get(file.suffix)
        is_needed = package is not None and (file.suffix in _SENTENCEPIECE or not has_words)
        if package and is_needed and importlib.util.find_spec(package) is None:
            raise EngineError(
                f"{file}: is read by the package {package}, which is not installed here; save the tokenizer as "
                "tokenizer.json"
            )


def _check_whole(file: Path) -> None:
    from tokenizers import Tokenizer  # a third of a second, and most folders are asked for once

    content = read_config(file)
    if not isinstance(content.get("added_tokens"), list):
        raise EngineError(f"{file}: is no tokenizer: it has no list of added_tokens")
    try:
        with panics_as_errors():
            Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no other class
        raise EngineError(f"{file}: is no tokenizer: {error}") from None


def _check_words(folder: Path) -> None:
    """Raise EngineError for lists of words that cannot be read."""
    from tokenizers.models import BPE

    has_sentences = any(file.suffix in _SENTENCEPIECE for file in folder.iterdir())
    vocabulary, merges, words = folder / "vocab.json", folder / "merges.txt", folder / "vocab.txt"
    if vocabulary.exists() and not has_sentences:
        if not merges.exists():
            raise EngineError(f"{folder}: there is no merges.txt beside vocab.json")
        try:
            with panics_as_errors():
                BPE.read_file(str(vocabulary), str(merges))
        except Exception as error:
            raise EngineError(f"{vocabulary}: is no vocabulary: {error}") from None
    elif words.exists():
        try:
            words.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise EngineError(f"{words}: is no vocabulary: {error}") from None


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, {} without one. Raises EngineError for what no library takes."""
    for name in _OTHER_SETTINGS:
        if (folder / name).is_file():
            read_config(folder / name)
    path = folder / _SETTINGS
    settings = read_config(path) if path.is_file() else {}
    for name, types in _TYPES.items():
        value = settings.get(name)
        if value is not None and (not isinstance(value, types) or isinstance(value, bool)):
            raise EngineError(f"{path}: {name} is {shown(value)}, which is no {' or '.join(t.__name__ for t in types)}")
    template = folder / "chat_template.jinja"
    try:
        template.is_file() and template.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise EngineError(f"{template}: is no text: {error}") from None
    return settings


def _own_code(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the class of a tokenizer that is the model's own code, where transformers has none in its place."""
    given = settings.get("auto_map")
    named = given.get("AutoTokenizer") if isinstance(given, dict) else given
    if not named:
        return None
    class_name = settings.get("tokenizer_class")
    is_known = class_name is not None and has_part_class("transformers", class_name)
    if is_known or _class_of_model(_model_config(folder)):
        return None
    return shown(next((one for one in reversed(named) if one), None) if isinstance(named, list) else named)


def _model_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of the model that a tokenizer lies beside, {} without one."""
    config = folder / "config.json"
    return read_config(config) if config.is_file() else {}


def _class_of_model(config: Mapping[str, Any]) -> str | None:
    return _tokenizers_of_models().get(str(config.get("model_type")))


@functools.cache
def _tokenizers_of_models() -> Mapping[str, str]:
    """Return the tokenizer classes by model type, as transformers' table of them has it."""
    file = library_folder("transformers") / "models" / "auto" / "tokenization_auto.py"
    return dict(_MODEL_TYPE.findall(file.read_text("utf-8")))
