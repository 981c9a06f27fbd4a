"""A folder in a stock layout and its tensors -> a text encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from deployments.engines.build import IMPORT_LOCK, build_module
from deployments.engines.config_files import read_config
from deployments.engines.embedding_rules import read_prompts
from deployments.engines.native.library import load_kernels
from deployments.engines.protocol import EngineError
from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.forwards import FAMILIES
from deployments.engines.text.known import encoder_class, read_scoring_rule
from deployments.engines.text.sentence_layers import load_pooling
from deployments.engines.tokenizer_files import check_tokenizer, check_tokenizer_files
from weights.formats.classifier import SUFFIX

OPTIONAL_PARTS = ("pooler",)  # of a BERT: not every checkpoint has one, and no embedding needs it


def load_text_encoder(
    folder: Path,
    library: str,
    class_name: str | None,
    tokenizer_folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    build: Callable[..., nn.Module] = build_module,
    tokenizer: Any = None,
) -> TextEncoder:
    """Return the encoder of `folder` around `tensors` (not copied). `build` makes the module as `build_module`.

    `tokenizer` is that of `tokenizer_folder`, if it was loaded before; it then belongs to this encoder alone.

    Reads the sentence-transformers files if there are any: what pools a BERT, and what makes a T5 give embeddings
    beside its token vectors. Raises EngineError naming the folder.
    """
    class_name = encoder_class(folder, class_name)
    module = build(library, class_name, folder, tensors, optional_parts=OPTIONAL_PARTS)
    load_kernels()  # compiled now, where need be, and not while the first text waits
    tokenizer = tokenizer or load_tokenizer(tokenizer_folder)
    family = FAMILIES.get(class_name)
    if family and (family.is_clip or not (folder / "modules.json").exists()):
        return TextEncoder(module, tokenizer)
    sentence_config = folder / "sentence_bert_config.json"
    max_tokens = read_config(sentence_config).get("max_seq_length") if sentence_config.exists() else None
    if class_name.endswith(SUFFIX):
        return TextEncoder(module, tokenizer, max_tokens=max_tokens, scoring=read_scoring_rule(folder))
    return TextEncoder(
        module, tokenizer, max_tokens=max_tokens, pooling=load_pooling(folder), prompts=read_prompts(folder)
    )


def load_tokenizer(folder: Path) -> Any:
    """Load the Hugging Face tokenizer of `folder`. Raises EngineError."""
    check_tokenizer_files(folder)
    try:
        with IMPORT_LOCK:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many kinds, by tokenizer class
        check_tokenizer(folder)
        raise EngineError(f"{folder}: no tokenizer can be loaded: {error}") from error
