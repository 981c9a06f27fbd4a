"""Language models by their files: the class of a type that a config.json names, and what its template knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weights.formats.folder import read_any_json, read_json
from weights.formats.untrusted import is_size
from weights.records.errors import FormatError

CLASS_NAMES: Final = {  # of transformers
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_MAX_TEMPLATE: Final = 2**20  # bytes
_CONFIGS: Final = ("chat_template.json", "processor_config.json", "tokenizer_config.json")
_THOUGHTS: Final = ("</think>", "[THINK]", "<|channel|>analysis", "<|START_THINKING|>", "<|channel>", "</seed:think>")


def language_model_facts(folder: Path) -> Mapping[str, bool | int]:
    """Return what a language model's files say: the length that its config names, and whether its template of chats
    knows tools and reasoning. What is damaged or absent says nothing."""
    found: dict[str, bool | int] = {}
    try:
        config = read_json(folder / "config.json")
        text = config.get("text_config")
        named = (text if isinstance(text, dict) else config).get("max_position_embeddings")
        if is_size(named) and named:
            found["context_length"] = int(named)
        template = _template_of(folder)
    except FormatError:
        return found
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
