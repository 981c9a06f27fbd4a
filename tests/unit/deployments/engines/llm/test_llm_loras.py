"""LoRAs of text requests against PEFT and merged weights: alone, in mixed batches, with a prefix cache, in the head."""

from __future__ import annotations

import copy
import gc
import json
import re
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file

from deployments.engines.llm import completion
from deployments.engines.records.protocol import EngineError, SamplingParams, TextLora, TextRequest
from weights.operations.adapters import LoraAdapter, LoraPair, load_adapter

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama": ("llama", 0, {}, ALL),
    "qwen2": ("qwen2", 0, {}, ["q_proj", "v_proj", "down_proj"]),
    "qwen3-tied": ("qwen3", 1, {"head_dim": 8, "tie_word_embeddings": True}, ALL),
    "mistral-window": ("mistral", 0, {"sliding_window": 16, "head_dim": 8}, ALL),
    "mixtral": ("mixtral", 0, {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20}, ALL[:4]),
    "llama-head": ("llama", 1, {}, ["lm_head", "q_proj"]),
    "llama-rslora": ("llama", 2, {"attention_bias": True}, ALL),
    "llama-dora": ("llama", 2, {"attention_bias": True}, ALL),
    "mixtral-dora": ("mixtral", 0, {"num_local_experts": 5, "num_experts_per_tok": 2}, ALL[:4]),
    "head-dora": ("llama", 1, {}, ["lm_head", "q_proj"]),
}


