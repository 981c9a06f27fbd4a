"""GGUF models against transformers in float32 on what gguf-py makes of the same packed tensors."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deployments.engines.llm.loras import DecoderLoras
from deployments.engines.llm.models.gguf_config import gguf_config
from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.llm.tokenizer import load_generation_defaults
from deployments.engines.nn.lora import AdaptedRows, RowAdapter
from deployments.engines.nn.packed_linear import PackedLinear
from deployments.engines.records.protocol import EngineError, TextLora
from weights.formats.gguf import read_gguf
from weights.loading.loader import load_model
from weights.loading.provider import LocalExtents
from weights.operations.adapters import LoraAdapter, LoraPair
from weights.operations.externalize import externalize
from weights.records.dtypes import BLOCK_SIZES
from weights.storage.store import WeightStore

KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
KINDS["qwen3"] = (Qwen3Config, Qwen3ForCausalLM)
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TYPES += ("IQ4_NL", "IQ4_XS", "MXFP4")
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "IQ4_XS": (0,), "IQ4_NL": (0,)}  # where scales stand
LARGEST = {"Q6_K": 2e-5, "IQ4_XS": 2e-5, "IQ4_NL": 4e-4, "Q3_K": 4e-4, "Q2_K": 2e-3}
VOCABULARY = 96
Array = np.ndarray[Any, Any]


def pack(matrix: Array, kind: str, draw: np.random.Generator) -> tuple[Array, Array]:
    """Packed bytes near `matrix`, and their values by gguf-py. K types are drawn: gguf-py cannot write them."""
    type_ = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K") or kind.startswith("IQ4"):
        elements, nbytes = BLOCK_SIZES[kind]
        blocks = draw.integers(0, 256, (matrix.shape[0], matrix.shape[1] // elements, nbytes), dtype=np.uint8)
        for at in HALVES.get(kind, (0, 2)):
            largest = LARGEST.get(kind, 4e-4)
            blocks[..., at : at + 2] = (
                draw.uniform(0, largest, (*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
            )
        packed = blocks.reshape(len(matrix), -1)
    else:
        packed = gguf.quants.quantize(matrix, type_)
    return packed, gguf.quants.dequantize(packed, type_)


def permuted(rows: Array, num_heads: int) -> Array:
    """As convert_hf_to_gguf.py has q and k of Llama."""
    return (
        rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def unpermuted(rows: Array, num_heads: int) -> Array:
    return (
        rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def write_model(
    file: Path, family: str, kind: str, *, scaling: dict[str, Any] | None = None, tied: bool = False, **overrides: Any
) -> PreTrainedModel:
    """Write a random model as `kind`; returns the stock model with the same values."""
    config_class, model_class = KINDS[family]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_theta": 10000.0, **(scaling or {"rope_type": "default"})},
    } | overrides
    config = config_class(**settings)
    stock = model_class(config).eval().requires_grad_(False).float()
    for parameter in stock.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    writer = gguf.GGUFWriter(file, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    add_scaling(writer, config, stock)
    draw = seeded_rng()
    state = stock.state_dict()
    for name, stored in stored_names(config.num_hidden_layers).items():
        if name not in state or (tied and name == "lm_head.weight"):
            continue
        values = state[name].numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stored.split(".")[-2])
        if family == "llama" and heads:
            values = permuted(values, heads)
        if values.ndim == 1:
            writer.add_tensor(stored, np.ascontiguousarray(values))
            continue
        packed, values = pack(np.ascontiguousarray(values), kind, draw)
        writer.add_tensor(stored, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        if family == "llama" and heads:
            values = unpermuted(values, heads)
        state[name].copy_(torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stock


def add_scaling(writer: gguf.GGUFWriter, config: Any, stock: PreTrainedModel) -> None:
    rope = config.rope_parameters
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        plain = 1 / 10000.0 ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / stock.model.rotary_emb.inv_freq).numpy().astype(np.float32))


def stored_names(num_layers: int) -> dict[str, str]:
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    for layer in range(num_layers):
        for stored, name in LAYER.items():
            for leaf in ("weight", "bias"):
                names[f"model.layers.{layer}.{name}.{leaf}"] = f"blk.{layer}.{stored}.{leaf}"
    return names


def stored_tensors(tmp_path: Path, file: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Through the store, as a replica has them: its skeleton folder, and views of its extents."""
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "tiny", file)
    return store.skeleton(manifest), load_model(manifest, LocalExtents(store.packs))["model"]


