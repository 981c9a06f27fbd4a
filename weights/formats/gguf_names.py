"""GGUF's names for the tensors of Hugging Face's decoders, and for their tokenizers' way to split text.

Sources: gguf-py's `tensor_mapping.py`; llama.cpp's `llama-vocab.cpp`, which cites the expressions of the models' own
tokenizer.json files.
"""

from __future__ import annotations

from typing import Final

# In a layer (`blk.N.` and `model.layers.N.`), and outside of all.
LAYER_NAMES: Final = {
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
    "ffn_gate_inp": "mlp.gate",
}
# Of all experts of a layer, one behind the other: (experts, out, in) in torch order. `*` is an expert's number.
EXPERT_NAMES: Final = {
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
FREQUENCY_FACTORS: Final = "rope_freqs.weight"

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2: Final = _CONTRACTIONS + r"|\p{N}" + _REST
_LLAMA3: Final = _CONTRACTIONS + r"|\p{N}{1,3}" + _REST
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES: Final = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
# tokenizer.ggml.pre -> expressions that split one after the other; whether a word of the vocabulary needs no merges.
# Of several names for the same, a file gets the first.
TEXT_SPLITS: Final[dict[str, tuple[tuple[str, ...], bool]]] = {
    **dict.fromkeys(_LLAMA3_NAMES, ((_LLAMA3,), True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), ((_QWEN2,), False)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"), ((_GPT2,), False)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), ((r"\p{N}", _GPT2), False)),
    "tekken": ((_TEKKEN,), True),
}
ADDS_BOS: Final = frozenset({*_LLAMA3_NAMES, "tekken"})
# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
