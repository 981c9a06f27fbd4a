"""A tiny Llama over bytes that writes given pieces, one token each, whatever it is asked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

BEGIN, END = "<|go|>", "<|end|>"  # what every template must end with, and what ends an answer


def save_scripted_llm(
    folder: Path,
    pieces: Sequence[str],
    template: str,
    special: Sequence[str] = (),
    others: Mapping[str, Sequence[str]] = MappingProxyType({}),
    **config: Any,
) -> Mapping[str, torch.Tensor]:
    """Save the model's folder and return its tensors. No piece may come twice; `special` ones are special tokens.

    `others` are the pieces that are written where a prompt ends with another text than BEGIN.
    """
    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    added: dict[str, int] = {}
    scripts = {BEGIN: pieces, **others}
    for piece in itertools.chain.from_iterable(scripts.values()):
        if piece in special:
            continue
        text = "".join(letters[byte] for byte in piece.encode())
        vocabulary.setdefault(text, len(vocabulary))
    for piece in (*special, *scripts, END):
        added[piece] = len(vocabulary) + len(added)

    def id_of(piece: str) -> int:
        return added[piece] if piece in added else vocabulary["".join(letters[byte] for byte in piece.encode())]

    _save_tokenizer(folder, vocabulary, added, template)
    size = len(vocabulary) + len(added)
    chains = [[added[begin], *map(id_of, written)] for begin, written in scripts.items()]
    assert len({*itertools.chain(*chains)}) == sum(map(len, chains)), "a piece comes twice"
    next_ = {one: other for chain in chains for one, other in itertools.pairwise([*chain, added[END]])}
    model = _chain_model(size, next_, added[END], config)
    model.save_pretrained(folder)
    return dict(model.state_dict())


def _save_tokenizer(folder: Path, vocabulary: Mapping[str, int], added: Mapping[str, int], template: str) -> None:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": id_, "content": text, **plain} for text, id_ in added.items()],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text(template)


def _chain_model(size: int, next_: Mapping[int, int], end: int, config: Mapping[str, Any]) -> LlamaForCausalLM:
    """Return a model whose likeliest token depends on the last one alone."""
    hidden = -(-size // 64) * 64
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    ends = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    given = {"max_position_embeddings": 4096, "tie_word_embeddings": False, **sizes, **ends, **config}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=size, hidden_size=hidden, intermediate_size=64, **given)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[torch.arange(size), torch.arange(size)] = 1.0
        for token in range(size):
            model.lm_head.weight[next_.get(token, end), token] = 1.0
    return model