def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence from its beginning."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@torch.inference_mode()
def logits(folder: Path, tensors: dict[str, torch.Tensor], ids: torch.Tensor, arithmetic: str) -> torch.Tensor:
    model = create_model(load_config(folder), tensors, torch.device("cpu"), arithmetic=arithmetic)  # type: ignore[arg-type]
    hidden = model.module(ids, model.rotary.angles(torch.arange(len(ids)), model.dtype), attend)
    return model.module.logits(hidden).float()


def check(tmp_path: Path, stock: PreTrainedModel, file: Path) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (24,))
    folder, tensors = stored_tensors(tmp_path, file)
    expected = stock(ids[None]).logits[0].detach()
    got = logits(folder, tensors, ids, "exact")
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-4
    for arithmetic in ("fast", "deterministic"):
        near = logits(folder, tensors, ids, arithmetic)
        assert float((near - expected).norm() / expected.norm()) < 0.05
    return tensors


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_has_the_logits_of_its_dequantized_weights(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "tiny.gguf"
    check(tmp_path, write_model(file, "llama", kind), file)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(tmp_path: Path, family: str) -> None:
    file = tmp_path / "tiny.gguf"
    check(tmp_path, write_model(file, family, "Q8_0"), file)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "yarn", "llama3"],
)
def test_rope_scaling(tmp_path: Path, scaling: dict[str, Any]) -> None:
    file = tmp_path / "tiny.gguf"
    check(tmp_path, write_model(file, "llama", "Q8_0", scaling=scaling), file)


def rope_of(tmp_path: Path, keys: dict[str, Any]) -> Any:
    """Return the rotary of a file with these keys."""
    file = tmp_path / "tiny.gguf"
    if not file.exists():
        write_model(file, "llama", "F32")
    header = read_gguf(file)
    metadata = dict(header.metadata) | {f"llama.rope.{key}": value for key, value in keys.items()}
    tensors = {name: torch.from_numpy(np.array(t.data)) for name, t in tensors_of(file).items()}
    return create_model(gguf_config([replace(header, metadata=metadata)]), tensors, torch.device("cpu")).rotary


def tensors_of(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def llama_cpp_rope(
    *, factor: float, mix: float, original: int = 128, fast: float = 32, slow: float = 1, log_multiplier: float = 0
) -> tuple[Array, float]:
    """Frequencies of 64 dimensions and the magnitude, as ggml_rope_ext and llama_context compute them."""
    base = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    at = [64 * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(10000.0)) for beta in (fast, slow)]
    low, high = max(0, math.floor(at[0])), min(63, math.ceil(at[1]))
    ramp = 1 - np.clip((np.arange(32) - low) / max(0.001, high - low), 0, 1)
    share = ramp * mix
    magnitude = (1 + 0.1 * math.log(factor)) / (1 + 0.1 * log_multiplier * math.log(factor)) if mix else 1.0
    return base / factor * (1 - share) + base * share, magnitude


YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}


@pytest.mark.parametrize(
    ("keys", "expected", "times"),
    [
        ({"scaling.factor": 4.0}, {"factor": 4.0, "mix": 0}, 1.0),
        ({"scale_linear": 2.0}, {"factor": 2.0, "mix": 0}, 1.0),
        ({"scale_linear": 2.0, "scaling.factor": 4.0}, {"factor": 4.0, "mix": 0}, 1.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"factor": 1.0, "mix": 0}, 1.0),
        ({"scaling.factor": 0.0}, {"factor": 1.0, "mix": 0}, 1.0),
        ({"scaling.factor": 4.0, "scaling.attn_factor": 0.5}, {"factor": 4.0, "mix": 0}, 0.5),
        (YARN, {"factor": 4.0, "mix": 1, "original": 32}, 1.0),
        (YARN | {"scaling.attn_factor": 0.7}, {"factor": 4.0, "mix": 1, "original": 32}, 0.7),
        (YARN | {"scaling.yarn_attn_factor": 1.5}, {"factor": 4.0, "mix": 1, "original": 32}, 1.5),
        (YARN | {"scaling.yarn_beta_fast": 8.0}, {"factor": 4.0, "mix": 1, "original": 32, "fast": 8.0}, 1.0),
        (YARN | {"scaling.yarn_beta_slow": 0.25}, {"factor": 4.0, "mix": 1, "original": 32, "slow": 0.25}, 1.0),
        (
            YARN | {"scaling.yarn_log_multiplier": 0.7},
            {"factor": 4.0, "mix": 1, "original": 32, "log_multiplier": 0.7},
            1,
        ),
        (YARN | {"scaling.yarn_ext_factor": 0.0}, {"factor": 4.0, "mix": 0}, 1.0),
        ({"scaling.factor": 4.0, "scaling.yarn_ext_factor": 1.0}, {"factor": 4.0, "mix": 1}, 1.0),
    ],
)
def test_every_key_of_rope_is_honoured(
    tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Any], expected: dict[str, Any], times: float
) -> None:
    rotary = rope_of(tmp_path_factory.getbasetemp(), keys)
    frequencies, magnitude = llama_cpp_rope(**expected)
    np.testing.assert_allclose(rotary.inverse_frequencies.numpy(), frequencies, rtol=1e-5)
    assert rotary.magnitude == pytest.approx(magnitude * times, rel=1e-6)


