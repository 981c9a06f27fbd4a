"""A T5 encoder with sentence-transformers files gives embeddings beside its token vectors."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from deployments.engines.records.protocol import EngineError
from deployments.engines.text.encoder import load_text_encoder

TEXTS = ["a handwritten seven", "", "naïve", "one more text that is longer than all of the others"]


@pytest.fixture
def folder(t5, tmp_path):
    shutil.copytree(t5.folder, tmp_path, dirs_exist_ok=True)
    shutil.copytree(t5.tokenizer_folder, tmp_path, dirs_exist_ok=True)
    stages = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (name, path) in enumerate(stages)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 30, "do_lower_case": False}))
    pooling = {"word_embedding_dimension": 12, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    for name, config in (("1_Pooling", pooling), ("2_Normalize", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def load(folder):
    return load_text_encoder(folder, "transformers", "T5EncoderModel", folder, load_file(folder / "model.safetensors"))


def test_equals_sentence_transformers(folder, t5, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stock = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, convert_to_tensor=True)
    ours = load(folder)
    texts = ours.tokenize(TEXTS, as_embedding=True)
    assert [text.num_ignored > 0 for text in texts] == [False, False, False, True]
    assert max(text.run_length for text in texts) == ours.max_tokens == 30
    outputs = ours.encode(texts)
    assert [output.keys() for output in outputs] == [{"embedding"}] * 4
    assert torch.allclose(torch.stack([output["embedding"] for output in outputs]), stock, atol=1e-5)
    # And its token vectors are still those of a T5.
    [hidden] = ours.encode(ours.tokenize(TEXTS[:1], 16))
    assert torch.equal(hidden["hidden"], t5.ours.encode(t5.ours.tokenize(TEXTS[:1], 16))[0]["hidden"])


def test_a_t5_without_those_files_gives_none(t5):
    with pytest.raises(EngineError, match="this encoder gives hidden per token, but no embedding"):
        t5.ours.encode(t5.ours.tokenize(["a"], as_embedding=True))
