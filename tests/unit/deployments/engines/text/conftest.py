"""Tiny random CLIP and T5 encoders with real tokenizer classes, saved in stock layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.loading import load_text_encoder

CLIP_TOKENS = 10


@dataclass
class Encoder:
    """The stock module and tokenizer, and ours around the same saved weights."""

    stock: Any
    tokenizer: Any
    ours: TextEncoder
    folder: Path
    tokenizer_folder: Path


def clip_tokenizer() -> CLIPTokenizer:
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_TOKENS)


def t5_tokenizer() -> T5Tokenizer:
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -4.0)]
    scores += [(chr(code), -8.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=scores, extra_ids=0, model_max_length=512)


def clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        projection_dim=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _encoder(folder: Path, module: Any, tokenizer: Any) -> Encoder:
    module.eval().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "tokenizer")
    tensors = load_file(folder / "model" / "model.safetensors")
    class_name = type(module).__name__
    ours = load_text_encoder(folder / "model", "transformers", class_name, folder / "tokenizer", tensors)
    return Encoder(module, tokenizer, ours, folder / "model", folder / "tokenizer")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small are slower on more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    torch.manual_seed(0)
    tokenizer = clip_tokenizer()
    return _encoder(tmp_path_factory.mktemp("clip"), CLIPTextModel(clip_config(tokenizer)), tokenizer)


@pytest.fixture(scope="session")
def clip_projection(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    torch.manual_seed(1)
    tokenizer = clip_tokenizer()
    module = CLIPTextModelWithProjection(clip_config(tokenizer))
    return _encoder(tmp_path_factory.mktemp("clip_projection"), module, tokenizer)


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    torch.manual_seed(2)
    tokenizer = t5_tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return _encoder(tmp_path_factory.mktemp("t5"), T5EncoderModel(config), tokenizer)
