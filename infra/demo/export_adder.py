"""Writes the adder as GGUF (Q8_0) and as KuiperLLama int8: python infra/demo/export_adder.py OUT [--model DIR]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

from weights.formats.kuiper import KuiperHeader, write_kuiper
from weights.loading.stage_transforms import DEFAULT_GROUP_SIZE, quantize_int8

DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "adder"
Q8_0 = gguf.GGMLQuantizationType.Q8_0

Array = npt.NDArray[np.float32]
# HF name in a layer -> GGUF name, KuiperLLama name.
LAYER_NAMES = {
    "self_attn.q_proj": ("attn_q", "wq"),
    "self_attn.k_proj": ("attn_k", "wk"),
    "self_attn.v_proj": ("attn_v", "wv"),
    "self_attn.o_proj": ("attn_output", "wo"),
    "mlp.gate_proj": ("ffn_gate", "w1"),
    "mlp.down_proj": ("ffn_down", "w2"),
    "mlp.up_proj": ("ffn_up", "w3"),
    "input_layernorm": ("attn_norm", "attention_norm"),
    "post_attention_layernorm": ("ffn_norm", "ffn_norm"),
}
TOP_NAMES = {
    "model.embed_tokens": ("token_embd", "tok_embeddings"),
    "model.norm": ("output_norm", "norm"),
    "lm_head": ("output", "output"),
}


def interleaved(rows: Array, num_heads: int) -> Array:
    """Rows of q or k from halves (rotate_half) to pairs, per head: what the arch `llama` of GGUF has."""
    halves = rows.reshape(num_heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def names(config: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """HF module -> GGUF and KuiperLLama names, in the model's order."""
    layers = {
        f"model.layers.{layer}.{module}": (f"blk.{layer}.{ours}", f"layers.{layer}.{theirs}")
        for layer in range(config["num_hidden_layers"])
        for module, (ours, theirs) in LAYER_NAMES.items()
    }
    return TOP_NAMES | layers


def export_gguf(model: Path, file: Path, kind: gguf.GGMLQuantizationType = Q8_0) -> None:
    """Linear layers and embeddings as `kind`, norms as F32; q and k permuted; the tokenizer and its chat template."""
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    writer = gguf.GGUFWriter(file, "llama")
    add_hyperparameters(writer, config)
    add_tokenizer(writer, model, config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for module, (name, _) in names(config).items():
        weight = weights[f"{module}.weight"].float().numpy()
        part = name.rpartition(".")[2]
        if part in heads:
            weight = interleaved(weight, heads[part])
        if weight.ndim == 1:
            writer.add_tensor(f"{name}.weight", weight)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_hyperparameters(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("adder")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    """Byte-level BPE. It has no merges; llama.cpp wants some and the writer takes no empty array, so one is of bytes
    that no text has."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_token_merges(merges or ["\u0100 \u0101"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_unk_token_id(vocab["<unk>"])
    writer.add_add_bos_token(False)  # the chat template writes it
    writer.add_chat_template((model / "chat_template.jinja").read_text())


def export_kuiper(model: Path, file: Path) -> None:
    """Version 3. q and k stay in halves, as KuiperLLama's own export of Hugging Face models leaves them."""
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    header = KuiperHeader(
        dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        max_seq_len=config["max_position_embeddings"],
        group_size=DEFAULT_GROUP_SIZE,
        shared_classifier=config["tie_word_embeddings"],
    )
    arrays: dict[str, npt.NDArray[Any]] = {}
    for module, (_, name) in names(config).items():
        weight = weights[f"{module}.weight"].float().numpy()
        if weight.ndim == 1 or name == "tok_embeddings":
            arrays[f"{name}.weight"] = weight
        else:
            arrays[f"{name}.weight"], arrays[f"{name}.scales"] = quantize_int8(weight)
    write_kuiper(file, header, {name: array.tobytes for name, array in arrays.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    export_gguf(options.model, options.out / "adder-q8_0.gguf")
    export_kuiper(options.model, options.out / "adder-int8.bin")
    print(f"wrote adder-q8_0.gguf and adder-int8.bin to {options.out}")


if __name__ == "__main__":
    main()
