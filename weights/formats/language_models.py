"""Language models by their files: the class of a type that a config.json names, what its template knows, its sizes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard, TypeVar

from weights.formats.folder import read_any_json, read_json
from weights.formats.gguf import read_gguf_header
from weights.formats.untrusted import is_size
from weights.records.dtypes import BLOCK_SIZES
from weights.records.errors import FormatError
from weights.records.manifest import Manifest

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
# Sizes by their names in GGUF files, and in configs.
_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size", "n_embd", "d_model", "dim"),
    "block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "vocab_size": ("vocab_size",),
}
_MAX_TEXT: Final = 256  # characters of a text among them
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


@dataclass(frozen=True, slots=True)
class LanguageModelDetails:
    """The words of a language model's files about it, "" and 0 where they have none.

    `sizes` are the GGUF keys of the architecture and of `general`, without long texts; of configs, the keys that
    configs have, too. `num_parameters` is 0 if values are packed into integers;
    `quantization` is the type of most bytes.
    """

    architecture: str = ""
    template: str = ""
    format: str = ""
    quantization: str = ""
    num_parameters: int = 0
    sizes: Mapping[str, bool | int | float | str] = field(default_factory=dict)


def language_model_details(manifest: Manifest, folder: Path) -> LanguageModelDetails:
    """Return the details of a model, whose `folder` has all its files but the weights. Damaged ones say nothing."""
    tensors = {
        tensor.sha256: tensor for component in manifest.components.values() for tensor in component.tensors.values()
    }
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) > 1]
    nbytes = Counter[str]()
    for tensor in matrices:
        nbytes[tensor.dtype] += tensor.nbytes
    is_packed = any(name not in BLOCK_SIZES and not name.startswith(("F", "BF")) for name in nbytes)
    try:
        architecture, sizes, template = _said_by_files(folder)
    except FormatError:
        architecture, sizes, template = "", {}, ""
    return LanguageModelDetails(
        architecture,
        template[:_MAX_TEMPLATE],
        next((component.format for component in manifest.components.values()), ""),
        "" if is_packed or not nbytes else nbytes.most_common(1)[0][0],
        0 if is_packed else sum(math.prod(tensor.shape) for tensor in tensors.values()),
        sizes,
    )


def _read_gguf(folder: Path) -> tuple[Mapping[str, Any], str] | None:
    """Return the metadata of a GGUF model as the store keeps it, and its template of chats; None for another model."""
    if not (headers := sorted(folder.glob("*.gguf.header"))):
        return None
    metadata = read_gguf_header(headers[0]).metadata
    template = metadata.get("tokenizer.chat_template")
    return metadata, template if isinstance(template, str) else ""


def _read_configs(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """Return a model's config, its part about texts, and the template of chats, "" where that is damaged."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    try:
        template = _template_of(folder)
    except FormatError:  # the config is known all the same
        template = ""
    return config, text if isinstance(text, dict) else config, template


def _said_by_files(folder: Path) -> tuple[str, dict[str, bool | int | float | str], str]:
    """Return the architecture, the sizes by their GGUF keys, and the template of chats."""
    sizes: dict[str, bool | int | float | str] = {}
    if gguf := _read_gguf(folder):
        metadata, template = gguf
        architecture = str(metadata.get("general.architecture") or "")[:_MAX_TEXT]
        own = (f"{architecture}.", "general.")
        sizes |= {name: value for name, value in metadata.items() if name.startswith(own) and _is_plain(value)}
        return architecture, sizes, template
    config, about_texts, template = _read_configs(folder)
    kind = config.get("model_type")
    architecture = kind[:_MAX_TEXT] if isinstance(kind, str) else ""
    for name, known in _SIZES.items():
        found = next((about_texts[key] for key in known if key in about_texts), None)
        if is_size(found) and isinstance(found, int) and found:
            sizes[f"{architecture}.{name}"] = found
    return architecture, sizes, template


def _is_plain(value: Any) -> TypeGuard[bool | int | float | str]:
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def language_model_facts(folder: Path) -> Mapping[str, bool | int]:
    """Return facts of a language model's files: the length that its config names, and whether its template of chats
    knows tools and reasoning. Damaged or absent files give no facts."""
    try:
        if gguf := _read_gguf(folder):
            metadata, template = gguf
            length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
        else:
            _, about_texts, template = _read_configs(folder)
            length = about_texts.get("max_position_embeddings")
    except FormatError:
        return {}
    found: dict[str, bool | int] = {}
    if isinstance(length, int) and is_size(length) and length:
        found["context_length"] = length
    if template:
        found["knows_tools"] = re.search(r"\btools\b", template) is not None
        found["thinks"] = any(mark in template for mark in _THOUGHTS)
    return found


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
