"""Language models by the type that a config.json says, where it names no class."""

from __future__ import annotations

from typing import Final

CLASS_NAMES: Final = {  # of transformers
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
