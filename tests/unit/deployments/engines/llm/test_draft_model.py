"""A small model that proposes tokens: transformers' generate and an engine without it judge the tokens."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kit.drawing import seeds
from transformers import OPTConfig, OPTForCausalLM
from unit.deployments.engines.llm.test_llm_loras import save_lora, use

from deployments.engines.llm.draft_model import create_draft
from deployments.engines.llm.engine import LLMEngine, working_bytes
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.sequences.draft_pace import LONGEST_PAUSE, MOST, UNKNOWN, DraftCost, DraftPace, best_length
from deployments.engines.llm.thought_budget import ThoughtBudget, ThoughtMarks
from deployments.engines.records.protocol import EngineError, TextRequest
from weights.formats.own_draft import PREFIX
from weights.operations.adapters import load_adapter

Pair = Callable[..., LLMEngine]


class Draft(NamedTuple):
    """A draft model: a folder with its config, and its tensors."""

    folder: Path
    tensors: dict[str, torch.Tensor]


@pytest.fixture
def paired(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Makes engines of a model and its draft, for which no time passes: costs are those guessed."""

    def make(model: Any, draft: Any, **options: Any) -> LLMEngine:
        folder = tmp_path_factory.mktemp("paired")
        shutil.copytree(model.folder, folder, dirs_exist_ok=True)
        shutil.copytree(draft.folder, folder / "draft")
        tensors = {**model.tensors, **{f"{PREFIX}{name}": tensor for name, tensor in draft.tensors.items()}}
        engine = LLMEngine(folder, tensors, LLMEngineConfig(**options))
        engine._clock = lambda: 0.0
        return engine

    return make


def answers(engine: LLMEngine, requests: list[TextRequest]) -> tuple[dict[tuple[str, int], list[Any]], int]:
    """Return tokens, texts, log probabilities and ends by request and completion, and the number of steps."""
    for request in requests:
        engine.add_request(request)
    found: dict[tuple[str, int], list[Any]] = {}
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        for delta in engine.step():
            own = found.setdefault((delta.request_id, delta.index), [])
            score = None if delta.logprob is None else pytest.approx(delta.logprob.logprob, abs=1e-3)
            own.append((delta.token_ids, delta.text, delta.finish_reason, delta.num_completion_tokens, score))
        assert not engine.failures
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return found, num_steps


