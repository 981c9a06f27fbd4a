"""Classifiers and rerankers of the real classes, tiny and random, against transformers and CrossEncoder."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder
from tokenizers import pre_tokenizers

from deployments.engines.records.protocol import EngineError
from deployments.engines.servable import why_unservable
from deployments.engines.text.encoder import TextEncoder, load_text_encoder
from deployments.engines.text.forward_plan import EncodeCounter
from deployments.engines.text.known import ACTIVATIONS, ScoringRule, read_scoring_rule
from deployments.engines.text.tokens import TextPair
from infra.supported.encoders import SPECIAL, WORDS, word_tokenizer
from weights.formats.checkpoint import read_checkpoint
from weights.operations.feature_sizes import feature_sizes
from weights.records.errors import FormatError

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
CLASSES: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": WIDTHS,
    "RobertaForSequenceClassification": WIDTHS | {"max_position_embeddings": 67},
    "XLMRobertaForSequenceClassification": WIDTHS | {"max_position_embeddings": 67},
    "DebertaV2ForSequenceClassification": WIDTHS
    | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    "ModernBertForSequenceClassification": WIDTHS | {"local_attention": 8, "classifier_pooling": "mean"},
    "ElectraForSequenceClassification": WIDTHS | {"embedding_size": 16},
    "DistilBertForSequenceClassification": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "MPNetForSequenceClassification": WIDTHS | {"max_position_embeddings": 67},
    "AlbertForSequenceClassification": WIDTHS | {"embedding_size": 16},
    "Qwen2ForSequenceClassification": WIDTHS | {"num_key_value_heads": 2, "vocab_size": 261},
    "GPT2ForSequenceClassification": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 261},
    "FNetForSequenceClassification": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "tpu_short_seq_length": 64,
    },
}


DECODERS = {
    "Qwen2ForSequenceClassification": transformers.Qwen2Tokenizer,
    "GPT2ForSequenceClassification": transformers.GPT2Tokenizer,
}


def byte_tokenizer(cls: Any) -> Any:
    """Bytes as tokens, without any between the texts of a pair, as decoders have them."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<sep>", "bos_token": "<cls>"}
    return cls(vocab={token: at for at, token in enumerate(tokens)}, merges=[], model_max_length=256, **names)


def make(folder: Path, class_name: str, num_labels: int, **said: Any) -> Any:
    """Save a tiny random model of a class with its tokenizer, and return it."""
    cls = getattr(transformers, class_name)
    sizes = {"vocab_size": len(SPECIAL) + len(WORDS)} | CLASSES[class_name] | ENDS | {"num_labels": num_labels}
    torch.manual_seed(7)
    module = cls(cls.config_class(**(sizes | said))).eval()
    for parameter in module.parameters():  # so that scores differ by more than rounding
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)
    module.save_pretrained(folder)
    if class_name in DECODERS:
        byte_tokenizer(DECODERS[class_name]).save_pretrained(folder)
    else:
        word_tokenizer(has_types=class_name[:4] in ("Bert", "Elec", "Albe", "FNet")).save_pretrained(folder)
    return module


def load(folder: Path) -> TextEncoder:
    return load_text_encoder(folder, "transformers", None, folder, load_file(folder / "model.safetensors"))


def pairs_of(seed: int, count: int, *, words: int = 12) -> list[TextPair]:
    print(f"seed {seed}")
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, words)))

    return [TextPair(text(), text()) for _ in range(count)]


def logits_of(encoder: TextEncoder, texts: list[Any], counter: EncodeCounter | None = None) -> torch.Tensor:
    outputs = encoder.encode_each(encoder.tokenize(texts, as_embedding=True), counter=counter)
    return torch.stack([output["embedding"] for output in outputs if isinstance(output, dict)])


def stock_logits(folder: Path, module: Any, texts: list[Any]) -> torch.Tensor:
    """One by one, as transformers reads a text or a pair."""
    stock = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        rows = [stock(*([text] if isinstance(text, str) else text), return_tensors="pt") for text in texts]
        return torch.cat([module(**row).logits for row in rows])


