"""Rules for the embeddings of a model, as its folder has them: what stands before a text, how one vector is made of its
tokens', and how short it may be.

Format: modules.json of sentence-transformers lists the stages; Pooling and Dense have a folder with config.json.
config_sentence_transformers.json has prompts by name. Source: sentence-transformers 6.2,
`sentence_transformer/modules/pooling.py`, `base/model.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from deployments.engines.libraries.config_files import read_config
from deployments.engines.records.protocol import EngineError, InputType
from weights.formats.encoder_files import STAGES_FILE, SentenceStage, read_stages
from weights.records.errors import FormatError

_DENSE: Final = "Dense"
_STAGES: Final = ("Transformer", "Pooling", "Normalize", _DENSE)
_PROMPTS_FILE: Final = "config_sentence_transformers.json"
_MAX_PROMPTS: Final = 256
_MAX_PROMPT_CHARS: Final = 8192
# The names that the stock library looks for, in this order, when it is asked for queries and for documents.
_PROMPTS_OF: Final[Mapping[InputType, tuple[str, ...]]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}
# Order matters: several modes at once are concatenated in this one.
_MODE_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class PoolingRule(NamedTuple):
    """The ways of making one vector of many, in the order in which they are concatenated; () where none is named.

    `normalize` scales it to length 1. `later` are the stages behind that: from the first Dense layer on.
    """

    modes: tuple[str, ...]
    normalize: bool
    later: tuple[SentenceStage, ...] = ()


def read_pooling_rule(folder: Path, known: Collection[str], *, takes_dense: bool = False) -> PoolingRule | None:
    """Read the rule of `folder`'s modules.json; None without one.

    Raises EngineError for stages that are not supported, and for ways that are not `known`.
    """
    if (stages := stages_of(folder)) is None:
        return None
    names = [stage.name for stage in stages]
    stages_known = _STAGES if takes_dense else _STAGES[:-1]
    where = folder / STAGES_FILE
    if unknown := [name for name in names if name not in stages_known]:
        own = "; code that comes with a model is never run" if "." in unknown[0] else ""
        raise EngineError(
            f"{where}: unknown stage {unknown[0]!r} (known: {', '.join(stages_known)}){own}{_remedy(stages)}"
        )
    first_dense = names.index(_DENSE) if _DENSE in names else len(names)
    if "Pooling" in names[first_dense:]:
        raise EngineError(f"{where}: a stage 'Dense' before 'Pooling', of token vectors, is not supported")
    modes: tuple[str, ...] = ()
    for stage in stages[:first_dense]:
        if stage.name == "Pooling":
            config_path = folder / stage.folder / "config.json"
            config = read_config(config_path)
            modes = _modes(config_path, config, known)
            if config.get("include_prompt") is False and any(read_prompts(folder).texts.values()):
                raise EngineError(
                    f"{config_path}: pooling that leaves the prompt out (include_prompt) is not supported"
                )
    return PoolingRule(modes, "Normalize" in names[:first_dense], stages[first_dense:])


def stages_of(folder: Path) -> tuple[SentenceStage, ...] | None:
    """Return the stages that a model's folder lists, None without a list. Raises EngineError."""
    try:
        return read_stages(folder)
    except FormatError as error:
        raise EngineError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Prompts:
    """The texts that a model was trained to see before others, by name, and the name of the usual one."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    def before(self, name: str | None, input_type: InputType | None = None) -> str:
        """Return the prefix of a text: the prompt of that name, that of the kind of text, or the usual one.

        Where the model has no prompt for a kind of text, nothing stands there, as in the stock library. Raises
        EngineError for a name that the model does not have.
        """
        if name is not None and input_type is not None:
            raise EngineError("prompt_name: give either prompt_name or input_type")
        if name is not None and name not in self.texts:
            known = ", ".join(self.texts) or "none"
            raise EngineError(f"prompt_name: the model has no prompt {name!r} (known: {known})")
        if input_type is not None:
            return next((self.texts[one] for one in _PROMPTS_OF[input_type] if one in self.texts), "")
        return self.texts.get(name or self.default or "", "")


def read_prompts(folder: Path) -> Prompts:
    """Read the prompts of a model's folder; none where it has none. Raises EngineError naming the file."""
    path = folder / _PROMPTS_FILE
    if not path.is_file():
        return Prompts()
    config = read_config(path)
    texts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    are_texts = isinstance(texts, dict) and len(texts) <= _MAX_PROMPTS
    if not are_texts or not all(isinstance(text, str) and len(text) <= _MAX_PROMPT_CHARS for text in texts.values()):
        raise EngineError(
            f"{path}: prompts: expected at most {_MAX_PROMPTS} texts by name, each of at most {_MAX_PROMPT_CHARS} "
            "characters"
        )
    if default is not None and default not in texts:
        raise EngineError(f"{path}: default_prompt_name {default!r:.100} is not one of the prompts")
    return Prompts(texts, default)


def check_dimensions(dimensions: int, size: int, config: Any) -> None:
    """Raise EngineError unless the first `dimensions` of a vector of `size` mean something.

    They do where config.json says that the model was trained for it, by `matryoshka_dimensions` or `is_matryoshka` (the
    keys that other servers read too).
    """
    if dimensions == size:
        return
    sizes = getattr(config, "matryoshka_dimensions", None)
    if not sizes and getattr(config, "is_matryoshka", None) is not True:
        raise EngineError(
            f"dimensions: {dimensions}, but the model has {size} and was not trained for fewer "
            "(no matryoshka_dimensions in its config)"
        )
    if sizes and dimensions not in sizes:
        raise EngineError(f"dimensions: {dimensions}; the model was trained for {', '.join(map(str, sizes))}")
    if dimensions > size:
        raise EngineError(f"dimensions: {dimensions}, but the model has {size}")


def _remedy(stages: tuple[SentenceStage, ...]) -> str:
    """Return a remedy for a layer behind the pooling, or nothing when there is none."""
    folder = next((stage.folder for stage in stages if stage.name == _DENSE), None)
    if folder is None:
        return ""
    return f"; without that stage in modules.json, its folder {folder!r} can be served as a model of its own, a head"


def _modes(path: Path, config: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    given = config.get("pooling_mode")
    if given is None:
        flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        unknown = [flag for flag in flags if _MODE_FLAGS.get(flag) not in known]
        modes = tuple(mode for flag, mode in _MODE_FLAGS.items() if flag in flags)
    else:
        modes = (given,) if isinstance(given, str) else tuple(given)
        unknown = [mode for mode in modes if mode not in known]
    if unknown:
        raise EngineError(f"{path}: unknown pooling {unknown[0]!r} (known: {', '.join(known)})")
    return modes
