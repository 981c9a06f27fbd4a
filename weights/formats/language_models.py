"""Language models by their files: the class of a type that a config.json names, and what its template knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from weights.formats.folder import read_any_json, read_json
from weights.formats.gguf import read_gguf_header
from weights.formats.untrusted import is_size
from weights.records.errors import FormatError

_T = TypeVar("_T")
CLASS_NAMES: Final = {  # of transformers
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Of encoders whose config names no class: what gives token vectors.
ENCODER_NAMES: Final = {
    "albert": "AlbertModel",
    "bert": "BertModel",
    "camembert": "CamembertModel",
    "deberta": "DebertaModel",
    "deberta-v2": "DebertaV2Model",
    "distilbert": "DistilBertModel",
    "electra": "ElectraModel",
    "modernbert": "ModernBertModel",
    "mpnet": "MPNetModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
}
_HEADED: Final = re.compile("(.+)For(MaskedLM|PreTraining)")
_MAX_TEMPLATE: Final = 2**20  # bytes
_CONFIGS: Final = ("chat_template.json", "processor_config.json", "tokenizer_config.json")
_THOUGHTS: Final = (
    *("</think>", "[THINK]", "<|channel|>analysis", "<|START_THINKING|>", "<|channel>", "seed:think>", "mm:think>"),
    *("<|open|>think", "my thought process:"),
)


def named_class(config: Mapping[str, Any]) -> Any:
    """Return the class that a config names first; without one, that of its type of model, None for an unknown type."""
    kind = str(config.get("model_type"))
    named = config.get("architectures") or [CLASS_NAMES.get(kind, ENCODER_NAMES.get(kind))]
    return named[0] if isinstance(named, list) else named


def body_of(class_name: str, tensors: Mapping[str, _T]) -> tuple[str, Mapping[str, _T]]:
    """Return class and tensors of an encoder without the head that it was trained with to guess words.

    Its body is the part that has embeddings; what has none stays as it is. So do classes without such a head.
    """
    headed = _HEADED.fullmatch(class_name)
    if not headed and class_name not in ENCODER_NAMES.values():
        return class_name, tensors
    bodies = {name.split(".")[0] for name in tensors if ".embeddings." in f".{name}" and name[:11] != "embeddings."}
    if len(bodies) != 1:
        return class_name, tensors
    body = f"{bodies.pop()}."
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(body)}
    return f"{headed[1]}Model" if headed else class_name, own


def language_model_facts(folder: Path) -> Mapping[str, bool | int]:
    """Return facts of a language model's files: the length that its config names, and whether its template of chats
    knows tools and reasoning. Damaged or absent files give no facts."""
    try:
        length, template = _said_by_gguf(folder) or _said_by_configs(folder)
    except FormatError:
        return {}
    found: dict[str, bool | int] = {}
    if isinstance(length, int) and is_size(length) and length:
        found["context_length"] = length
    if template:
        found["knows_tools"] = re.search(r"\btools\b", template) is not None
        found["thinks"] = any(mark in template for mark in _THOUGHTS)
    return found


def _said_by_gguf(folder: Path) -> tuple[Any, str] | None:
    """Return the length of the context and the template of a GGUF model as the store keeps it; None for another."""
    if not (headers := sorted(folder.glob("*.gguf.header"))):
        return None
    metadata = read_gguf_header(headers[0]).metadata
    template = metadata.get("tokenizer.chat_template")
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return length, template if isinstance(template, str) else ""


def _said_by_configs(folder: Path) -> tuple[Any, str]:
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    length = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    try:
        return length, _template_of(folder)
    except FormatError:  # its length is known all the same
        return length, ""


def _template_of(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        with path.open("rb") as file:
            return file.read(_MAX_TEMPLATE).decode(errors="replace")
    for name in _CONFIGS:
        given = read_any_json(folder / name) if (folder / name).is_file() else None
        template: Any = given.get("chat_template") if isinstance(given, dict) else None
        if isinstance(template, list):  # several, by their names
            template = "\n".join(str(one.get("template")) for one in template if isinstance(one, dict))
        if isinstance(template, str):
            return template
    return ""
