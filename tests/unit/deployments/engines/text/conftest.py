"""Tiny random CLIP and T5 encoders with real tokenizer classes, saved in stock layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.tiny.parts import clip_config, clip_tokenizer, t5_tokenizer
from safetensors.torch import load_file
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from deployments.engines.text.encoder import TextEncoder, load_text_encoder

CLIP_TOKENS = 10


@dataclass
class Encoder:
    """The stock module and tokenizer, and ours around the same saved weights."""

    stock: Any
    tokenizer: Any
    ours: TextEncoder
    folder: Path
    tokenizer_folder: Path


def _encoder(folder: Path, module: Any, tokenizer: Any) -> Encoder:
    module.eval().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "tokenizer")
    tensors = load_file(folder / "model" / "model.safetensors")
    class_name = type(module).__name__
    ours = load_text_encoder(folder / "model", "transformers", class_name, folder / "tokenizer", tensors)
    return Encoder(module, tokenizer, ours, folder / "model", folder / "tokenizer")


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    torch.manual_seed(0)
    tokenizer = clip_tokenizer(CLIP_TOKENS)
    return _encoder(tmp_path_factory.mktemp("clip"), CLIPTextModel(clip_config(tokenizer, 8, 6)), tokenizer)


@pytest.fixture(scope="session")
def clip_projection(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    torch.manual_seed(1)
    tokenizer = clip_tokenizer(CLIP_TOKENS)
    module = CLIPTextModelWithProjection(clip_config(tokenizer, 8, 6))
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
