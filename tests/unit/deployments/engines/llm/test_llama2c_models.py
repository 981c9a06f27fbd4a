"""llama2.c's int8 files (version 2), written as its export.py does, against transformers on the dequantized weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.nn.packed_linear import PackedEmbedding, PackedLinear
from deployments.engines.records.protocol import EngineError
from weights.formats.kuiper import read_kuiper
from weights.loading.loader import load_model
from weights.loading.provider import LocalExtents
from weights.operations.externalize import externalize
from weights.operations.layouts import write_inline
from weights.records.errors import FormatError
from weights.storage.store import WeightStore

DIM, HEADS, KV_HEADS, LAYERS, HIDDEN, VOCABULARY = 96, 4, 2, 2, 160, 64
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj")


def stock_model(folder: Path, *, tied: bool) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    stock = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in stock.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return stock


def rows_in_pairs(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """As llama2.c has rows of q and k (the inverse of export.py's `permute_reverse`, which reads Hugging Face's)."""
    return weight.reshape(num_heads, 2, -1, DIM).swapaxes(1, 2).reshape(weight.shape)


def write_llama2c(file: Path, stock: Any, *, tied: bool) -> None:
    """Write a file as `version2_export` does, and put the values that it keeps into `stock`."""
    group = 64
    while DIM % group:
        group //= 2
    state = stock.state_dict()
    raw = struct.pack("<Ii", 0x616B3432, 2)
    raw += struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY, 64)
    raw += struct.pack("<B", tied) + struct.pack("<i", group)
    raw += bytes(256 - len(raw))
    for kind in ("input_layernorm", "post_attention_layernorm"):
        raw += b"".join(state[f"model.layers.{layer}.{kind}.weight"].numpy().tobytes() for layer in range(LAYERS))
    raw += state["model.norm.weight"].numpy().tobytes()
    places = ("self_attn", "self_attn", "self_attn", "self_attn", "mlp", "mlp", "mlp")
    layers = [f"model.layers.{i}.{p}.{m}" for p, m in zip(places, MATRICES, strict=True) for i in range(LAYERS)]
    for name in ["model.embed_tokens", *layers, *([] if tied else ["lm_head"])]:
        values = state[f"{name}.weight"].numpy()
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.rpartition(".")[2])
        groups = (rows_in_pairs(values, heads) if heads else values).reshape(-1, group)
        scales = np.abs(groups).max(1) / np.float32(127)
        quantized = np.round(groups / scales[:, None]).astype(np.int8)
        raw += quantized.tobytes() + scales.astype(np.float32).tobytes()
        kept = (quantized * scales[:, None]).reshape(values.shape)
        if heads:
            kept = kept.reshape(heads, -1, 2, DIM).swapaxes(1, 2).reshape(values.shape)
        state[f"{name}.weight"].copy_(torch.from_numpy(kept))
    file.write_bytes(raw)


def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, tied: bool) -> None:
    folder = tmp_path / "model"
    stock = stock_model(folder, tied=tied)
    write_llama2c(folder / "model.bin", stock, tied=tied)
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "tiny", folder)
    tensors = load_model(manifest, LocalExtents(store.packs))["model"]
    ids = torch.randint(0, VOCABULARY, (20,))
    expected = stock(ids[None]).logits[0]
    for arithmetic, limit in {"exact": 1e-4, "fast": 0.04}.items():
        config = load_config(store.skeleton(manifest))
        model = create_model(config, tensors, torch.device("cpu"), arithmetic=arithmetic)  # type: ignore[arg-type]
        hidden = model.module(ids, model.rotary.angles(torch.arange(20), model.dtype), attend)
        got = model.module.logits(hidden).float()
        assert float((got - expected).norm() / expected.norm()) < limit  # the largest one alone scatters
        packed = [part.packed for part in model.module.modules() if isinstance(part, PackedLinear | PackedEmbedding)]
        given = {tensor.data_ptr() for tensor in tensors.values()}
        assert len(packed) == 7 * LAYERS + 2
        assert all(weight.data.data_ptr() in given for weight in packed)
    write_inline(store, "tiny", tmp_path / "back")
    assert (tmp_path / "back" / "model.bin").read_bytes() == (folder / "model.bin").read_bytes()


@pytest.mark.parametrize(
    ("at", "raw", "words"),
    [
        (4, struct.pack("<i", 1), "version 1 of llama2.c; known is 2"),
        (36, b"\2", "shared flag 2"),
        (28, struct.pack("<i", -VOCABULARY), f"vocabulary -{VOCABULARY}"),
        (100, b"x", "zeros behind"),
        (37, struct.pack("<i", 0), "expected positive sizes"),
        (16, struct.pack("<i", 3), "take .* bytes, the file has"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, at: int, raw: bytes, words: str) -> None:
    file = tmp_path / "model.bin"
    write_llama2c(file, stock_model(tmp_path, tied=True), tied=True)
    whole = file.read_bytes()
    for length in (4, 41, 255, 256, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"model\.bin: not a llama2\.c file of version 2"):
            read_kuiper(file)
    file.write_bytes(whole[:at] + raw + whole[at + len(raw) :])
    with pytest.raises(FormatError, match=words):
        read_kuiper(file)


def test_a_config_of_another_family_is_refused(tmp_path: Path) -> None:
    write_llama2c(tmp_path / "model.bin", stock_model(tmp_path, tied=True), tied=True)
    content = json.loads((tmp_path / "config.json").read_text())
    changed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(content | changed))
    with pytest.raises(EngineError, match=r"'mistral', a llama2\.c file holds llama"):
        load_config(tmp_path)
