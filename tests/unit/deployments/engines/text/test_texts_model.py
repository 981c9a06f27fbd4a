"""The shipped text classifier, through the store and the engine, and through stock sentence-transformers."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense

from deployments.engines.text.encoder import load_text_encoder
from deployments.engines.text.sentence_layers import load_dense_head
from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

DEMO = Path(__file__).resolve().parents[5] / "infra" / "demo"
BERT, HEAD = DEMO / "models" / "texts-bert", DEMO / "models" / "texts-head"
KINDS = ("tweet", "movie review", "product review", "editorial")
MIN_ACCURACY = 0.87


@pytest.fixture(scope="module")
def texts_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("texts_data", DEMO / "texts_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def held_out() -> list[tuple[str, str]]:
    """Kinds and texts."""
    lines = (DEMO / "texts_heldout.tsv").read_text("utf-8").splitlines()
    return [(kind, text) for kind, text in (line.split("\t") for line in lines)]


@pytest.fixture(scope="module")
def stock_scores(held_out: list[tuple[str, str]]) -> torch.Tensor:
    settings = {"dtype": torch.float32, "add_pooling_layer": False, "local_files_only": True}
    encoder = SentenceTransformer(str(BERT), device="cpu", model_kwargs=settings)
    assert encoder.max_seq_length == 128
    classifier = SentenceTransformer(modules=[*encoder, Dense.load(str(HEAD))], device="cpu")
    return classifier.encode([text for _, text in held_out], convert_to_tensor=True, batch_size=64)


def accuracy(scores_BC: torch.Tensor, held_out: list[tuple[str, str]]) -> float:
    answers = [KINDS[number] for number in scores_BC.argmax(-1).tolist()]
    return sum(answer == kind for answer, (kind, _) in zip(answers, held_out, strict=True)) / len(held_out)


def test_the_sample_has_every_kind_equally_often(held_out: list[tuple[str, str]]) -> None:
    assert [sum(kind == name for kind, _ in held_out) for name in KINDS] == [50] * len(KINDS)
    assert len({text for _, text in held_out}) == len(held_out)


@pytest.mark.slow
def test_stock_classes_tell_the_kinds_apart(held_out: list[tuple[str, str]], stock_scores: torch.Tensor) -> None:
    assert stock_scores.shape == (len(held_out), len(KINDS))
    assert accuracy(stock_scores, held_out) >= MIN_ACCURACY


@pytest.mark.slow
def test_store_and_engine_give_the_same_scores(
    tmp_path: Path, held_out: list[tuple[str, str]], stock_scores: torch.Tensor
) -> None:
    store = WeightStore(tmp_path)
    assert externalize(store, "texts-bert", BERT, dtype="float32").kind == "embedding"
    assert externalize(store, "texts-head", HEAD, dtype="float32").kind == "head"
    tensors = {model: load_from_store(tmp_path, model)["model"] for model in ("texts-bert", "texts-head")}
    encoder = load_text_encoder(BERT, "transformers", None, BERT, tensors["texts-bert"])
    head = load_dense_head(HEAD, tensors["texts-head"])
    tokens = encoder.tokenize([text for _, text in held_out])
    scores_BC = head.apply(torch.stack([output["embedding"] for output in encoder.encode(tokens)]))
    assert head.labels == KINDS
    assert torch.allclose(scores_BC, stock_scores, atol=1e-5)
    assert accuracy(scores_BC, held_out) >= MIN_ACCURACY


def test_no_document_is_in_two_parts(tmp_path: Path, texts_data: ModuleType) -> None:
    """Each text names its document: a random number of sentences each, and blocks where documents have no number."""
    for kind, name in texts_data.FILES.items():
        if kind in ("tweet", "movie review"):
            rows = [(f"{n}", f"{kind} {n // texts_data.BLOCK} said {n}") for n in range(1, 2001)]
        else:
            rows = [(f"{d}_{n}", f"{kind} {d} said {n}") for d in range(1, 61) for n in range(random.randint(1, 9))]
        rows += [("3_1" if "_" in rows[0][0] else "3", text) for text in ("Said by all.", "two words")]
        (tmp_path / name).write_text("".join(f"{number}\t0.1\t{text}\n" for number, text in rows))
    split = texts_data.load_split(texts_data.fetch(tmp_path))
    documents = [{text.rpartition(" said ")[0] for text, _ in part} for part in split]
    assert sum(map(len, documents)) == len(set.union(*documents)) == 2 * 41 + 2 * 60
    assert [Counter(name.rpartition(" ")[0] for name in part)["editorial"] for part in documents] == [45, 6, 9]
    texts = [text for part in split for text, _ in part]
    assert len(set(texts)) == len(texts)
    assert not {"Said by all.", "two words"} & set(texts)


def test_what_gives_a_file_away_is_taken_out(texts_data: ModuleType) -> None:
    raw = "RT @anonymous: so &amp; so,  ''quoted'' http://url_removed "
    assert texts_data.normalise(raw) == 'RT : so & so, "quoted"'
