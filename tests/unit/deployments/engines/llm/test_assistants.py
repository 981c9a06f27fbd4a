"""Gemma 4's assistants, which draft over the cache of the model: transformers' classes judge proposals and tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from unit.deployments.engines.llm.test_draft_model import answers, noted

from deployments.engines.llm.draft_model import AssistantProposals
from deployments.engines.llm.engine import LLMEngine, working_bytes
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.sequences.draft_pace import MOST
from deployments.engines.llm.sequences.kv_cache import bytes_per_block
from deployments.engines.records.protocol import EngineError, SamplingParams, TextRequest
from deployments.engines.servable import why_unservable
from infra.supported import vision_models
from infra.supported.language_models import VOCABULARY, save_tiny, tiny_model
from tests.kit.seeding import seeded_rng
from weights.formats.checkpoint import read_checkpoint
from weights.formats.own_draft import PREFIX

KINDS = {
    "Gemma4ForCausalLM": "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedForCausalLM": "Gemma4UnifiedAssistantForCausalLM",
}
WINDOW = 8
MODEL = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,  # without any, transformers keeps no keys for an assistant
    "sliding_window": WINDOW,
}


def making_assistants(patch: pytest.MonkeyPatch) -> None:
    """Let transformers make its assistants: the list of their layers' ways to keys is an error since 5.23."""
    for name in ("Gemma4TextConfig", "Gemma4UnifiedTextConfig"):
        kind = getattr(transformers, name)
        stock = kind.kv_sharing_modes.fget

        def modes(config: Any, stock: Callable[[Any], list[str]] = stock) -> list[str]:
            count = config.num_hidden_layers
            return ["reuse"] * count if config.num_kv_shared_layers == count else stock(config)

        patch.setattr(kind, "kv_sharing_modes", property(modes))


def assistant_of(model: Any, class_name: str, *, head_dim: int | None = None, **changes: Any) -> Any:
    """Return a random assistant of two layers of both kinds; the one with a window may have heads of another size."""
    text = model.config.to_dict() | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text |= {"num_kv_shared_layers": 2, "num_hidden_layers": 2, "layer_types": MODEL["layer_types"][:2]}
    text |= {"architectures": None, "head_dim": head_dim or text["head_dim"]}
    text["per_layer_config"] = {place: one for place, one in text.get("per_layer_config", {}).items() if int(place) < 2}
    kind = getattr(transformers, class_name)
    changes = {"backbone_hidden_size": model.config.hidden_size, **changes}
    config = kind.config_class(text_config=type(model.config).from_dict(text), **changes)
    with pytest.MonkeyPatch.context() as patch:
        making_assistants(patch)
        made = kind(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
    if made.masked_embedding is not None:
        made.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    made.generation_config.num_assistant_tokens = 4
    return made


def paired(folder: Path, model: Any, assistant: Any, **options: Any) -> tuple[LLMEngine, dict[str, torch.Tensor]]:
    """Return an engine of both for which no time passes, and its tensors."""
    tensors = save_tiny(model, folder)
    assistant.save_pretrained(folder / "draft")
    tensors |= {f"{PREFIX}{name}": one for name, one in load_file(folder / "draft" / "model.safetensors").items()}
    engine = LLMEngine(folder, tensors, LLMEngineConfig(**options))
    engine._clock = lambda: 0.0
    return engine, tensors


def drawn_requests(count: int, **options: Any) -> list[TextRequest]:
    rng = seeded_rng()
    prompts = [tuple(rng.integers(3, VOCABULARY, rng.integers(1, 40)).tolist()) for _ in range(count)]
    sampling = SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **options})
    return [TextRequest(str(place), prompt, sampling) for place, prompt in enumerate(prompts)]