def test_keys_with_values_that_change_nothing_are_passed_over(tmp_path: Path) -> None:
    neutral = {"attention.causal": True, "logit_scale": 1.0, "expert_used_count": 0, "final_logit_softcapping": 0.0}
    write_model(tmp_path / "tiny.gguf", "llama", "F32")
    header = read_gguf(tmp_path / "tiny.gguf")
    metadata = dict(header.metadata) | {f"llama.{key}": value for key, value in neutral.items()}
    assert gguf_config([replace(header, metadata=metadata | {"other.logit_scale": 2.0})])


def test_a_tied_output_and_heads_of_a_size_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    stock = write_model(file, "qwen3", "Q4_1", tied=True, head_dim=32, num_attention_heads=6)
    tensors = check(tmp_path, stock, file)
    model = create_model(load_config(file.parent), tensors, torch.device("cpu"))
    assert isinstance(model.module.lm_head, PackedLinear)
    # Nothing packed was copied: the layers hold the memory of the store's extents.
    given = {tensor.data_ptr() for tensor in tensors.values()}
    packed = [module.packed for module in model.module.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 15
    assert all(weight.data.data_ptr() in given for weight in packed)


def test_a_sliding_window_of_unknown_layers_bounds_the_length(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_model(file, "qwen2", "Q8_0")
    patched = with_key(file, "qwen2.attention.sliding_window", 48)
    assert load_config(patched).max_position_embeddings == 48


def test_what_a_file_says_of_sampling_is_its_default(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_model(file, "llama", "Q8_0")
    folder = with_key(with_key(file, "general.sampling.temp", 0.5) / "tiny.gguf", "general.sampling.top_k", -1)
    assert load_generation_defaults(folder) == {"temperature": 0.5, "top_k": 0}
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9}')
    assert load_generation_defaults(folder) == {"temperature": 0.7, "top_k": 0, "top_p": 0.9}


def with_key(file: Path, key: str, value: float | str) -> Path:
    """The folder of a copy of `file` with one more key, or another value."""
    folder = file.parent / f"with-{key.split('.')[-1]}"
    folder.mkdir()
    reader = gguf.GGUFReader(file)
    raw = file.read_bytes()
    at = struct.unpack_from("<Q", raw, 16)[0]
    kept = [field for name, field in reader.fields.items() if name != key and not name.startswith("GGUF.")]
    body = b"".join(b"".join(part.tobytes() for part in field.parts) for field in kept)
    name = key.encode()
    body += struct.pack("<Q", len(name)) + name
    if isinstance(value, int):
        body += struct.pack("<Ii", 5, value)
    elif isinstance(value, float):
        body += struct.pack("<If", 6, value)
    else:
        body += struct.pack("<IQ", 8, len(value)) + value.encode()
    infos = b"".join(b"".join(part.tobytes() for part in tensor.field.parts) for tensor in reader.tensors)
    count = len(kept) + 1
    header = raw[:16] + struct.pack("<Q", count) + body + infos
    header += bytes(-len(header) % 32)
    assert at
    (folder / "tiny.gguf").write_bytes(header + raw[reader.data_offset :])
    return folder


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "mamba", r"architecture 'mamba' is not supported; supported are llama, qwen2, qwen3"),
        ("llama.rope.scaling.type", "longrope", "rope scaling 'longrope' is not supported; supported are none, linear"),
        ("llama.attention.head_count", 0, "head_count is 0, expected an integer from 1"),
        ("llama.block_count", 5000, "block_count is 5000, expected"),
        ("llama.expert_count", 8, "expert_used_count is None, expected an integer from 1"),
        ("llama.expert_count", 10**6, "expert_count is 1000000, expected an integer from 0 to 1024"),
        ("llama.attention.value_length", 32, "heads of different sizes"),
        ("llama.embedding_length", 512, "has shape .* expected"),
        ("llama.block_count", 3, "'blk.2.attn_q.weight' is missing, block_count is 3"),
        ("llama.rope.scaling.yarn_ext_factor", 0.5, "yarn_ext_factor is 0.5; supported are 0 and 1"),
        ("llama.rope.scaling.alpha", 1000.0, r"rope.scaling.alpha is 1000.0, expected 0: nothing else is supported"),
        ("llama.logit_scale", 0.0625, "llama.logit_scale is 0.0625, expected 0 or 1: nothing else is supported"),
        ("llama.final_logit_softcapping", 30.0, "llama.final_logit_softcapping is 30.0, expected 0"),
        ("llama.attention.temperature_scale", 0.1, r"llama.attention.temperature_scale \(0.1.*\) is not supported"),
        ("llama.embedding_length_out", 64, "embedding_length_out differs"),
        ("llama.attention.key_length", 2**20, "key_length is 1048576, expected an integer from 1 to 65536"),
    ],
)
def test_what_cannot_run_is_named(tmp_path: Path, key: str, value: float | str, message: str) -> None:
    file = tmp_path / "tiny.gguf"
    write_model(file, "llama", "Q8_0")
    folder = with_key(file, key, value)
    with pytest.raises(EngineError, match=message):
        create_model(load_config(folder), stored_tensors(tmp_path, file)[1], torch.device("cpu"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 101), "even rotary"),
        ({"rope.scaling.type": "yarn", "rope.freq_base": 1.0}, "cannot be computed with"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1e-45}, "frequencies that are not finite"),
        ({"expert_count": 2, "expert_used_count": 1}, "'blk.0.ffn_gate_exps.weight' is missing, expert_count is 2"),
    ],
)
def test_numbers_that_make_no_model_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    file = tmp_path / "tiny.gguf"
    write_model(file, "llama", "F32")
    header = read_gguf(file)
    metadata = dict(header.metadata) | {f"llama.{key}": value for key, value in changed.items()}
    tensors = stored_tensors(tmp_path, file)[1]
    with pytest.raises(EngineError, match=message):
        create_model(gguf_config([replace(header, metadata=metadata)]), tensors, torch.device("cpu"))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("is_dora", [False, True])
