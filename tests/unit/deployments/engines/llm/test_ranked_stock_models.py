"""Language models that transformers computes on several ranks, beside the same weights in the class itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.ranks import run_ranks
from kit.seeding import seeded_rng
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deployments.engines.llm.engine import LLMEngine, step_follower
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.models.registry import check_ranks, create_any_model, load_config
from deployments.engines.llm.models.stock_classes import PAGED
from deployments.engines.llm.models.stored_slices import copied_bytes, stored_slices
from deployments.engines.needs import PartSizes, needs_of
from deployments.engines.ranks.following import RankChannel, follow
from deployments.engines.ranks.group import RankGroup
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.records.protocol import EngineError, SamplingParams, TextLora, TextRequest
from infra.supported.language_models import (
    VOCABULARY,
    Answer,
    excess,
    our_answers,
    run_apart,
    save_tiny,
    stock_answer,
    tiny_config,
    tiny_model,
)
from weights.operations.adapters import LoraAdapter, LoraPair

MAX_ERROR = 1e-4  # of a log probability, in float32: what an order of sums does
CONFIG = LLMEngineConfig(max_num_batched_tokens=24, kv_cache_bytes=2**20)
# Biases of sums, products of several matrices, norms of whole products, latent keys, experts, sinks, shorter values,
# soft caps, one key head for two ranks, and a vocabulary that is no multiple.
FEATURES: list[tuple[str, int, dict[str, Any]]] = [
    ("Starcoder2ForCausalLM", 4, {}),
    ("Phi3ForCausalLM", 2, {"intermediate_size": 49}),
    ("Olmo2ForCausalLM", 4, {}),
    ("DeepseekV2ForCausalLM", 2, {}),
    ("OlmoeForCausalLM", 2, {"vocab_size": VOCABULARY + 1}),
    ("Llama4ForCausalLM", 2, {}),
    ("GraniteSWAForCausalLM", 2, {}),
    ("MiMoV2FlashForCausalLM", 4, {"v_head_dim": 4, "swa_v_head_dim": 4}),
    ("Gemma2ForCausalLM", 4, {"intermediate_size": 160}),
    ("CohereForCausalLM", 2, {"num_key_value_heads": 1}),
    ("Glm4ForCausalLM", 2, {"vocab_size": VOCABULARY + 1}),
]


def drawn_prompts(*lengths: int) -> list[tuple[int, ...]]:
    rng = seeded_rng()
    return [tuple(rng.integers(3, VOCABULARY, length).tolist()) for length in lengths]


def on_ranks(folder: Path, tensors: Mapping[str, torch.Tensor], size: int, lead: Any) -> Any:
    """Return the result of `lead` with the engine of rank 0, each rank of which has read its slices alone."""
    dtypes = dict.fromkeys(tensors, "F32")

    def rank_of(group: RankGroup) -> Any:
        own = own_slices(folder, tensors, dtypes, group.rank, size)
        if group.rank:
            return follow(group, {"tiny": step_follower(folder, own, CONFIG, group)})
        found = lead(LLMEngine(folder, own, CONFIG, ranks=RankChannel(group, "tiny")))
        group.close()
        return found

    return run_ranks(RankLayout(tensor=size), rank_of)[0]


def own_slices(folder: Path, tensors: Mapping[str, torch.Tensor], dtypes: Any, rank: int, size: int) -> Any:
    parts = stored_slices(folder, dtypes, rank, size)
    return {
        name: tensor.narrow(parts[name].dimension, parts[name].start, parts[name].stop - parts[name].start)
        if name in parts
        else tensor
        for name, tensor in tensors.items()
    }


def compare(class_name: str, size: int, folder: Path, **changes: Any) -> None:
    model = tiny_model(class_name, **changes)
    tensors = save_tiny(model, folder)
    first, *others = drawn_prompts(40, 5, 1)
    prompts = [first, *others, (*first[:33], *others[0])]  # which find the blocks of the first one's tokens
    alone = our_answers(LLMEngine(folder, tensors, CONFIG), prompts, 8)
    found = on_ranks(folder, tensors, size, lambda engine: our_answers(engine, prompts, 8))
    for prompt, one, other in zip(prompts, alone, found, strict=True):
        assert excess(other, *stock_answer(model, prompt, 8)) < MAX_ERROR
        assert other.token_ids == one.token_ids
        assert float((other.logprobs - one.logprobs).abs().max()) < MAX_ERROR


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("class_name", "size", "changes"), FEATURES)
def test_ranks_write_what_the_class_writes(class_name: str, size: int, changes: Any, tmp_path: Path) -> None:
    compare(class_name, size, tmp_path, **changes)


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", ["Gemma2ForCausalLM", "OlmoeForCausalLM", "Glm4ForCausalLM"])
def test_company_changes_no_bit_on_ranks(class_name: str, tmp_path: Path) -> None:
    """Rows are as long as those of real models: the kernels compute products of completions."""
    wide = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "num_attention_heads": 2}
    tensors = save_tiny(tiny_model(class_name, **wide, num_key_value_heads=2), tmp_path)
    prompts = drawn_prompts(5, 40, 1, 17)

    def lead(engine: LLMEngine) -> tuple[list[Answer], list[Answer]]:
        alone = [our_answers(engine, [prompt], 8)[0] for prompt in prompts]
        return alone, our_answers(engine, prompts, 8)

    for alone, beside in zip(*on_ranks(tmp_path, tensors, 2, lead), strict=True):
        assert alone.token_ids == beside.token_ids
        assert torch.equal(alone.logprobs, beside.logprobs)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("class_name", sorted(PAGED))
def test_each_class_with_a_plan_is_divided(class_name: str, tmp_path: Path) -> None:
    config = tiny_config(class_name)
    config.architectures = [class_name]
    if not config.base_model_tp_plan or class_name == "LongcatFlashForCausalLM":
        with pytest.raises(EngineError, match="plan"):
            check_ranks(config, RankLayout(tensor=2))
        return
    check_ranks(config, RankLayout(tensor=2))
    compare(class_name, 2, tmp_path)


def test_classes_that_ranks_do_not_divide_say_why() -> None:
    reasons = {
        "GPT2LMHeadModel": "transformers has no plan for ranks of a GPT2LMHeadModel",
        "LongcatFlashForCausalLM": "has style 'moe_identity_expert'; supported are colwise, ",
        "MambaForCausalLM": "which has recurrent layers",
        "BloomForCausalLM": "which has a cache of its own",
        "Gemma3ForConditionalGeneration": "which has vision",
    }
    for class_name, reason in reasons.items():
        config = tiny_config(class_name) if "Conditional" not in class_name else SimpleNamespace()
        config.architectures = [class_name]
        with pytest.raises(EngineError, match=re.escape(reason)):
            check_ranks(config, RankLayout(tensor=2))
        if class_name in PAGED:
            check_ranks(config, RankLayout(cfg=2))


def test_the_page_tells_how_many_classes_are_divided() -> None:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    planned = {name for kind, name in names if name in PAGED and CONFIG_MAPPING[kind].base_model_tp_plan}
    count = len(planned - {"LongcatFlashForCausalLM"})
    page = Path(__file__).parents[5] / "docs/language-models.md"
    assert f" {count} classes have a plan for `tensor` ranks |" in page.read_text()


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "4 query heads cannot be divided among 3 ranks"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 key/value heads cannot be divided among 2 ranks"),
        (
            {"num_key_value_heads": 4, "intermediate_size": 3},
            4,
            "3 rows or columns of 'model.layers.0.mlp.gate_proj.weight'",
        ),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(changes: Any, size: int, message: str) -> None:
    config = tiny_config("SmolLM3ForCausalLM", **changes)
    config.architectures = ["SmolLM3ForCausalLM"]
    with pytest.raises(EngineError, match=re.escape(message)):
        check_ranks(config, RankLayout(tensor=size))


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", ["Starcoder2ForCausalLM", "OlmoeForCausalLM", "Phi3ForCausalLM"])
def test_a_rank_has_the_bytes_of_its_slices_alone(class_name: str, tmp_path: Path) -> None:
    """It reads views, which give the parameters that it would cut of the whole."""
    tensors = save_tiny(tiny_model(class_name, num_attention_heads=4, num_key_value_heads=4), tmp_path)
    whole = sum(one.nbytes for one in tensors.values())
    dtypes = dict.fromkeys(tensors, "F32")
    for rank in range(4):
        own = own_slices(tmp_path, tensors, dtypes, rank, 4)
        assert sum(one.nbytes for one in own.values()) < 0.3 * whole
        states = [state_of(tmp_path, given, rank, 4) for given in (tensors, own)]
        assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
        places = range_of(tensors.values())
        if class_name != "OlmoeForCausalLM":  # whose experts the class has in one piece
            elsewhere = [name for name, one in states[1].items() if one.data_ptr() not in places]
            assert all(name.endswith("bias") for name in elsewhere)  # of sums, on other ranks than the first
    name = next(name for name in tensors if "o_proj.weight" in name)
    with pytest.raises(EngineError, match=re.escape(name)):
        state_of(tmp_path, {**tensors, name: torch.cat([tensors[name]] * 2, dim=1)}, 1, 4)


def test_a_rank_counts_what_it_copies(tmp_path: Path) -> None:
    """Gates and values of experts that lie in one tensor: a rank's parts of both are apart in it."""
    tensors = save_tiny(tiny_model("Llama4ForCausalLM"), tmp_path)
    sizes = {name: one.nbytes for name, one in tensors.items()}
    apart = [name for name in tensors if name.endswith("experts.gate_up_proj")]
    assert apart
    assert copied_bytes(tmp_path, sizes, 2) == sum(sizes[name] for name in apart) // 2
    own = own_slices(tmp_path, tensors, dict.fromkeys(tensors, "F32"), 1, 2)
    state, places = state_of(tmp_path, own, 1, 2), range_of(tensors.values())
    assert {name for name, one in state.items() if one.data_ptr() not in places} == set(apart)