@torch.no_grad()
def stock_proposals(model: Any, assistant: Any, token_ids: list[int], count: int) -> list[int]:
    """Return the tokens that the assistant's class proposes behind these, over a forward of the model's class."""
    before = model.model(torch.tensor([token_ids[:-1]]), return_shared_kv_states=True, use_cache=False)
    token, state = torch.tensor([token_ids[-1:]]), before.last_hidden_state[:, -1:]
    found = []
    for _ in range(count):
        output = assistant(
            inputs_embeds=torch.cat([model.get_input_embeddings()(token), state], -1),
            position_ids=torch.tensor([[len(token_ids) - 1]]),
            shared_kv_states=dict(before.shared_kv_states),
        )
        token, state = output.logits.argmax(-1), output.last_hidden_state
        found.append(int(token))
    return found


@pytest.mark.parametrize("class_name", KINDS)
def test_proposals_and_tokens_are_those_of_transformers(class_name, tmp_path, monkeypatch):
    model = tiny_model(class_name, **MODEL)
    ordered = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}
    assistant = assistant_of(model, KINDS[class_name], **(ordered if class_name == "Gemma4ForCausalLM" else {}))
    engine, _ = paired(tmp_path, model, assistant)
    made, propose = [], AssistantProposals.propose

    def noting(self: AssistantProposals, asked: Any, pickers: Any) -> Any:
        found = propose(self, asked, pickers)
        made.extend((list(chunk.sequence.token_ids), tokens) for chunk, tokens in zip(asked, found, strict=True))
        return found

    monkeypatch.setattr(AssistantProposals, "propose", noting)
    requests = drawn_requests(3)
    found, _ = answers(engine, requests)
    assert len(made) > 3
    assert max(len(token_ids) for token_ids, _ in made) > 2 * WINDOW
    for token_ids, tokens in made:
        assert list(tokens) == stock_proposals(model, assistant, token_ids, len(tokens))
        assert tokens
    for request in requests:
        ids = torch.tensor([request.prompt_token_ids])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 30}
        expected = model.generate(ids, assistant_model=assistant, min_new_tokens=30, **options)
        own = [token for (token,), *_ in found[request.request_id, 0]]
        assert own == expected[0, ids.shape[1] :].tolist()


def right_pair(class_name: str) -> tuple[Any, Any]:
    """Return a model whose next token follows from the last one alone, and an assistant that knows it."""
    model = tiny_model(class_name, **MODEL, tie_word_embeddings=False)
    assistant = assistant_of(model, KINDS[class_name], tie_word_embeddings=False)
    for one in (model, assistant):
        for layer in one.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    for layer in model.model.layers:
        layer.per_layer_projection.weight.zero_()
    size = model.config.hidden_size
    assistant.pre_projection.weight.copy_(torch.eye(size, 2 * size))
    assistant.model.norm.weight.copy_(model.model.norm.weight)
    assistant.lm_head.weight.copy_(model.lm_head.weight)
    return model, assistant


def test_all_tokens_of_an_assistant_that_knows_them_are_right(tmp_path, monkeypatch):
    model, assistant = right_pair("Gemma4ForCausalLM")
    engine, _ = paired(tmp_path, model, assistant)
    counts = noted(engine, monkeypatch)
    (request,) = drawn_requests(1, max_tokens=80)
    found, num_steps = answers(engine, [request])
    assert all(num_right == num_proposed for num_proposed, num_right in counts[:-1])
    assert max(counts)[0] == MOST
    assert num_steps < 20
    ids = torch.tensor([request.prompt_token_ids])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=80, min_new_tokens=80
    )
    assert [token for (token,), *_ in found["0", 0]] == expected[0, ids.shape[1] :].tolist()


