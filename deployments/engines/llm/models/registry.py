"""From a model folder's config to a decoder: the known architectures, and how their configs are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from deployments.engines.llm.models.assign import assign_tensors
from deployments.engines.llm.models.llama import DecoderSpec, LlamaForCausalLM
from deployments.engines.llm.models.rope import create_rotary
from deployments.engines.nn.rotary import Rotary
from deployments.engines.protocol import EngineError

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its weights, ready to run."""

    module: LlamaForCausalLM
    rotary: Rotary
    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; EngineError names the file when it is not there or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise EngineError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def load_config(folder: Path) -> PretrainedConfig:
    """The transformers config of a model folder.

    Raises:
        EngineError: no readable config.json, or the architecture is none of `ARCHITECTURES`.
    """
    content = read_json(folder / "config.json")
    names = content.get("architectures") or [_BY_MODEL_TYPE.get(str(content.get("model_type")))]
    if names[0] not in ARCHITECTURES:
        asked = names[0] or content.get("model_type")
        raise EngineError(
            f"architecture {asked!r} in {folder / 'config.json'} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds; all mean that this config cannot be used
        raise EngineError(f"{folder / 'config.json'} is not a valid config: {error}") from error
    config.architectures = names
    return config


def create_model(config: PretrainedConfig, tensors: Mapping[str, torch.Tensor], device: torch.device) -> LoadedModel:
    """Builds the decoder on the meta device and assigns `tensors`.

    Tensors that are on `device` already are used where they are; others are copied there.

    Raises:
        EngineError: the config asks for something that is not supported, or the tensors do not fit it.
    """
    spec = ARCHITECTURES[config.architectures[0]](config)
    rotary = create_rotary(config, spec.head_dim, device)
    with torch.device("meta"):
        module = LlamaForCausalLM(spec)
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    assign_tensors(module, placed, TIED if spec.tied_embeddings else {})
    return LoadedModel(module.eval(), rotary, spec, module.lm_head.weight.dtype, device)


def _base_spec(config: PretrainedConfig, **differences: bool) -> DecoderSpec:
    if config.hidden_act != "silu":
        raise EngineError(f"activation {config.hidden_act!r} is not supported; supported is silu")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise EngineError("sliding-window attention is not supported; set use_sliding_window to false")
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        tied_embeddings=config.tie_word_embeddings,
        **differences,
    )


def _llama(config: PretrainedConfig) -> DecoderSpec:
    bias = config.attention_bias
    return _base_spec(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


def _qwen2(config: PretrainedConfig) -> DecoderSpec:
    return _base_spec(config, qkv_bias=True)


def _qwen3(config: PretrainedConfig) -> DecoderSpec:
    bias = config.attention_bias
    return _base_spec(config, qkv_bias=bias, output_bias=bias, qk_norm=True)


ARCHITECTURES: dict[str, Callable[[PretrainedConfig], DecoderSpec]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
_BY_MODEL_TYPE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
