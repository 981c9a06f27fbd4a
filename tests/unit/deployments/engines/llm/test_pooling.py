"""Embeddings by language models, against the hidden states of transformers."""

from __future__ import annotations

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.pooling import load_embedding_rules
from deployments.engines.llm.sequences.pooled_states import PooledStates
from deployments.engines.records.protocol import ComputationFailed, EngineError, TextRequest
from deployments.records import EmbeddingRequest
from deployments.records.errors import InvalidRequest
from deployments.services.text_prompts import embedding_requests


def embed(engine, prompts, pooling, beside=()):
    """The embedding of each prompt, computed in a batch with the requests `beside`."""
    for request in beside:
        engine.add_request(request)
    for i, prompt in enumerate(prompts):
        engine.add_request(TextRequest(f"e{i}", prompt, pooling=pooling))
    found = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.request_id.startswith("e"):
                assert delta.is_last
                assert (delta.token_ids, delta.num_completion_tokens, delta.finish_reason) == ((), 0, "stop")
                found[delta.request_id] = delta.embedding
        assert not engine.failures
    return [found[f"e{i}"] for i in range(len(prompts))]


def stock(model, prompt, pooling):
    """Return the embedding by transformers' hidden states of the last layer."""
    states = model.stock.model(torch.tensor([prompt])).last_hidden_state[0].double()
    vector = states.mean(0) if pooling == "mean" else states[-1]
    return (vector / vector.norm()).float()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_they_are_those_of_transformers(family, pooling, tiny, prompt_of):
    model = tiny(family, 0)
    prompts = [prompt_of(length, seed=length) for length in (1, 9, 70, 200)]
    found = embed(model.engine(max_num_batched_tokens=64), prompts, pooling)
    for prompt, vector in zip(prompts, found, strict=True):
        torch.testing.assert_close(torch.from_numpy(vector), stock(model, prompt, pooling), rtol=1e-4, atol=1e-5)


@pytest.mark.drawn
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_neither_cuts_nor_company_nor_the_cache_change_a_bit(pooling, tiny, prompt_of, request_of, run_all):
    model = tiny("llama", 0)
    prompts = [prompt_of(length, seed=1) for length in (3, 40, 130)]
    alone = [embed(model.engine(is_deterministic=True), [prompt], pooling)[0] for prompt in prompts]
    texts = [request_of(f"t{i}", prompt_of(20 + i), max_tokens=30) for i in range(3)]
    for options in ({"max_num_batched_tokens": 17}, {"max_prefill_beside_decode": 5}, {}):
        engine = model.engine(is_deterministic=True, **options)
        for _ in range(2):  # the second time, from what is cached
            found = embed(engine, prompts, pooling, texts)
            assert all((one == other).all() for one, other in zip(found, alone, strict=True))
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        outcome = run_all(engine, [request_of("r", prompts[1], max_tokens=5)])["r"]
        assert outcome.token_ids == model.greedy(prompts[1], 5)
        assert outcome.deltas[0].num_cached_tokens == 32, "what an embedding computed serves completions"


def test_a_chunk_that_is_computed_again_counts_once():
    states = torch.randn(10, 4)
    pooled = PooledStates(10, "mean")
    pooled.note_states(0, states[:6])
    pooled.note_states(0, states[:6])
    pooled.note_states(4, states[4:])
    expected = torch.nn.functional.normalize(states.double().mean(0), dim=0).float()
    torch.testing.assert_close(torch.from_numpy(pooled.vector()), expected)
    bad = PooledStates(1, "last")
    bad.note_states(0, torch.full((1, 4), float("nan")))
    with pytest.raises(ComputationFailed, match="not finite"):
        bad.vector()


def test_what_is_no_embedding_is_refused(tiny, prompt_of):
    engine = tiny("llama", 0).engine()
    with pytest.raises(EngineError, match="n is 2 for an embedding"):
        engine.add_request(TextRequest("r", prompt_of(5), n=2, pooling="mean"))
    with pytest.raises(EngineError, match="expected fewer than 257"):
        engine.add_request(TextRequest("r", prompt_of(257), pooling="mean"))