def test_answers_are_those_without_it_in_any_batch(tmp_path, monkeypatch):
    model = tiny_model("Gemma4ForCausalLM", **MODEL)
    engine, tensors = paired(
        tmp_path, model, assistant_of(model, KINDS["Gemma4ForCausalLM"]), max_num_batched_tokens=24
    )
    counts = noted(engine, monkeypatch)
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    requests = [
        TextRequest(one.request_id, one.prompt_token_ids, one.sampling, n=1 + place % 2)
        for place, one in enumerate(drawn_requests(4, max_tokens=20, temperature=0.7, seed=3, num_logprobs=0))
    ]
    block_bytes = bytes_per_block(engine._runner._model.spec, torch.float32)
    for options in ({"max_num_batched_tokens": 24}, {"kv_cache_bytes": 6 * block_bytes, "max_model_len": 80}):
        expected, _ = answers(LLMEngine(tmp_path, plain, LLMEngineConfig(**options)), requests)
        engine = LLMEngine(tmp_path, tensors, LLMEngineConfig(**options))
        engine._clock = lambda: 0.0
        assert answers(engine, requests)[0] == expected
        assert answers(engine, requests)[0] == expected, "with prompts found in the cache"
    assert counts


def test_a_model_that_sees_images_has_one_too(tmp_path, monkeypatch):
    class_name = "Gemma4ForConditionalGeneration"
    model = vision_models.tiny_model(class_name)
    tensors = vision_models.save_tiny(class_name, model, tmp_path)
    text = SimpleNamespace(config=model.config.text_config)
    assistant_of(text, KINDS["Gemma4ForCausalLM"]).save_pretrained(tmp_path / "draft")
    of_draft = load_file(tmp_path / "draft" / "model.safetensors")
    assert why_unservable(read_checkpoint(tmp_path, parts={"draft": tmp_path / "draft"})) is None
    both = {**tensors, **{f"{PREFIX}{name}": one for name, one in of_draft.items()}}
    plain, engine = (LLMEngine(tmp_path, given, LLMEngineConfig()) for given in (tensors, both))
    engine._clock = lambda: 0.0
    counts = noted(engine, monkeypatch)
    chats = [vision_models.drawn_chat(seeded_rng(), num_images) for num_images in (0, 1, 2)]
    expected = vision_models.our_answers(plain, chats, 20)
    found = vision_models.our_answers(engine, chats, 20)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert counts


def test_it_takes_no_cache_and_is_served_as_a_draft_alone(tmp_path):
    model = tiny_model("Gemma4ForCausalLM", **MODEL)
    _, tensors = paired(tmp_path, model, assistant_of(model, KINDS["Gemma4ForCausalLM"]))
    found = read_checkpoint(tmp_path, parts={"draft": tmp_path / "draft"})
    assert why_unservable(found) is None
    assert "alone it writes nothing" in str(why_unservable(read_checkpoint(tmp_path / "draft")))
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    options: Any = {"kv_cache_bytes": 2**20, "max_num_seqs": 4, "tensor_bytes": sizes}
    assert working_bytes(tmp_path, torch.float32, torch.device("cpu"), **options) == 2**20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backbone_hidden_size": 48}, "draft: it reads states of 48 elements, those of the model have 32"),
        ({"head_dim": 64}, "draft: layer 0 has . heads of 64 elements, the model's keys . of"),
    ],
)
def test_one_of_other_sizes_is_refused(changes, words, tmp_path):
    model = tiny_model("Gemma4ForCausalLM", **MODEL)
    with pytest.raises(EngineError, match=words):
        paired(tmp_path, model, assistant_of(model, KINDS["Gemma4ForCausalLM"], **changes))


def test_one_with_other_layers_is_refused(tmp_path):
    model = tiny_model("Gemma4ForCausalLM", layer_types=["full_attention"] * 2, num_hidden_layers=2)
    with pytest.raises(EngineError, match="draft: it has layers of type 'sliding_attention', the model has none"):
        paired(tmp_path, model, assistant_of(model, KINDS["Gemma4ForCausalLM"]))


def test_another_dtype_is_refused(tmp_path):
    model = tiny_model("Gemma4ForCausalLM", **MODEL)
    _, tensors = paired(tmp_path, model, assistant_of(model, KINDS["Gemma4ForCausalLM"]))
    mixed = {name: one.bfloat16() if name.startswith(PREFIX) else one for name, one in tensors.items()}
    with pytest.raises(EngineError, match=r"its tensors are torch.bfloat16, those of the model torch.float32"):
        LLMEngine(tmp_path, mixed, LLMEngineConfig())