def noted(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the numbers of proposed and right tokens of each proposal."""
    found: list[tuple[int, int]] = []
    note = DraftPace.note
    monkeypatch.setattr(DraftPace, "note", lambda self, *counts: (found.append(counts), note(self, *counts)))
    return found


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "of_draft"), [("llama", "qwen3"), ("mixtral", "llama"), ("qwen3", "mistral")])
def test_answers_are_the_same_in_a_batch_of_all_kinds(tiny, paired, request_of, prompt_of, family, of_draft):
    model, draft = tiny(family), tiny(of_draft, 7, num_hidden_layers=1)
    begin = prompt_of(20)
    requests = []
    for number in range(6):
        prompt = (*begin[: random.choice([0, 17, 20])], *prompt_of(random.randrange(1, 50), number))
        options = {"max_tokens": random.randrange(1, 50), "seed": number, "num_logprobs": random.choice([None, 0])}
        options |= random.choice([{}, {"temperature": 0.4, "top_k": 4}, {"repetition_penalty": 1.1}])
        requests.append(TextRequest(str(number), prompt, request_of("r", prompt, **options).sampling, n=1 + number % 2))
    limits = {"max_num_batched_tokens": random.choice([24, 512]), "max_num_seqs": random.choice([3, 64])}
    expected, _ = answers(model.engine(**limits), requests)
    for other in (draft, model):
        engine = paired(model, other, **limits)
        assert answers(engine, requests)[0] == expected
        assert answers(engine, requests)[0] == expected, "with prompts found in the cache"


def ends(engine: LLMEngine, requests: list[TextRequest]) -> dict[tuple[str, int], list[Any]]:
    """Return the text of each completion, its tokens, its end, and the scored tokens of its prompt and its own."""
    for request in requests:
        engine.add_request(request)
    found: dict[tuple[str, int], list[Any]] = {}
    while engine.has_work:
        for delta in engine.step():
            text, tokens, _, scored = found.setdefault((delta.request_id, delta.index), ["", (), None, ()])
            for one in (*delta.prompt_logprobs, *([delta.logprob] if delta.logprob else [])):
                scored += tuple((token, pytest.approx(score, abs=1e-3)) for token, score in one.best)
            end = delta.finish_reason, delta.stopped_by
            found[delta.request_id, delta.index] = [text + delta.text, tokens + delta.token_ids, end, scored]
        assert not engine.failures
    return found


@pytest.mark.parametrize("is_equal", [True, False])
def test_answers_of_all_forms_are_the_same(tiny, paired, request_of, prompt_of, monkeypatch, is_equal):
    model = tiny("llama", random.randrange(50))
    draft = model if is_equal else tiny("qwen3", 7, num_hidden_layers=1)
    plain = model.engine()
    schema = {"type": "array", "items": {"enum": [True, "red", 17]}, "minItems": 2, "maxItems": 5}
    marks = ThoughtMarks(("<t>",), ("</t>",), plain.encode_text("</t>"), lambda token: plain.tokenizer.decode([token]))
    grammar = plain.grammars.compile_schema(schema)
    sampling = request_of("r", (1,), max_tokens=60, ignore_eos=True).sampling
    requests = []
    for warmth in (0.0, 0.8):
        drawn = replace(sampling, temperature=warmth, seed=5)
        (texts,) = ends(plain, [TextRequest("r", prompt_of(9), drawn)]).values()
        stops = replace(drawn, stop=(texts[0][20:22], "never"))
        requests += [
            TextRequest(f"grammar {warmth}", prompt_of(20), drawn, 2, grammar),
            TextRequest(f"stop {warmth}", prompt_of(9), stops),
            TextRequest(f"token {warmth}", prompt_of(9), replace(drawn, stop_token_ids=texts[1][25:26])),
            TextRequest(f"scores {warmth}", prompt_of(17), replace(drawn, num_logprobs=3), scores_prompt=True),
            TextRequest(f"budget {warmth}", prompt_of(12), drawn, 2, ThoughtBudget(marks, 7, is_thinking=True)),
            TextRequest(f"both {warmth}", prompt_of(12), drawn, 1, ThoughtBudget(marks, 7, True, grammar)),
        ]
    expected = ends(plain, requests)
    engine = paired(model, draft)
    counts = noted(engine, monkeypatch)
    assert ends(engine, requests) == expected
    assert counts
    assert expected["stop 0.0", 0][2] == ("stop", requests[1].sampling.stop[0])
    assert "</t>" in expected["budget 0.8", 1][0]


def test_tokens_are_those_of_transformers_with_the_assistant(tiny, paired, request_of, prompt_of):
    model, draft, prompt = tiny("llama", 3), tiny("llama", 4, num_hidden_layers=1), prompt_of(30)
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 40}
    expected = model.stock.generate(ids, assistant_model=draft.stock, **options)[0, 30:].tolist()
    found, _ = answers(paired(model, draft), [request_of("r", prompt, max_tokens=40)])
    assert [token for (token,), *_ in found["r", 0]] == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 7}, {"temperature": 2.0, "top_p": 0.9}])
def test_all_tokens_of_an_equal_model_are_right(tiny, paired, request_of, prompt_of, monkeypatch, options):
    model = tiny("qwen2", 5)
    engine = paired(model, model)
    counts = noted(engine, monkeypatch)
    _, num_steps = answers(engine, [request_of("r", prompt_of(40), max_tokens=100, ignore_eos=True, **options)])
    assert all(num_right == num_proposed for num_proposed, num_right in counts[:-1])
    assert max(counts)[0] == MOST
    assert num_steps < 20


def test_a_model_that_is_never_right_is_seldom_asked(tiny, paired, request_of, prompt_of, monkeypatch):
    model, other = tiny("llama", 3), tiny("llama", 4, num_hidden_layers=1)
    head = torch.zeros_like(other.tensors["lm_head.weight"])  # it proposes token 0
    engine = paired(model, Draft(other.folder, {**other.tensors, "lm_head.weight": head}))
    counts = noted(engine, monkeypatch)
    _, num_steps = answers(engine, [request_of("r", prompt_of(9), max_tokens=240, ignore_eos=True)])
    assert num_steps <= 240
    assert 2 < len(counts) < 16
    assert sum(num_proposed for num_proposed, _ in counts) < 40


def test_answers_are_the_same_where_blocks_run_out(tiny, paired, request_of, prompt_of):
    model, draft = tiny("qwen3", 3, head_dim=16), tiny("qwen3", 4, head_dim=16, num_hidden_layers=1)
    requests = [request_of(str(i), prompt_of(20, i), max_tokens=40, ignore_eos=True) for i in range(4)]
    tight = paired(model, draft, kv_cache_bytes=3 * 2 * 16 * 2 * 16 * 4 * 9)
    assert tight.stats().num_blocks == 9, "a block has the keys and values of three layers"
    found, _ = answers(tight, requests)
    assert tight.stats().num_preemptions > 0
    assert found == answers(model.engine(), requests)[0]


def test_answers_are_the_same_without_a_draft_that_fails(tiny, paired, request_of, prompt_of, monkeypatch):
    model = tiny("llama", 3)
    requests = [request_of(str(i), prompt_of(20, i), max_tokens=40, ignore_eos=True) for i in range(3)]
    engine, plain = paired(model, model), answers(model.engine(), requests)[0]
    runner, calls = engine._draft._proposals._runner, []

    def run(chunks: Any) -> torch.Tensor:
        calls.append(len(chunks))
        if len(calls) % 3:
            raise RuntimeError("no memory")
        return type(runner).run(runner, chunks)

    monkeypatch.setattr(runner, "run", run)
    assert answers(engine, requests)[0] == plain
    assert len(calls) > 3


def test_texts_beyond_the_positions_of_the_draft_go_on_without_it(
    tiny, paired, request_of, prompt_of, monkeypatch, tmp_path
):
    model = tiny("llama", 3)
    config = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 260}
    small = OPTForCausalLM(OPTConfig(**config, word_embed_proj_dim=32, max_position_embeddings=48)).eval()
    small.config.architectures = ["OPTForCausalLM"]
    small.config.save_pretrained(tmp_path)
    draft = Draft(tmp_path, {name: one for name, one in small.state_dict().items() if name != "lm_head.weight"})
    requests = [request_of(str(size), prompt_of(size), max_tokens=40, ignore_eos=True) for size in (20, 60)]
    engine = paired(model, draft)
    counts = noted(engine, monkeypatch)
    assert answers(engine, requests)[0] == answers(model.engine(), requests)[0]
    assert counts


def test_an_adapter_changes_the_large_model_alone(tiny, paired, request_of, prompt_of, tmp_path):
    model, draft = tiny("llama", 3), tiny("llama", 4)
    save_lora(tmp_path, model, ["q_proj", "down_proj"], seed=1)
    loras = (use(load_adapter(tmp_path)),)
    prompt = prompt_of(20)
    requests = [
        TextRequest(str(number), prompt, request_of("r", prompt, max_tokens=30, seed=1).sampling, loras=chosen)
        for number, chosen in enumerate(((), loras))
    ]
    expected = answers(model.engine(), requests)[0]
    assert expected["0", 0] != expected["1", 0]
    assert answers(paired(model, draft), requests)[0] == expected


def test_a_cache_has_room_for_both(tiny, paired, tmp_path):
    model, draft = tiny("llama", 3), tiny("qwen3", 4, num_hidden_layers=1)
    engine = paired(model, draft, kv_cache_bytes=2**20, max_num_seqs=100)
    caches = [runner._cache for runner in (engine._runner, engine._draft._proposals._runner)]
    tensors = [tensor for cache in caches for half in (cache._keys, cache._values) for tensor in half.tensors]
    taken = sum(tensor.nbytes for tensor in tensors) + sum(4 * head for head in (8 // 2, 16 // 2))
    shutil.copytree(model.folder, tmp_path, dirs_exist_ok=True)
    shutil.copytree(draft.folder, tmp_path / "draft")
    sizes = {f"{PREFIX}{name}": tensor.nbytes for name, tensor in draft.tensors.items()}
    options: dict[str, Any] = {"kv_cache_bytes": 2**20, "max_num_seqs": 100}
    cpu = torch.device("cpu")
    assert abs(working_bytes(tmp_path, torch.float32, cpu, **options, tensor_bytes=sizes) - taken) < 256
    assert taken <= 2**20 + 2**13


@seeds(20)
def test_the_best_number_of_tokens_has_the_most_per_time(seed: int) -> None:
    rng = random.Random(seed)
    rate, cost, most = rng.random(), 10 ** rng.uniform(-2, 0.5), rng.randrange(1, 10)
    speeds = [1.0]
    for length in range(1, most + 1):  # right are the tokens before the first wrong one
        expected = sum(number * rate**number * (1 - rate) for number in range(length)) + length * rate**length
        speeds.append((1 + expected) / (1 + length * cost))
    found = best_length(rate, cost, most)
    assert speeds[found] == pytest.approx(max(speeds), rel=0.03)
    assert speeds[found] > 1.03 or not found


def test_a_dear_draft_pauses_ever_longer_and_goes_on_where_it_pays() -> None:
    cost = DraftCost()
    subject = DraftPace(10_000, cost)
    assert set(subject.propose(range(10), 100)) == {UNKNOWN}
    for _ in range(20):
        cost.note(4, extra_s=8.0, step_s=1.0)  # a token costs two steps
    pauses = []
    for _ in range(9):
        subject.note(1, 1)
        pauses.append(0)
        while not subject.propose(range(10), 100):
            pauses[-1] += 1
    assert pauses == [1, 2, 4, 8, 16, 32, *[LONGEST_PAUSE] * 3]
    for _ in range(20):
        cost.note(4, extra_s=0.0, step_s=1.0)
    subject.note(1, 1)
    assert len(subject.propose(range(10), 100)) == MOST
    assert len(subject.propose(range(10), 3)) == 3
    assert len(DraftPace(13, cost).propose(range(10), 100)) == 2  # one is drawn in any case
    assert DraftPace(11, cost).propose(range(10), 100) == ()


def test_a_draft_gets_the_texts_themselves(tiny, paired, request_of, prompt_of, monkeypatch):
    model = tiny("llama", 3)
    engine, copied = paired(model, model), []
    runner = engine._draft._proposals._runner

    def run(chunks: Any) -> torch.Tensor:
        own = {id(one.sequence.token_ids) for completions in engine._requests.values() for one in completions}
        copied.extend(id(chunk.sequence.token_ids) not in own for chunk in chunks)
        return type(runner).run(runner, chunks)

    monkeypatch.setattr(runner, "run", run)
    answers(engine, [request_of("r", prompt_of(20), max_tokens=20)])
    assert copied
    assert not any(copied), "a text of 131,072 tokens would be copied at each step"


def test_a_model_may_have_tensors_called_draft(tiny, request_of, prompt_of):
    model, request = tiny("llama", 3), request_of("r", prompt_of(20), max_tokens=9)
    named = {**model.tensors, "draft.weight": torch.ones(2)}
    assert answers(LLMEngine(model.folder, named, LLMEngineConfig()), [request]) == answers(model.engine(), [request])


def test_a_draft_that_lacks_a_tensor_is_refused(tiny, paired):
    model = tiny("llama", 3)
    with pytest.raises(EngineError, match="missing"):
        paired(model, Draft(model.folder, {"model.norm.weight": torch.ones(32)}))


def test_a_model_of_several_ranks_has_none(tiny, paired):
    model = tiny("llama", 3)
    engine = paired(model, model)
    ranked = replace(engine._runner._model, ranks=object())
    with pytest.raises(EngineError, match="that several ranks compute has no draft model"):
        create_draft(Path(engine.tokenizer.name_or_path), model.tensors, ranked, LLMEngineConfig())
