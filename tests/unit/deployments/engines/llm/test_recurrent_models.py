"""Language models with recurrent layers in the shared batch, beside the same weights in transformers' class itself."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.models.recurrent import StepMixer
from deployments.engines.llm.models.step_rows import step_inputs_of
from deployments.engines.llm.models.stock_classes import RECURRENT, WHOLE_PROMPTS
from deployments.engines.llm.state_slots import SLOTS_PER_SEQUENCE
from deployments.engines.records.protocol import EngineError, SamplingParams, TextLora, TextRequest
from infra.supported.language_models import (
    VOCABULARY,
    difference,
    excess,
    our_answers,
    run_apart,
    save_tiny,
    stock_answer,
    tiny_model,
)
from tests.kit.seeding import seeded_rng
from weights.operations.adapters import LoraAdapter, LoraPair

# Delta rules beside attention, and with experts; Mamba 2 beside attention, in the same layer, in attention's place, and
# alone; short convolutions; the first Mamba beside attention and alone, which read a prompt in one piece.
CLASSES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "NemotronHForCausalLM",
    "FalconH1ForCausalLM",
    "Mamba2ForCausalLM",
    "Lfm2ForCausalLM",
    "JambaForCausalLM",
    "MambaForCausalLM",
)
HYBRID = "Qwen3NextForCausalLM"
PIECE = 64
# Most differ by 1e-6. Where a norm's input is nearly zero it enlarges what was rounded: one draw in thirty is at 1e-3,
# one was at 2e-2. A wrong state differs by about 1.
MAX_DIFFERENCE = 0.1
LONG = {"max_position_embeddings": 512}


def drawn_prompt(length):
    return tuple(seeded_rng().integers(3, VOCABULARY, length).tolist())


@pytest.fixture
def hybrid(tmp_path):
    model = tiny_model(HYBRID, **LONG)
    return model, tmp_path, save_tiny(model, tmp_path)


def run(engine, **requests):
    """Return the tokens of requests that begin at once, and how much of each prompt was found."""
    for name, request in requests.items():
        engine.add_request(TextRequest(name, *request))
    tokens, found = {name: [] for name in requests}, {}
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
            found.setdefault(delta.request_id, delta.num_cached_tokens)
        assert not engine.failures, engine.failures
    return tokens, found


def greedy(count, **changes):
    return SamplingParams(max_tokens=count, ignore_eos=True, **changes)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("class_name", CLASSES)
def test_tokens_equal_generate_in_a_ragged_batch(class_name):
    """Prompts come in chunks of 24 tokens and fewer, or where that is less than a piece, of a piece."""
    assert class_name in RECURRENT
    assert difference(class_name, (5, 40, 1, 150), 8, **LONG) < MAX_DIFFERENCE


# Rows as long as those of real models, so that the kernels compute products of completions.
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "num_attention_heads": 2}
WIDE |= {"num_key_value_heads": 1, "linear_key_head_dim": 32, "linear_value_head_dim": 32}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("class_name", "changes"),
    [
        ("Qwen3_5ForCausalLM", WIDE),
        ("OlmoHybridForCausalLM", WIDE),
        ("Lfm2ForCausalLM", {"hidden_size": 128, "intermediate_size": 192}),
        ("Mamba2ForCausalLM", {"hidden_size": 128, "num_heads": 8, "head_dim": 32, "state_size": 32}),
    ],
)
def test_company_changes_no_bit(class_name, changes, tmp_path):
    """Neither what is beside a text in a step, nor where its prompt is cut."""
    changes = changes | LONG
    tensors = save_tiny(tiny_model(class_name, **changes), tmp_path)
    engine, narrow = (LLMEngine(tmp_path, tensors, LLMEngineConfig(max_num_batched_tokens=n)) for n in (512, 80))
    prompts = [drawn_prompt(length) for length in (5, 40, 1, 170, 130)]
    together = our_answers(engine, prompts, 12)
    for prompt, answer in zip(prompts, together, strict=True):
        for other in (engine, narrow):
            (alone,) = our_answers(other, [prompt], 12)
            assert alone.token_ids == answer.token_ids
            assert torch.equal(alone.logprobs, answer.logprobs)


def test_a_prompt_that_goes_on_is_found_up_to_its_last_cut(hybrid):
    model, folder, tensors = hybrid
    engine = LLMEngine(folder, tensors, LLMEngineConfig())
    prompt = drawn_prompt(150)
    tokens, found = run(engine, first=(prompt, greedy(6)))
    assert found == {"first": 0}
    longer = (*prompt, *tokens["first"], *drawn_prompt(9))
    tokens, found = run(engine, more=(longer, greedy(6)), again=(prompt, greedy(6)))
    assert found == {"more": 2 * PIECE, "again": 2 * PIECE}
    assert tokens["more"] == stock_answer(model, longer, 6)[0]
    assert tokens["again"] == stock_answer(model, prompt, 6)[0]


def test_what_two_prompts_began_with_is_found_by_the_third(hybrid):
    model, folder, tensors = hybrid
    engine = LLMEngine(folder, tensors, LLMEngineConfig())
    begin = drawn_prompt(2 * PIECE + 20)
    prompts = [(*begin, *drawn_prompt(length)) for length in (90, 100, 70)]
    found = [run(engine, r=(prompt, greedy(4))) for prompt in prompts]
    assert [one["r"] for _, one in found] == [0, 0, 2 * PIECE]
    assert [one["r"] for one, _ in found] == [stock_answer(model, prompt, 4)[0] for prompt in prompts]


@pytest.mark.parametrize("class_name", [HYBRID, "JambaForCausalLM"])
def test_several_completions_begin_with_one_state(class_name, tmp_path):
    model = tiny_model(class_name)
    engine, prompt = LLMEngine(tmp_path, save_tiny(model, tmp_path), LLMEngineConfig()), drawn_prompt(20)
    engine.add_request(TextRequest("r", prompt, greedy(6), n=3))
    found = [[], [], []]
    while engine.has_work:
        for delta in engine.step():
            found[delta.index] += delta.token_ids
    assert found == [stock_answer(model, prompt, 6)[0]] * 3
    assert free_slots(engine) == engine._scheduler._states._pool.num_blocks


def free_slots(engine):
    return engine._scheduler._states._pool.num_free


def test_a_failed_step_leaves_no_trace(hybrid, monkeypatch):
    """Steps of two sequences fail when their mixer has left its states: both run again alone, from those before."""
    model, folder, tensors = hybrid
    engine, prompts = LLMEngine(folder, tensors, LLMEngineConfig()), [drawn_prompt(9), drawn_prompt(80)]
    forward, num_rows = StepMixer.forward, []
    assert sum(isinstance(part, StepMixer) for part in engine._runner._model.module.modules()) == 1

    def failing(self, hidden_states, **given):
        result = forward(self, hidden_states, **given)
        num_rows.append([len(batch.rows) for batch in step_inputs_of(self).states.batches])
        if num_rows[-1] in ([9, 64, 16], [2]):
            raise RuntimeError("no memory")
        return result

    monkeypatch.setattr(StepMixer, "forward", failing)
    tokens, _ = run(engine, a=(prompts[0], greedy(6)), b=(prompts[1], greedy(6)))
    assert tokens == {"a": stock_answer(model, prompts[0], 6)[0], "b": stock_answer(model, prompts[1], 6)[0]}
    assert num_rows[:6] == [[9, 64, 16], [9], [64, 16], [2], [1], [1]]


def test_a_request_that_leaves_a_step_gives_its_slots_back(hybrid, monkeypatch):
    """It is cancelled behind the mixer of a step, which begins anew without it."""
    model, folder, tensors = hybrid
    engine, prompts = LLMEngine(folder, tensors, LLMEngineConfig()), [drawn_prompt(9), drawn_prompt(80)]
    forward, num_tokens = StepMixer.forward, []

    def cancelling(self, hidden_states, **given):
        result = forward(self, hidden_states, **given)
        num_tokens.append(hidden_states.shape[1])
        engine.request_cancel("b")
        return result

    monkeypatch.setattr(StepMixer, "forward", cancelling)
    tokens, _ = run(engine, a=(prompts[0], greedy(6)), b=(prompts[1], greedy(6)))
    assert num_tokens[0] > 80 > num_tokens[1]
    assert tokens == {"a": stock_answer(model, prompts[0], 6)[0], "b": []}
    assert free_slots(engine) == engine._scheduler._states._pool.num_blocks


def test_preempted_sequences_compute_their_states_again(tmp_path):
    model = tiny_model(HYBRID, **LONG)
    tensors = save_tiny(model, tmp_path)
    spec = LLMEngine(tmp_path, tensors, LLMEngineConfig())._runner._model.spec
    fixed = SLOTS_PER_SEQUENCE * spec.recurrent.slot_bytes
    block = 16 * sum(2 * heads.num_heads * heads.key_size * 4 for heads in spec.kv_layers)
    engine = LLMEngine(
        tmp_path, tensors, LLMEngineConfig(kv_cache_bytes=3 * fixed + 13 * block, max_num_seqs=3, max_model_len=180)
    )
    prompts = [drawn_prompt(length) for length in (70, 60, 50)]
    requests = [TextRequest(str(place), prompt, greedy(60, num_logprobs=0)) for place, prompt in enumerate(prompts)]
    answers = run_apart(engine, requests)
    assert engine.stats().num_preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert excess(answer, *stock_answer(copy.deepcopy(model), prompt, 60)) < MAX_DIFFERENCE


def test_states_are_counted_beside_the_blocks(hybrid):
    _, folder, tensors = hybrid
    engine = LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=2**24))
    recurrent = engine._runner._model.spec.recurrent
    held = [tensor for mixer in engine._runner._states._mixers for tensor in mixer.values()]
    assert recurrent.piece_tokens == PIECE
    assert sum(map(torch.Tensor.numel, held)) * 4 == recurrent.slot_bytes * len(held[0])
    fixed = SLOTS_PER_SEQUENCE * recurrent.slot_bytes
    small = LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=5 * fixed))
    assert small._scheduler.max_num_seqs == 2
    with pytest.raises(EngineError, match="states of a sequence need"):
        LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=fixed - 1))


@pytest.mark.parametrize(
    ("class_name", "changed"),
    [(HYBRID, "model.layers.0.linear_attn.in_proj_qkvz"), ("MambaForCausalLM", "backbone.layers.1.mixer.in_proj")],
)
def test_a_lora_of_a_recurrent_layer_changes_its_own_requests(tmp_path, class_name, changed):
    model = tiny_model(class_name)
    tensors = save_tiny(model, tmp_path)
    rows, columns = model.get_submodule(changed).weight.shape
    pair = LoraPair(torch.randn(4, columns), torch.randn(rows, 4), 0.5)
    lora = TextLora("l", LoraAdapter(tmp_path, {"model": {changed: pair}}), 1.0)
    engine, prompts = LLMEngine(tmp_path, tensors, LLMEngineConfig()), [drawn_prompt(20), drawn_prompt(33)]
    sampling = greedy(8, num_logprobs=0)
    plain, adapted = run_apart(
        engine, [TextRequest("0", prompts[0], sampling), TextRequest("1", prompts[1], sampling, loras=(lora,))]
    )
    assert excess(plain, *stock_answer(copy.deepcopy(model), prompts[0], 8)) < MAX_DIFFERENCE
    without = excess(adapted, *stock_answer(copy.deepcopy(model), prompts[1], 8))
    model.get_submodule(changed).weight += 0.5 * pair.up @ pair.down
    assert excess(adapted, *stock_answer(model, prompts[1], 8)) < MAX_DIFFERENCE < without


def test_prompt_log_probabilities_and_embeddings(hybrid):
    model, folder, tensors = hybrid
    engine, prompt = LLMEngine(folder, tensors, LLMEngineConfig()), drawn_prompt(100)
    output = model(torch.tensor([prompt]), output_hidden_states=True)
    expected = output.logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    engine.add_request(TextRequest("s", prompt, SamplingParams(max_tokens=1, num_logprobs=0), scores_prompt=True))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    found = torch.tensor([one.logprob for one in deltas[-1].prompt_logprobs[1:]])
    torch.testing.assert_close(found, expected, rtol=0, atol=MAX_DIFFERENCE)
    engine.add_request(TextRequest("e", prompt, SamplingParams(max_tokens=1), pooling="last"))
    (delta,) = [delta for delta in engine.step() if delta.embedding is not None]
    vector = torch.nn.functional.normalize(output.hidden_states[-1][0, -1], dim=0)
    torch.testing.assert_close(torch.from_numpy(delta.embedding), vector, rtol=0, atol=MAX_DIFFERENCE)


def test_a_model_without_recurrent_layers_is_not_taken_for_one_with_them(tmp_path):
    model = tiny_model(HYBRID, layer_types=["full_attention"] * 2)
    with pytest.raises(EngineError, match="a Qwen3NextForCausalLM without recurrent layers"):
        LLMEngine(tmp_path, save_tiny(model, tmp_path), LLMEngineConfig())


def test_whole_prompts_are_not_cut():
    assert WHOLE_PROMPTS & RECURRENT
    assert math.isfinite(difference("JambaForCausalLM", (150,), 4, **LONG))