@pytest.mark.drawn(3)
@pytest.mark.parametrize("class_name", CLASSES)
def test_logits_equal_transformers_in_any_company(tmp_path, class_name):
    module, pairs = make(tmp_path, class_name, 3), pairs_of(11, 9)
    encoder, counter = load(tmp_path), EncodeCounter()
    stock = stock_logits(tmp_path, module, pairs)
    assert stock.std(0).min() > 1e-3  # pairs are told apart
    assert torch.allclose(logits_of(encoder, pairs, counter), stock, atol=1e-5 * stock.abs().max(), rtol=1e-5)
    alone = torch.cat([logits_of(encoder, [pair]) for pair in pairs])
    assert torch.allclose(alone, stock, atol=1e-5 * stock.abs().max(), rtol=1e-5)
    if class_name != "FNetForSequenceClassification":  # it has no mask: only equal lengths share a forward
        assert counter.encode_stats().forwards < len(pairs)
        assert counter.encode_stats().batch_padding_tokens > 0
    singles = [pair.first for pair in pairs[:3]]
    assert torch.allclose(
        logits_of(encoder, singles), stock_logits(tmp_path, module, singles), atol=1e-5 * stock.abs().max(), rtol=1e-5
    )


def test_types_of_a_pair_are_told_and_count_for_its_key(tmp_path):
    make(tmp_path, "BertForSequenceClassification", 2)
    encoder = load(tmp_path)
    [pair] = encoder.tokenize([TextPair("alpha beta", "gamma")], as_embedding=True)
    assert pair.type_ids == (0, 0, 0, 0, 1, 1)
    [single] = encoder.tokenize(["alpha"], as_embedding=True)
    assert single.type_ids == ()
    assert encoder.variant(pair) != encoder.variant(single)


def test_a_pair_that_is_too_long_loses_tokens_of_its_longer_text(tmp_path):
    make(tmp_path, "BertForSequenceClassification", 1)
    word_tokenizer(has_types=True, max_tokens=10).save_pretrained(tmp_path)
    [pair] = load(tmp_path).tokenize([TextPair("alpha beta", "gamma " * 20)], as_embedding=True)
    assert len(pair.token_ids) == 10
    assert pair.num_ignored == 2 + 20 + 3 - 10
    assert pair.token_ids[1:3] == (5, 6)


def test_a_decoder_without_a_filler_runs_texts_one_by_one(tmp_path):
    module, pairs = make(tmp_path, "Qwen2ForSequenceClassification", 1, pad_token_id=None), pairs_of(5, 4)
    encoder, counter = load(tmp_path), EncodeCounter()
    stock = stock_logits(tmp_path, module, pairs)
    assert torch.allclose(logits_of(encoder, pairs, counter), stock, atol=1e-5 * stock.abs().max())
    assert counter.encode_stats().max_texts == 1


@pytest.mark.drawn(2)
@pytest.mark.parametrize("activation", [None, torch.nn.Identity, torch.nn.Tanh])
@pytest.mark.parametrize("is_saved_by_it", [True, False])
def test_scores_of_a_reranker_equal_those_of_crossencoder(tmp_path, monkeypatch, activation, is_saved_by_it):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make(tmp_path, "BertForSequenceClassification", 1)
    if is_saved_by_it:
        folder = tmp_path / "saved"
        CrossEncoder(str(tmp_path), device="cpu", activation_fn=activation and activation()).save_pretrained(folder)
        assert (folder / "modules.json").exists()
    elif activation:
        folder = tmp_path
        say(folder, sentence_transformers={"activation_fn": f"{activation.__module__}.{activation.__name__}"})
    else:
        folder = tmp_path
    assert why_unservable(read_checkpoint(folder)) is None
    pairs = pairs_of(23, 6)
    stock = CrossEncoder(str(folder), device="cpu").predict(pairs, convert_to_tensor=True)
    encoder = load(folder)
    ours = torch.cat([encoder.scored(row) for row in logits_of(encoder, pairs)])
    assert torch.allclose(ours, stock, atol=1e-5)
    if activation is None:
        logits = logits_of(encoder, pairs)[:, 0]
        assert torch.allclose(ours, 1 / (1 + (-logits).exp()), atol=1e-6)
        assert encoder.scored(logits[:1], raw=True) == logits[:1]


