"""The causal language models of transformers that are served, and how: every class tiny, beside its own `generate`.

    python -m infra.supported.language_models [CLASS ...]

prints a line for each class: `our decoder`, `paged`, `paged, with states`, `own cache`, with `, text alone` behind it
where a model reads images or sound as well, `paged, with eyes` (which `vision_models` compares), or `refused: why`. A
class that is said to be served and differs is printed with what it differs by, and ends the script with status 1.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gemma3n import modeling_gemma3n

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.models.stock_classes import DRAFTS_FOR, OWN_CACHE, PAGED, RECURRENT, SEEING, TEXT_ALONE
from deployments.engines.records.protocol import EngineError, SamplingParams, TextRequest
from weights.formats.language_models import CLASS_NAMES

VOCABULARY: Final = 96
TIE: Final = 1e-4  # of log probabilities
MAX_ERROR: Final = 1e-3  # of one, in float32
MAX_PARAMETERS: Final = 3_000_000
# What the sizes of a config are called, over all classes; each takes those that it has.
_SIZES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "prefix_dense_intermediate_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "dense_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "v_head_dim", "swa_v_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("attention_head_dim", "rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group"), 1),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "num_dense_layers", "zero_expert_num"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 128),
    "max_sequence_length": 128,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "mamba_d_head", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_topk", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("linear_num_key_heads", "n_mamba_heads", "index_n_heads", "altup_num_inputs"), 2),
    **dict.fromkeys(("mamba_dt_rank", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "max_window_layers", "num_expert_groups"), 1),
    "mamba_d_ssm": 64,
    "index_head_dim": 16,
    "num_kv_shared_layers": 0,
    "ffn_config": None,
    "activation_sparsity_pattern": None,
}
_ALWAYS: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "is_decoder": True}
_LATENT: Final = {"num_key_value_heads": 4, "head_dim": ...}
_MOE: Final = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
# What a class needs beside these, or instead of them; `...` leaves the default.
OVERRIDES: Final[Mapping[str, Mapping[str, Any]]] = {
    **dict.fromkeys(("AXK1ForCausalLM", "AXK2ForCausalLM", "DeepseekV32ForCausalLM"), _LATENT),
    **dict.fromkeys(("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"), _LATENT),
    "YoutuForCausalLM": _LATENT,
    "MiniCPM3ForCausalLM": {**_LATENT, "dim_model_base": 32},
    "LongcatFlashForCausalLM": {**_LATENT, "head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8},
    "DeepseekV2ForCausalLM": {**_LATENT, **_MOE},
    "Dots1ForCausalLM": _MOE,
    "DbrxForCausalLM": {
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "MoshiForCausalLM": {"sliding_window": 128},  # its mask knows of none, the cache of `generate` does
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 8},
    "MinistralForCausalLM": {"head_dim": 8},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Gemma3nForCausalLM": {
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "RoCBertForCausalLM": {
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": VOCABULARY,
        "shape_vocab_size": VOCABULARY,
    },
    "BailingHybridForCausalLM": {
        **_LATENT,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "first_k_dense_replace": 1,
    },
    "KimiLinearForCausalLM": {**_LATENT, "linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2},
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_headdim": 32,
        "n_mamba_heads": 2,
        "adapter_rank": 8,
        "num_mem_blocks": 1,
        "kv_channels": 8,
        "hybrid_layer_ids": [2],
    },
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "CpmAntForCausalLM": {"dim_ff": 48},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8},
    "Dots3NoteForCausalLM": {
        **_LATENT,
        "n_routed_experts": 4,
        "shared_experts_intermediate_size": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 16,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "num_hidden_layers": 3,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "Qwen4ExpForCausalLM": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "eos_token_id": 2,
    },
    # What is not served of these models has sizes of its own.
    "FuyuForCausalLM": {"patch_size": 2},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3, "attention_window_size": 16},
    "ZambaForCausalLM": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "Gemma3nForConditionalGeneration": {
        "vision_config": {"hidden_size": 16},
        "audio_config": {
            "hidden_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [4, 4],
        },
    },
    "Gemma4UnifiedForConditionalGeneration": {
        "vision_config": {"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16},
        "audio_config": {"audio_embed_dim": 16},
    },
    "MossTranscribeDiarizeForConditionalGeneration": {
        "audio_config": {
            "num_mel_bins": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "hidden_size": 16,
            "max_source_positions": 16,
        }
    },
    "Phi4MultimodalForCausalLM": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "crop_size": 8,
            "patch_size": 4,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    },
}


_IMAGES: Final = "it is for images or sound beside text"
_ENCODED: Final = "it writes what an encoder has seen or heard"
_UNEQUAL: Final = "a tiny model of it was not found equal to its own `generate`"
REFUSED: Final[Mapping[str, str]] = {
    "GitForCausalLM": _IMAGES,
    **{name: f"it writes nothing alone: it is the draft model of a {whole}" for name, whole in DRAFTS_FOR.items()},
    **dict.fromkeys(("TrOCRForCausalLM", "WhisperForCausalLM"), _ENCODED),
    **dict.fromkeys(("MusicgenForCausalLM", "MusicgenMelodyForCausalLM"), "it writes codes of sound"),
    **dict.fromkeys(("xLSTMForCausalLM", "ReformerModelWithLMHead"), _UNEQUAL),
    "BltForCausalLM": "it reads bytes in patches that a second model finds",
}


class Row(NamedTuple):
    """A class, and how it is served, as the script prints it."""

    class_name: str
    way: str


def rows() -> list[Row]:
    """Return a row for each causal language model of the library, as the tables of the engine have it."""
    return [Row(name, _how_served(name)) for name in class_names()]


def _how_served(class_name: str) -> str:
    if class_name in CLASS_NAMES.values():
        return "our decoder"
    if class_name in PAGED:
        return "paged"
    if class_name in RECURRENT:
        return "paged, with states"
    if class_name in OWN_CACHE:
        return "own cache"
    if class_name in SEEING:
        return "paged, with eyes"
    if class_name in TEXT_ALONE:
        return f"{_how_served(TEXT_ALONE[class_name])}, text alone"
    images = _IMAGES if class_name.endswith("ForConditionalGeneration") else _UNEQUAL
    return f"refused: {REFUSED.get(class_name, images)}"


def class_names() -> list[str]:
    """Return the causal language models of the installed library."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def tiny_config(class_name: str, **changes: Any) -> Any:
    """Return a config of the class with small sizes, and `changes`."""
    config_class: Any = getattr(transformers, class_name).config_class
    default = config_class()
    known = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    given = {
        name: size
        for name, size in _SIZES.items()
        if name in known
        and vars(default).get(name) is not None
        and (size is None or not isinstance(vars(default)[name], list | tuple | dict))
    }
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if len(kinds) > 1 and "layer_types" in known:
        given["layer_types"] = kinds
        given |= {name: len(kinds) for name in ("num_hidden_layers", "n_layer", "num_layers") if name in given}
    if class_name in TEXT_ALONE and "text_config" in known:
        given["text_config"] = tiny_config(TEXT_ALONE[class_name], **changes).to_dict()
    given |= {**_ALWAYS, **OVERRIDES.get(class_name, {}), **changes}
    return config_class(**{name: value for name, value in given.items() if value is not ...})


