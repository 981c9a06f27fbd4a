"""Kuiper int8 models against transformers on the dequantized weights, where the original exporter or loader fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.nn.packed_linear import PackedLinear
from deployments.engines.records.protocol import EngineError
from infra.offline.checkpoints import quantize_checkpoint
from weights.loading.loader import load_model
from weights.loading.provider import LocalExtents
from weights.loading.stage_transforms import dequantize_int8, quantize_int8
from weights.operations.externalize import externalize
from weights.operations.layouts import write_inline
from weights.records.errors import FormatError, WeightsError
from weights.storage.store import WeightStore

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def stock_model(folder: Path, family: str, **overrides: Any) -> Any:
    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[
        family
    ]
    settings = {
        "vocab_size": 64,
        "hidden_size": 96,  # in % 64 != 0: groups cross rows
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-4,
        "initializer_range": 0.1,
    } | overrides
    stock = model_class(config_class(**settings)).eval().requires_grad_(False)
    for parameter in stock.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    stock.model.layers[0].mlp.up_proj.weight[:4] = 0  # groups of zeros
    stock.save_pretrained(folder)
    return stock


def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def through_the_store(tmp_path: Path, folder: Path) -> tuple[WeightStore, Path, dict[str, torch.Tensor]]:
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "tiny", folder)
    return store, store.skeleton(manifest), load_model(manifest, LocalExtents(store.packs))["model"]


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, family: str, tied: bool) -> None:
    stock = stock_model(tmp_path / "hf", family, tie_word_embeddings=tied)
    report = quantize_checkpoint(tmp_path / "hf", tmp_path / "kuiper", "kuiper-int8")
    store, skeleton, tensors = through_the_store(tmp_path, tmp_path / "kuiper")
    state = stock.state_dict()
    for name, parameter in state.items():
        if any(f"{matrix}.weight" in name for matrix in MATRICES) and not (tied and "lm_head" in name):
            parameter.copy_(torch.from_numpy(dequantize_int8(*quantize_int8(parameter.numpy()))))
    ids = torch.randint(0, 64, (20,))
    expected = stock(ids[None]).logits[0]
    for arithmetic, limit in {"exact": 1e-4, "fast": 0.05}.items():
        config = load_config(skeleton)
        model = create_model(config, tensors, torch.device("cpu"), arithmetic=arithmetic)  # type: ignore[arg-type]
        hidden = model.module(ids, model.rotary.angles(torch.arange(20), model.dtype), attend)
        got = model.module.logits(hidden).float()
        # Of all logits: the worst one of drawn weights is over any limit now and then.
        assert float((got - expected).norm() / expected.norm()) < limit
        packed = [part.packed for part in model.module.modules() if isinstance(part, PackedLinear)]
        given = {tensor.data_ptr() for tensor in tensors.values()}
        assert all(weight.data.data_ptr() in given for weight in packed)
    assert {row.bits_per_weight for row in report.tensors if row.kind == "I8"} == {8.5}
    assert max(row.rms_error for row in report.tensors) < 0.01
    write_inline(store, "tiny", tmp_path / "back")
    assert (tmp_path / "back" / "model.bin").read_bytes() == (tmp_path / "kuiper" / "model.bin").read_bytes()


def test_1024_floats_become_1024_bytes_and_64_of_scales() -> None:
    values, scales = quantize_int8(seeded_rng().standard_normal((16, 64), dtype=np.float32))
    assert (values.nbytes, scales.nbytes) == (1024, 64)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "qwen3", "model_type 'qwen3'; a Kuiper file holds llama, qwen2"),
        ("head_dim", 48, "head_dim 48"),
        ("attention_bias", True, "biases only"),
        ("hidden_size", "wide", "hidden_size is 'wide', expected a positive integer"),
        ("num_hidden_layers", 3, "model.layers.2.self_attn.q_proj.weight is missing"),
    ],
)
def test_what_the_format_cannot_hold_is_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    stock_model(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(FormatError, match=message):
        quantize_checkpoint(tmp_path / "hf", tmp_path / "kuiper", "kuiper-int8")
    assert not (tmp_path / "kuiper").exists()


def test_infinities_are_refused_by_name(tmp_path: Path) -> None:
    stock = stock_model(tmp_path / "hf", "llama")
    stock.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    stock.save_pretrained(tmp_path / "hf")
    with pytest.raises(WeightsError, match=r"layers\.1\.w2\.weight: int8 cannot express"):
        quantize_checkpoint(tmp_path / "hf", tmp_path / "kuiper", "kuiper-int8")


def test_damaged_files_never_end_in_a_traceback(tmp_path: Path) -> None:
    """Every cut and a few hundred flipped bytes of the header: refused, or a model of the same bytes."""
    stock_model(tmp_path / "hf", "qwen2")
    quantize_checkpoint(tmp_path / "hf", tmp_path / "kuiper", "kuiper-int8")
    file = tmp_path / "kuiper" / "model.bin"
    whole = file.read_bytes()
    draw = seeded_rng()
    for _ in range(200):
        raw = bytearray(whole)
        if draw.random() < 0.5:
            del raw[int(draw.integers(0, len(raw))) :]
        else:
            raw[int(draw.integers(0, 32))] = int(draw.integers(0, 256))
        if bytes(raw) == whole:
            continue
        file.write_bytes(raw)
        with pytest.raises(EngineError, match=r"model\.bin|config\.json says|Kuiper"):
            load_config(tmp_path / "kuiper")