def say(folder: Path, **said: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | said))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, ScoringRule("softmax", ("no", "yes"))),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "torch.nn.modules.activation.Sigmoid"),
        ({"problem_type": "regression"}, ScoringRule(ACTIVATIONS[0], ("LABEL_0", "LABEL_1"))),
        # A CrossEncoder of several classes is saved with its default, which gives logits.
        ({"sentence_transformers": {"activation_fn": ACTIVATIONS[0]}}, "softmax"),
        ({"sentence_transformers": {"activation_fn": ACTIVATIONS[-1]}}, ACTIVATIONS[-1]),
        ({"num_labels": 1, "sbert_ce_default_activation_function": ACTIVATIONS[0]}, ACTIVATIONS[0]),
        ({"num_labels": 1, "problem_type": "regression"}, ACTIVATIONS[-1]),  # as CrossEncoder has it
    ],
)
def test_the_rule_of_scores(tmp_path, said, expected):
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = read_scoring_rule(tmp_path)
    assert expected in (found, found.activation)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"sentence_transformers": {"activation_fn": "os.system"}},
            r"unknown activation_fn 'os.system' \(known: torch",
        ),
        ({"id2label": {"0": "a", "2": "b"}}, "expected id2label with a name for each of 0 to n - 1"),
        ({"id2label": {}}, "expected id2label"),
        ({"num_labels": 10**12}, "or num_labels; got 1000000000000"),
        ({"vocab_size": None}, "has no vocabulary of its own"),
    ],
)
def test_a_classifier_that_cannot_be_served_is_refused_by_its_files(tmp_path, said, message):
    make(tmp_path, "BertForSequenceClassification", 2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": None} | said))
    try:
        reason = why_unservable(read_checkpoint(tmp_path)) or ""
    except FormatError as error:
        reason = str(error)
    assert re.search(message, reason)
    assert str(tmp_path) in reason


@pytest.mark.parametrize(("num_labels", "kind"), [(1, "reranker"), (2, "classifier"), (5, "classifier")])
def test_a_folder_tells_its_kind_and_labels(tmp_path, num_labels, kind):
    make(tmp_path, "RobertaForSequenceClassification", num_labels)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.kind == kind
    assert why_unservable(checkpoint) is None
    sizes = feature_sizes(checkpoint.kind, checkpoint.components, tmp_path)
    assert sizes.out_features == num_labels
    assert sizes.labels == tuple(f"LABEL_{number}" for number in range(num_labels))


def test_what_is_no_classifier_scores_nothing(clip):
    with pytest.raises(EngineError, match="a CLIPTextModel scores nothing"):
        clip.ours.scored(torch.zeros(2))


def test_a_document_is_read_as_far_as_is_asked(tmp_path):
    make(tmp_path, "BertForSequenceClassification", 1)
    encoder, documents = load(tmp_path), ["gamma  delta, epsilon zeta", "eta", ""]
    pairs = [TextPair("alpha beta", document) for document in documents]
    found = encoder.tokenize(pairs, as_embedding=True, max_second=2)
    cut = [TextPair("alpha beta", document) for document in ("gamma  delta", "eta", "")]
    assert found == encoder.tokenize(cut, as_embedding=True)
    assert [text.num_ignored for text in found] == [0, 0, 0]
    assert encoder.tokenize(["alpha beta gamma"], max_second=2) == encoder.tokenize(["alpha beta gamma"])
    [long] = encoder.tokenize([TextPair("alpha", "beta " * 200)], as_embedding=True, max_second=100)
    assert (len(long.token_ids), long.num_ignored) == (64, 100 + 4 - 64)


def test_a_tokenizer_that_tells_no_characters_cuts_no_document(tmp_path):
    make(tmp_path, "BertForSequenceClassification", 1)
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path)
    slow = type("Slow", (), {"__getattr__": lambda self, name: False if name == "is_fast" else getattr(stock, name)})()
    encoder = TextEncoder(load(tmp_path).module, slow, scoring=ScoringRule(ACTIVATIONS[0], ("a",)))
    with pytest.raises(EngineError, match="does not say which characters"):
        encoder.tokenize([TextPair("alpha", "beta gamma")], max_second=1)
