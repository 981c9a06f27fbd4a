"""Classes of transformers over the paged cache, beside the same weights in the class itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from deployments.engines.llm.engine import LLMEngine, working_bytes
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.registry import create_any_model, load_config
from deployments.engines.llm.models.stock_classes import (
    DRAFTS_FOR,
    OWN_CACHE,
    PAGED,
    RECURRENT,
    SEEING,
    TEXT_ALONE,
    WHOLE_PROMPTS,
)
from deployments.engines.llm.sequences.sequence import Chunk, Sequence
from deployments.engines.records.protocol import EngineError, SamplingParams, StepAborted, TextLora, TextRequest
from deployments.engines.servable import why_unservable
from infra.supported.language_models import (
    MAX_ERROR,
    VOCABULARY,
    class_names,
    difference,
    our_answers,
    save_tiny,
    stock_answer,
    tiny_config,
    tiny_model,
)
from tests.kit.seeding import seeded_rng
from weights.formats.checkpoint import read_checkpoint
from weights.formats.language_models import CLASS_NAMES
from weights.operations.adapters import LoraAdapter, LoraPair

# Windows and soft caps, two kinds of rotation, sinks, keys and values of unlike sizes, chunks, experts, biases, one
# product for queries, keys and values, heads of unlike sizes, learned positions, layers that share keys.
CLASSES = {
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "Gemma4ForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "Phi3ForCausalLM": {},
    "Cohere2ForCausalLM": {},
    "GptOssForCausalLM": {},
    "DeepseekV2ForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
    "Llama4ForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "GraniteForCausalLM": {},
    "Starcoder2ForCausalLM": {"sliding_window": 20},
    "GPT2LMHeadModel": {},
    "NemotronForCausalLM": {},  # whose layers do not pass on what they are given
}
GEMMA = "Gemma3ForCausalLM"
MOSS = "MossTranscribeDiarizeForConditionalGeneration"


def drawn_prompt(length):
    return tuple(seeded_rng().integers(3, VOCABULARY, length).tolist())


@pytest.fixture
def gemma(tmp_path):
    model = tiny_model(GEMMA)
    return model, tmp_path, save_tiny(model, tmp_path)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("class_name", CLASSES)
def test_tokens_equal_generate_in_a_ragged_batch(class_name):
    assert class_name in PAGED
    assert difference(class_name, (5, 40, 1, 70), 16, **CLASSES[class_name]) < MAX_ERROR


# Rows as long as those of real models, so that the kernels compute products of completions.
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "num_attention_heads": 2}
WIDE |= {"num_key_value_heads": 1}
LATENT = {"hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "q_lora_rank": 64}
LATENT |= {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_head_dim": 64}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("class_name", "changes"),
    [
        ("Gemma2ForCausalLM", WIDE),
        ("Olmo2ForCausalLM", WIDE),
        ("CohereForCausalLM", WIDE),
        ("ModernBertDecoderForCausalLM", WIDE),
        ("OPTForCausalLM", {"hidden_size": 128, "ffn_dim": 192, "word_embed_proj_dim": 128}),
        ("GPT2LMHeadModel", {"n_embd": 64}),  # whose products are no linear layers
        # Whose experts' products have as many rows as tokens chose them.
        ("GptOssForCausalLM", WIDE | {"num_local_experts": 4}),
        ("GraniteMoeForCausalLM", WIDE),
        ("DeepseekV3ForCausalLM", LATENT),
        ("PhimoeForCausalLM", WIDE),
    ],
)
def test_company_changes_no_bit(class_name, changes, tmp_path):
    """Log probabilities show more than tokens: of texts alone, together, and beside a prompt that comes later."""
    engine = LLMEngine(tmp_path, save_tiny(tiny_model(class_name, **changes), tmp_path), LLMEngineConfig())
    prompts = [drawn_prompt(length) for length in (5, 40, 1, 70, 17)]
    together = our_answers(engine, prompts, 12)
    for prompt, answer in zip(prompts, together, strict=True):
        (alone,) = our_answers(engine, [prompt], 12)
        assert alone.token_ids == answer.token_ids
        assert torch.equal(alone.logprobs, answer.logprobs)
    assert difference(class_name, (5, 40, 1, 70), 16, **changes) < MAX_ERROR


def test_long_texts_beyond_the_padded_batches():
    """Beyond 512 tokens a completion attends alone, from where its keys lie."""
    assert difference(GEMMA, (600,), 4, max_position_embeddings=1024, sliding_window=530) < MAX_ERROR


def test_two_engines_take_turns(tmp_path):
    made = []
    for place, class_name in enumerate(("GptOssForCausalLM", "Gemma2ForCausalLM")):
        model, folder = tiny_model(class_name), tmp_path / str(place)
        made.append((model, LLMEngine(folder, save_tiny(model, folder), LLMEngineConfig())))
    prompts = [drawn_prompt(30), drawn_prompt(20)]
    tokens = [[], []]
    for (_, engine), prompt in zip(made, prompts, strict=True):
        engine.add_request(TextRequest("r", prompt, SamplingParams(max_tokens=8, ignore_eos=True)))
    while any(engine.has_work for _, engine in made):
        for own, (_, engine) in zip(tokens, made, strict=True):
            own += [token for delta in engine.step() for token in delta.token_ids]
    assert tokens == [stock_answer(model, prompt, 8)[0] for (model, _), prompt in zip(made, prompts, strict=True)]


def test_weights_are_the_given_ones_and_stay(gemma):
    _, folder, tensors = gemma
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    engine = LLMEngine(folder, tensors, LLMEngineConfig())
    used = {parameter.data_ptr() for parameter in engine._runner._model.module.parameters()}
    our_answers(engine, [drawn_prompt(20)], 4)
    assert used == {tensor.data_ptr() for tensor in tensors.values()}
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_a_prefix_is_found_again(gemma):
    model, folder, tensors = gemma
    engine = LLMEngine(folder, tensors, LLMEngineConfig())
    prompt = drawn_prompt(50)
    our_answers(engine, [prompt], 2)
    engine.add_request(TextRequest("again", prompt, SamplingParams(max_tokens=6, ignore_eos=True)))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert deltas[0].num_cached_tokens == 48
    assert [token for delta in deltas for token in delta.token_ids] == stock_answer(model, prompt, 6)[0]


def test_prompt_log_probabilities_and_embeddings(gemma):
    model, folder, tensors = gemma
    engine = LLMEngine(folder, tensors, LLMEngineConfig())
    prompt = drawn_prompt(70)
    output = model(torch.tensor([prompt]), output_hidden_states=True)
    expected = output.logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    engine.add_request(TextRequest("s", prompt, SamplingParams(max_tokens=1, num_logprobs=0), scores_prompt=True))
    (delta,) = [delta for _ in range(2) for delta in engine.step()][-1:]
    found = torch.tensor([one.logprob for one in delta.prompt_logprobs[1:]])
    torch.testing.assert_close(found, expected, rtol=0, atol=MAX_ERROR)
    engine.add_request(TextRequest("e", prompt, SamplingParams(max_tokens=1), pooling="last"))
    (delta,) = engine.step()
    vector = torch.nn.functional.normalize(output.hidden_states[-1][0, -1], dim=0)
    torch.testing.assert_close(torch.from_numpy(delta.embedding), vector, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("class_name", "changed"),
    [
        ("Olmo2ForCausalLM", "model.layers.1.self_attn.q_proj"),
        ("FuyuForCausalLM", "model.language_model.layers.1.self_attn.query_key_value"),
    ],
)
def test_a_lora_changes_its_own_requests(tmp_path, class_name, changed):
    model, folder = tiny_model(class_name), tmp_path
    tensors = save_tiny(model, folder)
    pairs = {}
    for layer in (changed, "lm_head"):  # few changes below the head are seen in greedy tokens
        rows, columns = model.get_submodule(layer).weight.shape
        pairs[layer] = LoraPair(torch.randn(4, columns), torch.randn(rows, 4), 0.5)
    adapter = LoraAdapter(folder, {"model": pairs})
    engine, prompts = LLMEngine(folder, tensors, LLMEngineConfig()), [drawn_prompt(20), drawn_prompt(33)]
    for name, prompt, loras in (("plain", prompts[0], ()), ("adapted", prompts[1], (TextLora("l", adapter, 1.0),))):
        engine.add_request(TextRequest(name, prompt, SamplingParams(max_tokens=8, ignore_eos=True), loras=loras))
    found = {"plain": [], "adapted": []}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
    assert found["plain"] == stock_answer(model, prompts[0], 8)[0]
    plain = stock_answer(model, prompts[1], 8)[0]
    for layer, pair in pairs.items():
        model.get_submodule(layer).weight += 0.5 * pair.up @ pair.down
    assert found["adapted"] == stock_answer(model, prompts[1], 8)[0] != plain


def test_a_step_ends_before_its_next_layer(gemma):
    _, folder, tensors = gemma
    runner = ModelRunner(create_any_model(load_config(folder), tensors, torch.device("cpu")), 4)
    sequence = Sequence("r", list(drawn_prompt(20)), 20, block_table=[2, 0])
    calls = []

    def check():
        calls.append(None)
        if len(calls) == 3:
            raise StepAborted

    with pytest.raises(StepAborted):
        runner.run([Chunk(sequence, 0, 20, True)], check)
    assert runner.run([Chunk(sequence, 0, 20, True)]).shape == (1, VOCABULARY)


def test_converted_experts_are_counted(tmp_path):
    model = tiny_model("GptOssForCausalLM")
    assert_converted(tmp_path / "whole", model, 0)
    model = tiny_model("OlmoeForCausalLM")
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert experts > 0
    assert_converted(tmp_path / "single", model, experts)


def assert_converted(folder, model, nbytes):
    sizes = {name: tensor.nbytes for name, tensor in save_tiny(model, folder).items()}
    cpu, limits = torch.device("cpu"), {"kv_cache_bytes": 2**20, "max_num_seqs": 4}
    assert working_bytes(folder, torch.float32, cpu, **limits, tensor_bytes=sizes) == 2**20 + nbytes


def test_longrope_ends_where_its_frequencies_change(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = tiny_model("Phi3ForCausalLM", rope_parameters=rope, original_max_position_embeddings=64)
    assert LLMEngine(tmp_path, save_tiny(model, tmp_path), LLMEngineConfig()).max_model_len == 64


# Distances in the scores, chosen keys, states that the modules themselves keep, convolutions beside keys and values,
# recurrent states that are no tensors of a cache layer.
OWN_CACHE_CLASSES = (
    "BloomForCausalLM",
    "DeepseekV32ForCausalLM",
    "RecurrentGemmaForCausalLM",
    "ZayaForCausalLM",
    "RwkvForCausalLM",
)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("class_name", OWN_CACHE_CLASSES)
def test_a_cache_of_its_own_equals_generate(class_name):
    assert class_name in OWN_CACHE
    # Most differ by 1e-6. Where a norm's input is nearly zero it enlarges what was rounded: one draw in thirty is at
    # 1e-3, one was at 2e-2. A wrong state differs by about 1.
    assert difference(class_name, (5, 40, 1, 50), 8) < 0.1


@pytest.fixture
def rwkv(tmp_path):
    model = tiny_model("RwkvForCausalLM")
    return model, tmp_path, save_tiny(model, tmp_path)


def test_states_are_counted_and_let_go(rwkv):
    _, folder, tensors = rwkv
    engine = LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=2**20))
    spec = engine._runner._model.spec
    assert spec.fixed_bytes > 0 == spec.block_bytes
    small = LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=4 * spec.fixed_bytes))
    assert small._scheduler.max_num_seqs == 2
    with pytest.raises(EngineError, match="states of a sequence need"):
        LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=spec.fixed_bytes - 1))
    small.add_request(TextRequest("r", drawn_prompt(5), SamplingParams(max_tokens=50, ignore_eos=True)))
    small.step()
    sequence = small._requests["r"][0].sequence
    assert sequence.state.num_tokens == 5
    small.abort("r")
    assert sequence.state is None


def test_a_failed_step_computes_its_states_again(rwkv, monkeypatch):
    """Both sequences run again alone, and neither goes on from a state that half a step left."""
    model, folder, tensors = rwkv
    engine, prompts = LLMEngine(folder, tensors, LLMEngineConfig()), [drawn_prompt(9), drawn_prompt(12)]
    expected = [stock_answer(model, prompt, 6)[0] for prompt in prompts]
    advance, calls = type(engine._runner._model).advance, []

    def failing(*arguments, **options):
        calls.append(None)
        logits = advance(*arguments, **options)
        if len(calls) == 6:
            raise RuntimeError("no memory")
        return logits

    monkeypatch.setattr(type(engine._runner._model), "advance", failing)
    assert [answer.token_ids for answer in our_answers(engine, prompts, 6)] == expected
    assert len(calls) > 12


def test_several_completions_each_have_states(rwkv):
    model, folder, tensors = rwkv
    engine, prompt = LLMEngine(folder, tensors, LLMEngineConfig()), drawn_prompt(20)
    engine.add_request(TextRequest("r", prompt, SamplingParams(max_tokens=6, ignore_eos=True), n=2))
    found = [[], []]
    while engine.has_work:
        for delta in engine.step():
            found[delta.index] += delta.token_ids
    assert found == [stock_answer(model, prompt, 6)[0]] * 2


# Computed by transformers, by our decoder, and of a config that is the decoder's and the model's in one.
@pytest.mark.drawn
@pytest.mark.parametrize("class_name", ["Gemma3nForConditionalGeneration", MOSS, "Phi4MultimodalForCausalLM"])
def test_a_decoder_alone_equals_the_whole_model(class_name):
    assert class_name in TEXT_ALONE
    assert difference(class_name, (5, 40), 12) < MAX_ERROR


def test_a_decoder_alone_under_old_and_new_names_sees_nothing(tmp_path):
    model, prompt = tiny_model("FuyuForCausalLM"), drawn_prompt(20)
    old, expected = save_tiny(model, tmp_path), stock_answer(model, prompt, 6)[0]
    new = {name: tensor for name, tensor in model.state_dict().items() if ".inv_freq" not in name}
    assert {"vision_embed_tokens.weight", "language_model.model.embed_tokens.weight"} < old.keys()
    assert {"model.vision_embed_tokens.weight", "model.language_model.embed_tokens.weight"} < new.keys()
    assert why_unservable(read_checkpoint(tmp_path)) is None
    for tensors in (old, new, new | {"model.stranger.weight": new["lm_head.weight"]}):  # which is left out
        engine = LLMEngine(tmp_path, tensors, LLMEngineConfig())
        assert our_answers(engine, [prompt], 6)[0].token_ids == expected
    with pytest.raises(EngineError, match="the model sees no images"):
        engine.chats.read_images([np.zeros((8, 8, 3), np.uint8)])


@pytest.mark.parametrize(("drafts", "whole"), DRAFTS_FOR.items())
def test_a_draft_names_the_model_that_it_is_for(drafts, whole, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [drafts]}))
    with pytest.raises(EngineError, match=f"a {drafts} drafts for a {whole}, whose keys and values"):
        load_config(tmp_path)


def test_every_class_is_in_one_table():
    tables = [PAGED, RECURRENT, OWN_CACHE, frozenset(CLASS_NAMES.values())]
    stock = PAGED | RECURRENT | OWN_CACHE
    assert frozenset.union(*tables) <= set(class_names())
    assert len(frozenset.union(*tables)) == sum(map(len, tables))
    assert WHOLE_PROMPTS <= RECURRENT | OWN_CACHE
    assert set(TEXT_ALONE.values()) <= PAGED | set(CLASS_NAMES.values())
    apart = TEXT_ALONE.keys() | DRAFTS_FOR.keys()
    assert apart <= set(class_names())
    assert not apart & (stock | SEEING)


REFUSED = {
    "layers": ("Gemma3ForCausalLM", {"layer_types": ["conv"] * 2}, "layers of type 'conv' of a Gemma3ForCausalLM"),
    "encoder": ("BertLMHeadModel", {"is_decoder": False}, "without `is_decoder` sees later tokens"),
    "quantized": ("Phi3ForCausalLM", {"quantization_config": {"quant_method": "awq"}}, "quantized weights of a Phi3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_are_refused(case, tmp_path):
    class_name, changes, words = REFUSED[case]
    content = tiny_config(class_name).to_dict() | {"architectures": [class_name]} | changes
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(EngineError, match=words):
        load_config(tmp_path)


def test_an_unknown_class_is_named_with_its_nearest(tmp_path):
    content = {"architectures": ["Gemma3ForCausalML"], "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(EngineError, match=r"transformers 5\..*nearest is Gemma3ForCausalLM; code .* is never run"):
        load_config(tmp_path)


def test_a_missing_tensor_is_named(gemma):
    _, folder, tensors = gemma
    del tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(EngineError, match="up_proj"):
        LLMEngine(folder, tensors, LLMEngineConfig())
