"""Tiny random models in stock folders, with transformers' own generate as the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextDelta, TextRequest

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
VOCABULARY_SIZE = 260
SPECIAL_TOKENS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, so that characters and stop strings cross token borders."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL_TOKENS[2:],
        chat_template=chat_template,
    )


@dataclass
class TinyModel:
    """A stock folder without weights, its tensors, and the transformers model that they come from."""

    folder: Path
    stock: PreTrainedModel
    tensors: dict[str, torch.Tensor]
    _greedy: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def engine(self, **options: Any) -> LLMEngine:
        return LLMEngine(self.folder, self.tensors, LLMEngineConfig(**options))

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens that transformers generates, without the prompt."""
        key = (tuple(prompt), num_tokens)
        if key not in self._greedy:
            ids = torch.tensor([prompt])
            output = self.stock.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
            )
            self._greedy[key] = output[0, len(prompt) :].tolist()
        return self._greedy[key]


def build(folder: Path, family: str, seed: int, **overrides: Any) -> TinyModel:
    config_class, model_class = FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    stock = model_class(config_class(**(settings | overrides))).eval().requires_grad_(False)
    for parameter in stock.parameters():  # biases and norms start as zeros and ones
        parameter += 0.1 * torch.randn_like(parameter)
    stock.config.save_pretrained(folder)
    stock.generation_config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    tensors = dict(stock.state_dict())
    if "experts" in " ".join(tensors):  # on disk, each expert's matrices are tensors of their own
        stock.save_pretrained(folder / "saved")
        tensors = load_file(folder / "saved" / "model.safetensors")
    if stock.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return TinyModel(folder, stock, tensors)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """Builds a tiny model once per set of arguments."""
    made: dict[str, TinyModel] = {}

    def get(family: str = "llama", seed: int = 0, **overrides: Any) -> TinyModel:
        key = repr((family, seed, sorted(overrides.items())))
        if key not in made:
            made[key] = build(tmp_path_factory.mktemp(family), family, seed, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def make_byte_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return byte_tokenizer


@dataclass
class Outcome:
    """All that came of one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    deltas: list[TextDelta] = field(default_factory=list)


@pytest.fixture(scope="session")
def run_all() -> Callable[..., dict[str, Outcome]]:
    """Steps an engine until it is idle; `requests` maps the step at which each request joins."""

    def run(engine: LLMEngine, requests: Sequence[TextRequest], join_at: Sequence[int] = ()) -> dict[str, Outcome]:
        steps = list(join_at) or [0] * len(requests)
        outcomes = {request.request_id: Outcome() for request in requests}
        step = 0
        while engine.has_work or step <= max(steps):
            for request, at in zip(requests, steps, strict=True):
                if at == step:
                    engine.add_request(request)
            for delta in engine.step():
                outcome = outcomes[delta.request_id]
                assert outcome.finish_reason is None
                outcome.token_ids += delta.token_ids
                outcome.text += delta.text
                outcome.finish_reason = delta.finish_reason
                outcome.deltas.append(delta)
            step += 1
            assert step < 5000
        return outcomes

    return run


@pytest.fixture(scope="session")
def prompt_of() -> Callable[..., tuple[int, ...]]:
    """A random prompt of ordinary tokens."""

    def make(length: int, seed: int = 0) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(1000 * length + seed)
        return tuple(torch.randint(4, VOCABULARY_SIZE, (length,), generator=generator).tolist())

    return make


@pytest.fixture(scope="session")
def request_of() -> Callable[..., TextRequest]:
    def make(request_id: str, prompt: Sequence[int], **sampling: Any) -> TextRequest:
        return TextRequest(request_id, tuple(prompt), SamplingParams(**sampling))

    return make
