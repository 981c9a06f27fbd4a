"""Language models as one function of a file's bytes: opened, asked for tokens, and their text decoded.

What a header's reader lets through meets the config, the tokenizer, the kernels and the template here.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextRequest
from weights.formats.kuiper import KuiperHeader
from weights.loading.views import mapped_tensors

_TEXTS = ("", "a  b\n12 + é", "<s>x</s> \x00 …½")
_MAX_BYTES = 2**20
_numbers = itertools.count()  # headers are cached by name and time of the last change


def open_gguf(folder: Path, data: bytes) -> None:
    file = folder / f"{next(_numbers)}.gguf"
    file.write_bytes(data)
    try:
        use_model(file)
    finally:
        file.unlink()


def open_kuiper(folder: Path, data: bytes) -> None:
    """The format of the file follows from its bytes: KuiperLLama's or llama2.c's."""
    beside = folder / "kuiper"
    if not beside.exists():
        write_companions(beside)
    (beside / "model.bin").write_bytes(data)
    use_model(beside)


MODELS: dict[str, Callable[[Path, bytes], None]] = {
    "gguf_bpe_model": open_gguf,
    "gguf_spm_model": open_gguf,
    "gguf_moe_model": open_gguf,
    "kuiper_model": open_kuiper,
    "llama2c_model": open_kuiper,
}


def use_model(path: Path) -> None:
    """Open a model and ask it for a few tokens. What comes but WeightsError or EngineError is a finding."""
    described, tensors, _ = mapped_tensors(path)
    engine = LLMEngine(described, tensors, LLMEngineConfig(kv_cache_bytes=_MAX_BYTES, max_num_seqs=2))
    for number, text in enumerate(_TEXTS):
        ids = engine.encode_text(text)[: engine.max_model_len // 2] or (0,)
        engine.add_request(TextRequest(str(number), ids, SamplingParams(max_tokens=3, temperature=float(number))))
    while engine.has_work:
        engine.step()
        for failure in engine.failures.values():
            assert "not finite" in str(failure), failure
    engine.chats.encode([{"role": "user", "content": "1 + 1"}])


def valid_models(folder: Path) -> dict[str, bytes]:
    """One small file per way to open one."""
    sizes = {"dim": 32, "hidden_dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 32}
    kuiper = KuiperHeader(**sizes, vocab_size=len(BPE_TOKENS), group_size=16, shared_classifier=True)
    return {
        "gguf_bpe_model": valid_gguf_model(folder / "bpe.gguf", "qwen2", bpe_metadata()),
        "gguf_spm_model": valid_gguf_model(folder / "spm.gguf", "llama", spm_metadata()),
        "gguf_moe_model": valid_gguf_model(folder / "moe.gguf", "qwen3moe", bpe_metadata()),
        "kuiper_model": random_file(kuiper),
        "llama2c_model": random_file(dataclasses.replace(kuiper, is_llama2c=True)),
    }


BPE_TOKENS = ("<s>", "</s>", "a", "b", "Ġ", "Ċ", "1", "2", "+", "Ã", "©", "x", "âĢ", "ab", "aĠ", "Ġb", "12")
SPM_TOKENS = ("<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(16)), "▁", "a", "b", "▁a", "1", "12")
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"


def bpe_metadata() -> dict[str, Any]:
    return {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": list(BPE_TOKENS),
        "token_type": [3, 3, *[1] * (len(BPE_TOKENS) - 2)],
        "merges": ["a b", "a Ġ", "Ġ b", "1 2"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": True,
    }


def spm_metadata() -> dict[str, Any]:
    return {
        "model": "llama",
        "tokens": list(SPM_TOKENS),
        "token_type": [2, 3, 3, *[6] * 16, *[1] * (len(SPM_TOKENS) - 19)],
        "scores": [-float(rank) for rank in range(len(SPM_TOKENS))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def valid_gguf_model(
    file: Path, family: str, vocabulary: Mapping[str, Any], rope: Mapping[str, Any] | None = None
) -> bytes:
    """Write a model of one layer and random values with gguf-py, in as many types as fit.

    `rope` has keys of its scaling.
    """
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, family)
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_chat_template(TEMPLATE)
    for name, value in (rope or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{family}.rope.{name}", value)
    for name, value in vocabulary.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{name}", value)
    rows = len(vocabulary["tokens"])
    matrices = {"token_embd": (rows, 32), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    matrices |= {"blk.0.attn_output": (32, 32)}
    vectors = {"output_norm.weight": 32, "blk.0.attn_norm.weight": 32, "blk.0.ffn_norm.weight": 32}
    if family == "qwen2":
        vectors |= {"blk.0.attn_q.bias": 32, "blk.0.attn_k.bias": 16, "blk.0.attn_v.bias": 16}
    if family.startswith("qwen3"):
        vectors |= {"blk.0.attn_q_norm.weight": 16, "blk.0.attn_k_norm.weight": 16}
    if family == "qwen3moe":
        writer.add_expert_count(2)
        writer.add_expert_used_count(1)
        writer.add_expert_feed_forward_length(32)
        writer.add_tensor("blk.0.ffn_gate_inp.weight", draw.standard_normal((2, 32)).astype(np.float32))
        for kind in ("gate", "up", "down"):
            add_packed(writer, f"blk.0.ffn_{kind}_exps", draw.standard_normal((2, 32, 32)), "Q8_0")
    else:
        matrices |= {f"blk.0.ffn_{kind}": (32, 32) for kind in ("gate", "up", "down")}
    types = itertools.cycle(("Q8_0", "Q4_0", "Q5_1", "F16", "BF16"))
    for (name, shape), type_ in zip(matrices.items(), types, strict=False):
        add_packed(writer, name, draw.standard_normal(shape), type_)
    for name, size in vectors.items():
        writer.add_tensor(name, draw.standard_normal(size).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


def add_packed(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], type_: str) -> None:
    kind = gguf.GGMLQuantizationType[type_]
    writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values.astype(np.float32), kind), raw_dtype=kind)


def random_file(header: KuiperHeader) -> bytes:
    draw = np.random.default_rng(0)
    parts = [header.raw]
    for _, dtype, shape in header.layout():
        values = draw.standard_normal(shape) * (30 if dtype == "I8" else 0.1)
        parts.append(values.astype(np.int8 if dtype == "I8" else np.float32).tobytes())
    return b"".join(parts)


def write_companions(folder: Path) -> None:
    """Write the config and the tokenizer that lie beside a file without them."""
    folder.mkdir()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": len(BPE_TOKENS), "max_position_embeddings": 32}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(BPE_TOKENS)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    ).save_pretrained(folder)