def save_lora(folder: Path, model, targets, seed: int, *, rank: int = 3, **options) -> peft.PeftModel:
    """A random LoRA as PEFT writes it, and PEFT's own model with it."""
    torch.manual_seed(100 + seed)
    config = peft.LoraConfig(
        r=rank, lora_alpha=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    adapted = peft.get_peft_model(copy.deepcopy(model.stock), config).eval().requires_grad_(False)
    for name, parameter in adapted.named_parameters():
        if "lora_magnitude_vector" in name:
            parameter.mul_(1 + torch.randn_like(parameter) * 0.3)
        elif "lora_" in name:
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted


def use(adapter: LoraAdapter, scale: float = 1.0, key: str = "") -> TextLora:
    return TextLora(key or str(adapter.path), adapter, scale)


def greedy(stock, prompt, num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = stock.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
    )
    return output[0, len(prompt) :].tolist()


def merged(model, *uses: TextLora):
    """The stock model with scale * B A added to its weights."""
    stock = copy.deepcopy(model.stock)
    for one in uses:
        for path, pair in one.adapter.components["model"].items():
            stock.get_submodule(path).weight += one.scale * pair.scale * pair.up @ pair.down
    return stock


def ask(id_: str, prompt, num_tokens: int, *loras: TextLora, n: int = 1, **sampling) -> TextRequest:
    params = SamplingParams(max_tokens=num_tokens, num_logprobs=5, **sampling)
    return TextRequest(id_, tuple(prompt), params, n=n, loras=loras)


def logprobs(outcome):
    return [delta.logprob for delta in outcome.deltas]


@pytest.mark.drawn
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_log_probabilities_are_those_of_peft(case, tiny, run_all, prompt_of, tmp_path):
    family, seed, overrides, targets = CASES[case]
    model = tiny(family, seed, **overrides)
    kind = {"use_rslora": case == "llama-rslora", "use_dora": case.endswith("-dora")}
    adapted = save_lora(tmp_path, model, targets, seed, **kind)
    lora = use(load_adapter(tmp_path))
    engine = model.engine(max_num_batched_tokens=24)
    prompts = [prompt_of(length, seed) for length in (3, 40)]
    outcomes = run_all(engine, [ask(str(i), prompt, 9, lora) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        expected = greedy(adapted, prompt, 9)
        assert outcomes[str(i)].token_ids == expected
        assert expected != model.greedy(prompt, 9)
        logits = adapted(torch.tensor([[*prompt, *expected[:-1]]])).logits[0, len(prompt) - 1 :]
        for row, found in zip(logits.log_softmax(-1), logprobs(outcomes[str(i)]), strict=True):
            for token, value in found.best:
                assert value == pytest.approx(row[token].item(), abs=1e-4)


@pytest.mark.drawn
@pytest.mark.parametrize("scale", [0.5, -1.5])
def test_a_dora_of_another_strength_is_that_of_peft(scale, tiny, run_all, prompt_of, tmp_path):
    model = tiny("llama", 4)
    adapted = save_lora(tmp_path, model, ALL, 4, use_dora=True)
    for layer in adapted.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.set_scale("default", scale)
    prompt = prompt_of(30, 4)
    save_lora(tmp_path / "plain", model, ALL[:4], 5)
    dora, plain = use(load_adapter(tmp_path), scale), use(load_adapter(tmp_path / "plain"))
    sets = {"dora": (dora,), "none": (), "both": (dora, plain), "off": (use(dora.adapter, 0.0),)}
    requests = [ask(name, prompt, 9, *loras) for name, loras in sets.items()]
    outcomes = run_all(model.engine(), requests)
    assert outcomes["dora"].token_ids == greedy(adapted, prompt, 9)
    assert outcomes["none"].token_ids == outcomes["off"].token_ids == model.greedy(prompt, 9)
    for request in requests:  # beside others it is as alone
        assert logprobs(run_all(model.engine(), [request])[request.request_id]) == logprobs(
            outcomes[request.request_id]
        )


@pytest.fixture(scope="module")
def crowd(tiny, tmp_path_factory):
    """A model and three LoRAs of it, of several ranks and targets."""
    model = tiny("llama", 3)
    loras = []
    for seed, targets in enumerate((ALL, ["q_proj", "v_proj"], ["lm_head", "k_proj", "down_proj"])):
        folder = tmp_path_factory.mktemp("lora")
        save_lora(folder, model, targets, seed, rank=seed + 2)
        loras.append(load_adapter(folder))
    return model, loras


def mixed_requests(loras, prompt_of) -> list[TextRequest]:
    first, second, third = loras
    sets = [(), (use(first),), (use(second, -0.7),), (use(first, 0.5), use(third)), (use(third), use(second)), ()]
    sets += [(use(first),), (use(third, 0.0),)]
    lengths = (17, 5, 33, 70, 1, 3, 40, 20)
    return [
        ask(str(i), prompt_of(length), 12, *uses) for i, (length, uses) in enumerate(zip(lengths, sets, strict=True))
    ]


def test_rows_of_a_step_have_adapters_of_their_own(crowd, run_all, prompt_of):
    model, loras = crowd
    before = {name: tensor.clone() for name, tensor in model.tensors.items()}
    requests = mixed_requests(loras, prompt_of)
    outcomes = run_all(model.engine(max_num_batched_tokens=30), requests, (0, 0, 1, 1, 2, 4, 4, 6))
    for request in requests:
        prompt = request.prompt_token_ids
        assert outcomes[request.request_id].token_ids == greedy(merged(model, *request.loras), prompt, 12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.tensors.items())


def test_alone_and_in_company_the_floats_are_the_same(crowd, run_all, prompt_of):
    model, loras = crowd
    requests = mixed_requests(loras, prompt_of)
    together = run_all(model.engine(max_num_batched_tokens=30), requests, (0, 0, 1, 1, 2, 4, 4, 6))
    for request in requests:
        alone = run_all(model.engine(), [request])
        assert logprobs(alone[request.request_id]) == logprobs(together[request.request_id])


def shared_prefix_requests(loras, prompt_of) -> list[TextRequest]:
    first, second, _ = loras
    sets = [(), (use(first),), (use(first, 0.5),), (use(second),), (use(first), use(second)), (use(first, 0.0),)]
    return [ask(str(i), prompt_of(50), 6, *uses) for i, uses in enumerate(sets)]


def test_blocks_of_other_adapters_and_scales_are_not_shared(crowd, run_all, prompt_of):
    model, loras = crowd
    engine = model.engine()
    for request in shared_prefix_requests(loras, prompt_of):
        for cached in (0, 48):  # one with the same adapters finds its blocks, and its answer is the same
            outcome = run_all(engine, [request])[request.request_id]
            assert outcome.token_ids == greedy(merged(model, *request.loras), request.prompt_token_ids, 6)
            is_base = not any(one.scale for one in request.loras)
            assert outcome.deltas[0].num_cached_tokens == (48 if is_base and request.request_id != "0" else cached)
    again = [use(loras[1]), use(loras[0])]  # in another order they are the same
    outcome = run_all(engine, [ask("r", prompt_of(50), 6, *again)])["r"]
    assert outcome.deltas[0].num_cached_tokens == 48


def test_sharing_blocks_across_adapters_would_show(crowd, run_all, prompt_of, monkeypatch):
    """The test above has teeth: when blocks are keyed by their tokens alone, answers are wrong."""
    model, loras = crowd
    request = shared_prefix_requests(loras, prompt_of)[1]
    alone = run_all(model.engine(), [request])[request.request_id]
    monkeypatch.setattr(completion, "scope_of", lambda loras: b"")
    engine = model.engine()
    run_all(engine, [ask("base", prompt_of(50), 6)])
    after = run_all(engine, [request])[request.request_id]
    assert after.deltas[0].num_cached_tokens == 48
    assert logprobs(after) != logprobs(alone)


def test_an_adapter_that_comes_again_does_not_find_what_its_lost_copy_computed(crowd, run_all, prompt_of):
    model, loras = crowd
    engine = model.engine()
    lost = load_adapter(loras[0].path.parent)
    assert run_all(engine, [ask("r", prompt_of(50), 3, use(lost, key="k"))])["r"].deltas[0].num_cached_tokens == 0
    del lost
    gc.collect()
    again = load_adapter(loras[0].path.parent)
    assert run_all(engine, [ask("r", prompt_of(50), 3, use(again, key="k"))])["r"].deltas[0].num_cached_tokens == 0


def test_completions_of_one_prompt_and_preempted_ones_keep_their_adapter(crowd, run_all, prompt_of):
    model, loras = crowd
    roomy, tight = model.engine(), model.engine(kv_cache_bytes=2 * 2 * 16 * 2 * 8 * 4 * 14)

    def tokens(engine):
        found: dict[tuple[str, int], list[int]] = {}
        for i, lora in enumerate(loras):
            engine.add_request(ask(str(i), prompt_of(20 + i), 40, use(lora), n=3, temperature=1.0, seed=5))
        while engine.has_work:
            for delta in engine.step():
                found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            assert not engine.failures
        return found

    assert tokens(tight) == tokens(roomy)
    assert tight.stats().num_preemptions > 0


EXPERT_PATHS = {
    "mixtral": ("block_sparse_moe.experts.{}", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.experts.{}", ("gate_proj", "up_proj", "down_proj")),
}


def save_expert_lora(folder: Path, family: str, seed: int, chosen) -> Path:
    """A LoRA of (layer, expert, product) as PEFT saves it, by the names that checkpoints have."""
    generator = torch.Generator().manual_seed(seed)
    where, names = EXPERT_PATHS[family]
    tensors = {}
    for layer, expert, product in chosen:
        path = f"base_model.model.model.layers.{layer}.{where.format(expert)}.{names[product]}"
        size_in, size_out = (48, 32) if product == 2 else (32, 48)
        tensors[f"{path}.lora_A.weight"] = torch.randn(3, size_in, generator=generator) * 0.3
        tensors[f"{path}.lora_B.weight"] = torch.randn(size_out, 3, generator=generator) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "target_modules": list(names)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_experts(model, family: str, lora: TextLora):
    """The stock model with the LoRA of its experts added to their fused weights."""
    stock = copy.deepcopy(model.stock)
    _, names = EXPERT_PATHS[family]
    for path, pair in lora.adapter.components["model"].items():
        layer, expert = (int(number) for number in re.findall(r"\.(\d+)\.", path))
        product, experts = names.index(path.rpartition(".")[2]), stock.model.layers[layer].mlp.experts
        delta = lora.scale * pair.scale * pair.up @ pair.down
        if product == 2:
            experts.down_proj[expert] += delta
        else:
            experts.gate_up_proj[expert].view(2, 48, 32)[product] += delta
    return stock


@pytest.mark.drawn
@pytest.mark.parametrize("family", EXPERT_PATHS)
def test_loras_of_single_experts(family, tiny, run_all, prompt_of, tmp_path):
    """Each row has its experts and its adapters: beside others it gets what merged weights give it, bit for bit."""
    fields = {"num_local_experts": 5} if family == "mixtral" else {"num_experts": 5, "moe_intermediate_size": 48}
    model = tiny(family, 4, num_experts_per_tok=2, head_dim=8, **fields)
    everywhere = [(layer, expert, product) for layer in (0, 1) for expert in range(5) for product in range(3)]
    loras = [
        use(load_adapter(save_expert_lora(tmp_path / "all", family, 1, everywhere)), 0.7),
        use(load_adapter(save_expert_lora(tmp_path / "some", family, 2, everywhere[1::4]))),
    ]
    uses = [loras[:1], [], loras[1:], loras[1:]]
    requests = [
        ask(str(i), prompt_of(length), 8, *own)
        for i, (length, own) in enumerate(zip((21, 40, 3, 33), uses, strict=True))
    ]
    outcomes = run_all(model.engine(max_num_batched_tokens=30), requests, (0, 0, 1, 2))
    for request in requests:
        stock = merged_experts(model, family, request.loras[0]) if request.loras else model.stock
        assert outcomes[request.request_id].token_ids == greedy(stock, request.prompt_token_ids, 8)
        alone = run_all(model.engine(), [request])
        assert logprobs(alone[request.request_id]) == logprobs(outcomes[request.request_id])
    changed = [outcomes[str(i)].token_ids != model.greedy(prompt_of(n), 8) for i, n in ((0, 21), (2, 3), (3, 33))]
    assert any(changed)


def test_what_does_not_fit_is_refused_and_leaves_nothing(crowd, prompt_of, run_all):
    model, loras = crowd
    engine = model.engine()
    pair = LoraPair(torch.ones(2, 32), torch.ones(32, 2), 1.0)

    def lora(pairs, component="model") -> TextLora:
        return use(LoraAdapter(Path("x"), {component: pairs}))

    for bad, message in (
        (lora({"model.layers.7.self_attn.q_proj": pair}), "'model.layers.7.self_attn.q_proj' .* are not in Llama"),
        (lora({"model.layers.0.mlp.up_proj": pair}), r"\(in, out\) sizes \(32, 32\) do not fit a Linear of \(32, 48\)"),
        (lora({"model.embed_tokens": pair}), "is a Embedding, expected a linear"),
        (lora({"to_q": pair}, "unet"), "is not a LoRA of a language model"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.add_request(ask("r", prompt_of(5), 3, bad))
        assert not engine.has_work
    fine = ask("r", prompt_of(5), 3, use(loras[0]))
    assert len(run_all(engine, [fine])["r"].token_ids) == 3
