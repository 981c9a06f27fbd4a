"""The tokenizer of a model folder and what else the folder says about text: chat template and end tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from deployments.engines.llm.models.registry import read_json
from deployments.engines.protocol import EngineError


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The stock tokenizer of the folder; EngineError when it has none that can be read."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds; all mean that the files are not a tokenizer
        raise EngineError(f"no tokenizer could be read from {folder}: {error}") from error


def load_eos_token_ids(folder: Path, config: PretrainedConfig) -> frozenset[int]:
    """The end tokens of generation_config.json or, when it names none, of the config. May be empty."""
    path = folder / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.exists() else None
    if eos is None:
        eos = config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of a plain prompt, with the special tokens that the tokenizer adds by itself."""
    return tuple(tokenizer(text)["input_ids"])


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Token ids of a chat, up to where the assistant begins to speak.

    Raises:
        EngineError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise EngineError("the model's tokenizer has no chat template; send a plain prompt instead")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the model's author and may raise anything
        raise EngineError(f"the model's chat template refuses the messages: {error}") from error
    # The template has written the special tokens already.
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