@pytest.mark.parametrize("class_name", ["Gemma2ForCausalLM", "BloomForCausalLM", "LlamaForCausalLM"])
def test_the_layers_of_a_divided_model_are_counted(class_name: str) -> None:
    sizes = {"model.embed_tokens.weight": 70, "model.layers.0.a": 20, "model.layers.0.b": 5, "model.layers.1.a": 30}
    needs = needs_of("llm", class_name, {"model": PartSizes("transformers", sizes)})
    assert (needs.divided is None) == (class_name == "BloomForCausalLM")
    assert needs.decoder == (needs.divided if class_name == "LlamaForCausalLM" else None)
    if needs.divided is not None:
        assert ([*needs.divided.layers], needs.divided.rest_bytes) == ([25, 30], 70)


def range_of(tensors: Any) -> set[int]:
    return {place for one in tensors for place in range(one.data_ptr(), one.data_ptr() + one.nbytes)}


def state_of(folder: Path, tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    group: Any = SimpleNamespace(size=lambda axis: size, place=SimpleNamespace(tensor=rank))
    model = create_any_model(load_config(folder), tensors, torch.device("cpu"), ranks=group)
    return dict(model.module.state_dict())


@pytest.mark.drawn
@pytest.mark.parametrize("class_name", ["Starcoder2ForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM"])
def test_loras_of_ranks_write_what_one_rank_writes(class_name: str, tmp_path: Path) -> None:
    model = tiny_model(class_name)
    tensors = save_tiny(model, tmp_path)
    loras = [drawn_lora(model, name) for name in ("one", "other")]
    greedy = SamplingParams(max_tokens=7, ignore_eos=True, num_logprobs=0)
    uses: list[tuple[TextLora, ...]] = [(), (loras[0],), (loras[1], loras[0]), (loras[1],)]

    def answers(engine: LLMEngine) -> list[Answer]:
        asked = zip(drawn, uses, strict=True)
        return run_apart(
            engine, [TextRequest(str(place), one, greedy, loras=own) for place, (one, own) in enumerate(asked)]
        )

    drawn = drawn_prompts(9, 30, 12, 2)
    alone = answers(LLMEngine(tmp_path, tensors, CONFIG))
    found = on_ranks(tmp_path, tensors, 2, answers)
    for one, other in zip(alone, found, strict=True):
        assert other.token_ids == one.token_ids
        assert float((other.logprobs - one.logprobs).abs().max()) < MAX_ERROR
    assert excess(found[1], *stock_answer(model, drawn[1], 7)) > MAX_ERROR


def drawn_lora(model: Any, name: str) -> TextLora:
    """Return a LoRA of random pairs for all linear layers."""
    rng, pairs = seeded_rng(), {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            down, up = (
                torch.from_numpy(rng.normal(size=size)).float() * 0.15
                for size in ((3, module.in_features), (module.out_features, 3))
            )
            bias = torch.from_numpy(rng.normal(size=module.out_features)).float() * 0.1
            pairs[path] = LoraPair(down, up, 1.5, bias=bias)
    return TextLora(name, LoraAdapter(Path(name), {"model": pairs}), float(rng.uniform(0.5, 1.0)))
