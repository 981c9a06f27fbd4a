"""The known encoders, poolings and heads, without torch; `forwards.py` and its neighbours run them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from deployments.engines.libraries.config_files import read_config
from deployments.engines.records.protocol import EngineError
from weights.formats.classifier import SUFFIX, read_labels
from weights.formats.dense_head import POOLED, DenseConfig

# Language models that pipelines read prompts with, by their hidden states.
PROMPT_READERS: Final = (
    "Qwen3ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
ENCODER_CLASSES: Final = ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel")
POOLINGS: Final = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# A closed table: the stock class imports any name in the config, which may be hostile code.
ACTIVATIONS: Final = (
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.activation.Tanh",
    "torch.nn.modules.activation.ReLU",
    "torch.nn.modules.activation.GELU",
    "torch.nn.modules.activation.Sigmoid",
)
_IDENTITY, _SIGMOID, SOFTMAX = ACTIVATIONS[0], ACTIVATIONS[-1], "softmax"


# Model types that could not be built or run.
_UNSERVED: Final = {
    "ibert": "computes with integers of its own",
    "xmod": "wants the language of each text",
}


class ScoringRule(NamedTuple):
    """The way from a classifier's logits to scores: an `activation` of ACTIVATIONS or SOFTMAX, and the classes."""

    activation: str
    labels: tuple[str, ...]


def encoder_class(folder: Path, class_name: str | None) -> str:
    """Return the class of the encoder in `folder`, by default that of its config.json.

    Raises EngineError for a class that gives neither token vectors nor classes, or does not read text.
    """
    path = folder / "config.json"
    class_name = class_name or next(iter(read_config(path).get("architectures") or ()), "")
    if class_name in (*ENCODER_CLASSES, *PROMPT_READERS):
        return class_name  # by its name alone: to read the file is a tenth of a kept encoder's attach
    config = read_config(path)
    if reason := _UNSERVED.get(str(config.get("model_type"))):
        raise EngineError(f"{folder}: a {class_name} {reason}, which is not supported")
    if class_name.endswith(SUFFIX):
        if not isinstance(config.get("vocab_size"), int):
            raise EngineError(f"{folder}: a {class_name} has no vocabulary of its own (vocab_size); it reads no text")
        return class_name
    if not class_name.endswith("Model"):  # BertModel has them, BertForMaskedLM not
        known = ", ".join(ENCODER_CLASSES)
        raise EngineError(f"{folder}: {class_name} gives no token vectors, expected {known} or another …Model")
    if reason := _other_input(config):
        raise EngineError(f"{folder}: a {class_name} {reason}, which is no text encoder")
    return class_name


def read_scoring_rule(folder: Path) -> ScoringRule:
    """Read the scoring rule of the classifier in `folder`. Raises EngineError, FormatError.

    One class has the activation saved with its CrossEncoder, by default the sigmoid, as in the stock class.
    Several have probabilities, unless the saved activation is another one: each class its own if config.json
    allows several classes of a text (`problem_type`).
    """
    config = read_config(folder / "config.json")
    labels = read_labels(config, folder / "config.json")
    named = _saved_activation(folder, config)
    if named not in (None, *ACTIVATIONS):
        known = ", ".join(ACTIVATIONS)
        raise EngineError(f"{folder}: unknown activation_fn {named!r:.100} (known: {known})")
    if len(labels) == 1:
        return ScoringRule(named or _SIGMOID, labels)
    by_problem = {"multi_label_classification": _SIGMOID, "regression": _IDENTITY}
    usual = by_problem.get(str(config.get("problem_type")), SOFTMAX)
    return ScoringRule(named if named not in (None, _IDENTITY) else usual, labels)


def _saved_activation(folder: Path, config: Mapping[str, Any]) -> Any:
    """Return the dotted name saved with a CrossEncoder; each version of the library has its own place for it."""
    saved = folder / "config_sentence_transformers.json"
    is_read = (folder / "modules.json").exists() and saved.exists()
    named = read_config(saved).get("activation_fn") if is_read else None
    inner = config.get("sentence_transformers")
    named = named or (inner.get("activation_fn") if isinstance(inner, Mapping) else None)
    return named or config.get("sbert_ce_default_activation_function")


def check_head(config: DenseConfig, where: Path) -> None:
    """Raise EngineError for a head with an unknown activation, or one that does not read a pooled text."""
    if config.activation_function not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise EngineError(f"{where}: unknown activation_function {config.activation_function!r} (known: {known})")
    if config.module_input_name != POOLED:
        raise EngineError(f"{where}: a Dense module over {config.module_input_name!r}, expected {POOLED!r}")


def _other_input(config: Mapping[str, Any]) -> str:
    """Name the input that a model needs beside the tokens of one text, "" for none."""
    if not isinstance(config.get("vocab_size"), int):
        return "has no vocabulary of its own (vocab_size)"
    return "needs a second text (is_encoder_decoder)" if config.get("is_encoder_decoder") is True else ""
