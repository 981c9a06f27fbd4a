"""`python -m infra.bench.llm_files FOLDER`: the files that `atelier bench llm` is measured on.

A Llama of TinyLlama-1.1B's shape with random weights, as a Hugging Face folder in bfloat16 and in the forms of `atelier
quantize`; Q4_K is written by llama.cpp (`make judge-llama`), since ours reads K types and does not make them.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from infra.bench.command.peers import llama_cpp_python
from infra.offline.checkpoints import quantize_checkpoint

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Arguments: from, to. 15 is LLAMA_FTYPE_MOSTLY_Q4_K_M of llama.h; `pure` keeps every matrix in this one type.
_TO_Q4_K: Final = """
import sys, llama_cpp
options = llama_cpp.llama_model_quantize_default_params()
options.ftype, options.pure, options.allow_requantize = 15, True, True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), options))
"""


def _write_files(folder: Path) -> None:
    """Write `bf16`, `kuiper` (folders), `Q8_0.gguf`, `Q4_0.gguf` and, where llama.cpp is there, `Q4_K.gguf`; 6 GB."""
    source = folder / "bf16"
    write_model(source)
    quantize_checkpoint(source, folder / "kuiper", "kuiper-int8")
    quantize_checkpoint(source, folder / "Q8_0.gguf", "gguf-q8_0")
    quantize_checkpoint(source, folder / "Q4_0.gguf", "gguf-q4_0")
    judge = llama_cpp_python()
    if judge is not None:
        files = [str(folder / name) for name in ("Q8_0.gguf", "Q4_K.gguf")]
        subprocess.run([str(judge), "-c", _TO_Q4_K, *files], check=True)


def write_model(folder: Path, seed: int = 0, **changes: int) -> None:
    """Write a Hugging Face folder in bfloat16, with random weights, and `changes` in its config."""
    folder.mkdir(parents=True)
    generator, config = torch.Generator().manual_seed(seed), _CONFIG | changes
    width, wide, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv_width = config["num_key_value_heads"] * width // config["num_attention_heads"]
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width)}
    norms = ["model.norm.weight"]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (width, width) for part in "qo"}
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (kv_width, width) for part in "kv"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (wide, width) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (width, wide)
        norms += [f"{name}.{part}_layernorm.weight" for part in ("input", "post_attention")]
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16) for name, shape in shapes.items()
    }
    tensors |= {name: torch.ones(width, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, vocabulary)


def write_tokenizer(folder: Path, vocabulary_size: int) -> None:
    """Write a byte-level BPE of so many tokens: begin, end, all bytes, and pairs of them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(itertools.islice(itertools.product(letters, letters), vocabulary_size - 2 - len(letters)))
    vocabulary = ["<s>", "</s>", *letters, *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(vocabulary)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


if __name__ == "__main__":
    _write_files(Path(sys.argv[1]))