def tiny_model(class_name: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of the class, whose layers matter to what it says. Draws from torch's generator."""
    config, model_class = tiny_config(class_name, **changes), getattr(transformers, class_name)
    with _without_timm():
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > MAX_PARAMETERS:
            raise EngineError(f"the config is not small: {size} parameters")
        model: PreTrainedModel = model_class(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "A_log" not in name:
            parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
        elif parameter.ndim == 1 and parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)  # some search beams, or force an end
    return model


class _SomeModel(transformers.AutoModel):
    """The builder of a model's parts: of one that timm would make, it makes something that nothing runs."""

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        is_timm = config.model_type == "gemma3n_vision"
        return torch.nn.Linear(1, 1) if is_timm else transformers.AutoModel.from_config(config, **options)


@contextlib.contextmanager
def _without_timm() -> Iterator[None]:
    before, modeling_gemma3n.AutoModel = modeling_gemma3n.AutoModel, _SomeModel
    try:
        yield
    finally:
        modeling_gemma3n.AutoModel = before


def save_tiny(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Write a model's folder, as its library does, with a tokenizer; return the tensors that came to lie there."""
    model.save_pretrained(folder)
    core = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


class Answer(NamedTuple):
    """The tokens of a completion, and the log probability of each."""

    token_ids: list[int]
    logprobs: torch.Tensor


def stock_answer(model: Any, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that the class itself generates, greedily, and the log probabilities (tokens, vocabulary)."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = torch.stack([one[0].float().log_softmax(-1) for one in found.logits])
    return found.sequences[0, -num_tokens:].tolist(), logprobs


def our_answers(engine: LLMEngine, prompts: Iterable[tuple[int, ...]], num_tokens: int) -> list[Answer]:
    """Return the engine's greedy tokens; the prompts join one after the other, two steps apart."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, num_logprobs=0)
    return run_apart(engine, [TextRequest(str(place), prompt, sampling) for place, prompt in enumerate(prompts)])


def run_apart(engine: LLMEngine, waiting: list[TextRequest]) -> list[Answer]:
    """Run requests, which are called by their places and join one after the other, two steps apart."""
    found: list[Answer] = [Answer([], torch.empty(0)) for _ in waiting]
    num_steps = 0
    while waiting or engine.has_work:
        if waiting and num_steps % 2 == 0:
            engine.add_request(waiting.pop(0))
        for delta in engine.step():
            place = int(delta.request_id)
            new = torch.tensor([delta.logprob.logprob])  # of one token a step
            found[place] = Answer([*found[place].token_ids, *delta.token_ids], torch.cat([found[place].logprobs, new]))
        if engine.failures:
            raise next(iter(engine.failures.values()))
        num_steps += 1
    return found


def difference(class_name: str, lengths: Iterable[int], num_tokens: int, **changes: Any) -> float:
    """Return the largest difference of a log probability between ours and stock; infinite for other tokens.

    Raises EngineError where the class is refused.
    """
    model = tiny_model(class_name, **changes)
    with tempfile.TemporaryDirectory() as name:
        engine = LLMEngine(Path(name), save_tiny(model, Path(name)), LLMEngineConfig(max_num_batched_tokens=24))
        prompts = [tuple(torch.randint(3, VOCABULARY, (length,)).tolist()) for length in lengths]
        ours = our_answers(engine, prompts, num_tokens)
    # A model anew for each prompt: some begin one of a single token with the state of the prompt before.
    return max(
        excess(answer, *stock_answer(copy.deepcopy(model), prompt, num_tokens))
        for prompt, answer in zip(prompts, ours, strict=True)
    )


def excess(answer: Answer, expected: list[int], logprobs: torch.Tensor) -> float:
    """Compare an answer to the `expected` tokens and all `logprobs` (tokens, vocabulary), up to where one of two tokens
    that are equally good was taken, if there is such a place. Return the largest difference, infinite for other tokens.
    """
    size = next(
        (at for at, pair in enumerate(zip(answer.token_ids, expected, strict=True)) if len(set(pair)) > 1), None
    )
    if size is not None and abs(logprobs[size, answer.token_ids[size]] - logprobs[size, expected[size]]) > TIE:
        return float("inf")
    own = logprobs[:size].gather(1, torch.tensor(expected[:size], dtype=torch.long)[:, None])[:, 0]
    differences = (answer.logprobs[:size] - own).abs().nan_to_num(float("inf"))
    return float(differences.max()) if len(differences) else 0.0


def main(names: list[str]) -> int:
    """Print the rows of these classes, of all without any; return how many are not as their row says."""
    num_failed = 0
    for row in rows():
        if names and row.class_name not in names:
            continue
        is_compared = row.class_name not in SEEING and not row.way.startswith("refused")
        found = failure(row.class_name) if is_compared else ""
        num_failed += bool(found)
        sys.stdout.write(f"{row.class_name}: {row.way}{found and f' FAILED: {found}'}\n")
    return num_failed


def failure(class_name: str, num_tokens: int = 16) -> str:
    """Return in which way a class is not equal to its own `generate`; empty where it is."""
    try:
        worst = difference(class_name, (5, 40, 1, 50), num_tokens)
    except Exception as error:  # of the library's many
        return f"{type(error).__name__}: {error}"
    return "" if worst < MAX_ERROR else f"a log probability differs by {worst}"


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(min(1, main(sys.argv[1:])))
