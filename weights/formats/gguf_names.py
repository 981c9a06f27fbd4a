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
_T5_LAYER_NAMES: Final = {  # in a layer of an encoder (`enc.blk.N.` and `encoder.block.N.`)
    "attn_norm": "layer.0.layer_norm",
    "attn_q": "layer.0.SelfAttention.q",
    "attn_k": "layer.0.SelfAttention.k",
    "attn_v": "layer.0.SelfAttention.v",
    "attn_o": "layer.0.SelfAttention.o",
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "ffn_norm": "layer.1.layer_norm",
    "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo",
}
_T5_TOP_NAMES: Final = {"token_embd": "shared", "enc.output_norm": "encoder.final_layer_norm"}
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
# The letters and ideographs that DeepSeek's tokenizer.json names one by one.
_DEEPSEEK_LETTERS: Final = (
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    "\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    "\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]"
)
_DEEPSEEK_SIGNS: Final = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_DEEPSEEK_IDEOGRAPHS: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]"
_IDEOGRAPHS: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]"
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    rf"\s?{_DEEPSEEK_LETTERS}+",
    rf"\s?{_DEEPSEEK_SIGNS}+",
    r"\s+$",
    f"{_DEEPSEEK_IDEOGRAPHS}+",
    r"\p{N}+",
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"{_DEEPSEEK_IDEOGRAPHS}+", r"\p{N}")
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    f"{_IDEOGRAPHS}+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_FALCON: Final = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_QWEN35: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
    "deepseek-llm": (_DEEPSEEK_LLM, False),
    "deepseek-coder": (_DEEPSEEK_CODER, False),
    "deepseek-v3": (_DEEPSEEK_V3, False),
    "falcon": (_FALCON, False),
    "qwen35": ((_QWEN35,), False),
}
ADDS_BOS: Final = frozenset({*_LLAMA3_NAMES, "tekken"})
# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def t5_name(name: str) -> str:
    """Return transformers' name of a tensor of T5's encoder, the name itself of any other."""
    module, _, leaf = name.rpartition(".")
    if module in _T5_TOP_NAMES:
        return f"{_T5_TOP_NAMES[module]}.{leaf}"
    match module.split("."):
        case ["enc", "blk", layer, part] if part in _T5_LAYER_NAMES:
            return f"encoder.block.{layer}.{_T5_LAYER_NAMES[part]}.{leaf}"
    return name
