"""Encoders that were saved with the head that guesses words, or without the name of their class: their body's vectors,
as `AutoModel` has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.tiny.parts import byte_tokenizer

from deployments.engines.servable import why_unservable
from deployments.engines.text.encoder import load_text_encoder
from weights.formats.checkpoint import read_checkpoint
from weights.loading.loader import load_model
from weights.loading.provider import LocalExtents
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SIZES |= {"max_position_embeddings": 64, "vocab_size": 300, "pad_token_id": 0}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 300, "max_position_embeddings": 64}


@pytest.mark.drawn
@pytest.mark.parametrize("names_class", [True, False])
@pytest.mark.parametrize(
    ("name", "head", "sizes"),
    [
        ("Bert", "ForMaskedLM", SIZES),
        ("Bert", "ForPreTraining", SIZES),
        ("Roberta", "ForMaskedLM", SIZES),
        ("XLMRoberta", "ForMaskedLM", SIZES),
        ("DistilBert", "ForMaskedLM", DISTIL),
        ("MPNet", "ForMaskedLM", SIZES),
        ("Electra", "ForMaskedLM", SIZES | {"embedding_size": 32}),
        (
            "ModernBert",
            "ForMaskedLM",
            SIZES | {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        ),
        ("Bert", "Model", SIZES),
    ],
)
def test_an_encoder_with_the_head_of_its_training_gives_its_bodys_vectors(
    name: str, head: str, sizes: dict[str, Any], names_class: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    config = getattr(transformers, f"{name}Config")(**sizes)
    getattr(transformers, name + head)(config).eval().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    if not names_class:
        del written["architectures"]
        (folder / "config.json").write_text(json.dumps(written))
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.kind, checkpoint.class_name) == ("embedding", f"{name}Model")
    assert why_unservable(checkpoint) is None
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "tiny", folder)
    component = manifest.components["model"]
    tensors = load_model(manifest, LocalExtents(store.packs))["model"]
    skeleton = store.skeleton(manifest)
    encoder = load_text_encoder(skeleton, component.library, component.class_name, skeleton, tensors)
    (outputs,) = encoder.encode(encoder.tokenize(["hello"]))
    stock = transformers.AutoModel.from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)("hello", return_tensors="pt")
    with torch.inference_mode():
        expected = stock(**{key: ids[key] for key in ("input_ids", "attention_mask")}).last_hidden_state[0].mean(0)
    assert torch.allclose(outputs["embedding"].flatten(), expected, atol=1e-5)


def test_an_encoder_of_an_unknown_type_without_a_class_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES)
    transformers.BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing", "vocab_size": 300}))
    assert "gives no token vectors" in str(why_unservable(read_checkpoint(tmp_path)))