def test_a_lora_changes_packed_weights_as_plain_ones(tmp_path: Path, family: str, is_dora: bool) -> None:
    """Llama's rows of q and k are in another order in a GGUF file: so must be what a LoRA adds to them."""
    file = tmp_path / "tiny.gguf"
    stock = write_model(file, family, "Q8_0")
    pairs = {}
    for leaf in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        path = f"model.layers.1.{leaf}"
        rows, columns = stock.get_submodule(path).weight.shape
        magnitude = torch.rand(rows) + 0.5 if is_dora else None
        pairs[path] = LoraPair(torch.randn(3, columns) / 4, torch.randn(rows, 3) / 4, 0.7, magnitude)
    folder, tensors = stored_tensors(tmp_path, file)
    model = create_model(load_config(folder), tensors, torch.device("cpu"), arithmetic="exact")
    (lora,) = DecoderLoras(model).fit([TextLora("lora", LoraAdapter(Path("lora"), {"model": pairs}), 0.8)])
    ids, places = torch.randint(0, VOCABULARY, (24,)), torch.arange(24)
    before = stock(ids[None]).logits[0]
    for path, pair in pairs.items():
        weight = stock.get_submodule(path).weight
        weight += 0.8 * pair.scale * pair.up @ pair.down
        if pair.magnitude is not None:
            weight *= pair.magnitude[:, None] / weight.norm(dim=1, keepdim=True)
    expected = stock(ids[None]).logits[0]
    use = RowAdapter(lora.fitted.layers, lora.scale, places, row_multiple=1)
    with torch.inference_mode(), AdaptedRows(model.module).adding([use]):
        got = model.module.logits(model.module(ids, model.rotary.angles(places, model.dtype), attend))
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-4
    assert float((before - expected).abs().max() / expected.abs().max()) > 1e-2


def test_an_end_is_a_token_that_the_file_names_or_a_control_token_of_a_known_text(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", "llama", "F32")
    header = read_gguf(tmp_path / "tiny.gguf")
    said = {
        "tokenizer.ggml.tokens": ("a", "<|im_end|>", "<|end|>", "<odd>", "b"),
        "tokenizer.ggml.token_type": (1, 3, 1, 3, 1),  # 3: control
        "tokenizer.ggml.eos_token_id": 4,
    }
    assert gguf_config([replace(header, metadata=dict(header.metadata) | said)]).eos_token_id == [1, 4]