def sentence_folder(tmp_path, model, pooling, **config):
    """Write the folder of an embedding model as sentence-transformers has it: a decoder without a head."""
    folder = shutil.copytree(model.folder, tmp_path / "sentence")
    model.stock.model.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(stored | config))
    stages = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
    stages += [{"path": "2_Normalize", "type": "Normalize"}]
    rows = [
        stage | {"idx": i, "name": str(i), "type": f"sentence_transformers.models.{stage['type']}"}
        for i, stage in enumerate(stages)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "1_Pooling").mkdir()
    content = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False, **pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_sentence_transformers_folders_have_the_vectors_of_that_library(pooling, expected, tmp_path, tiny):
    model = tiny("llama", 0, tie_word_embeddings=True)
    folder = sentence_folder(tmp_path, model, pooling)
    texts = ["a", "some words", "and many more words of one text, é and ü"]
    stock = SentenceTransformer(str(folder), device="cpu", tokenizer_kwargs={"padding_side": "right"})
    stock.tokenizer.pad_token = "</s>"
    tensors = {name.removeprefix("model."): tensor for name, tensor in model.tensors.items()}
    engine = LLMEngine(folder, tensors, LLMEngineConfig())
    assert engine.embedding_rules.pooling == expected
    found = embed(engine, [engine.encode_text(text) for text in texts], engine.embedding_rules.pooling)
    theirs = [stock.encode(text) for text in texts]
    np.testing.assert_allclose(np.stack(found), np.stack(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode_cls_token": True}, r"unknown pooling 'pooling_mode_cls_token' \(known: mean, lasttoken\)"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "pooling mean and lasttoken; a language"),
    ],
)
def test_other_poolings_are_refused(pooling, message, tmp_path, tiny):
    folder = sentence_folder(tmp_path, tiny("llama", 0), pooling)
    with pytest.raises(EngineError, match=message):
        load_embedding_rules(folder, tiny("llama", 0).stock.config)


def test_a_plain_folder_means_the_last_token_and_gguf_says_its_pooling(tmp_path, tiny):
    config = tiny("llama", 0).stock.config
    assert load_embedding_rules(tiny("llama", 0).folder, config).pooling == "last"
    for number, expected in {None: "last", 0: "last", 1: "mean", 3: "last", 2: "cls", 4: "rank"}.items():
        file = tmp_path / f"{number}.gguf"
        writer = gguf.GGUFWriter(file, "qwen3")
        if number is not None:
            writer.add_pooling_type(gguf.PoolingType(number))
        writer.add_tensor("token_embd.weight", np.ones((2, 3), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if expected in ("last", "mean"):
            assert load_embedding_rules(file, config).pooling == expected
        else:
            with pytest.raises(EngineError, match=rf"qwen3\.pooling_type is {number}; supported are 0 \(none\), 1"):
                load_embedding_rules(file, config)


def test_vectors_are_cut_where_the_model_was_trained_for_it(tmp_path, tiny, prompt_of):
    model = tiny("llama", 0)
    trained = sentence_folder(tmp_path, model, {}, matryoshka_dimensions=[8, 16])
    rules = LLMEngine(trained, model.tensors, LLMEngineConfig()).embedding_rules
    rules.check_dimensions(8)
    (vector,) = embed(model.engine(), [prompt_of(5)], "last")
    cut = rules.shorten(vector, 8)
    np.testing.assert_allclose(cut, vector[:8] / np.linalg.norm(vector[:8].astype(np.float64)), rtol=1e-6)
    assert rules.shorten(vector, 32) is vector
    with pytest.raises(EngineError, match="dimensions: 12; the model was trained for 8, 16"):
        rules.check_dimensions(12)
    with pytest.raises(EngineError, match="not trained for fewer"):
        model.engine().embedding_rules.check_dimensions(8)


def test_prompts_stand_before_texts_and_not_before_ids(tmp_path, tiny):
    model = tiny("llama", 0)
    folder = shutil.copytree(model.folder, tmp_path / "prompted")
    said = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    engine = LLMEngine(folder, model.tensors, LLMEngineConfig())

    def tokens(**fields):
        [request], _ = embedding_requests(engine, EmbeddingRequest(model="m", **fields))
        return request.prompt_token_ids

    assert tokens(input=("rain",)) == tokens(input=("rain",), input_type="query") == engine.encode_text("find: rain")
    assert tokens(input=("rain",), prompt_name="document") == engine.encode_text("rain")
    assert tokens(input=((5, 6),)) == (5, 6)
    with pytest.raises(InvalidRequest, match=r"no prompt 'quary' \(known: query, document\)"):
        tokens(input=("rain",), prompt_name="quary")
