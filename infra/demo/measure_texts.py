"""Measures the text classifier with stock sentence-transformers: python infra/demo/measure_texts.py [--json].

Beside it the plain thing to do: TF-IDF and logistic regression, trained on the same texts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix
from sklearn.pipeline import make_pipeline

from model_folder import MODELS_DIR
from texts_data import DATA_DIR, KINDS, Example, fetch, load_split, read_held_out_sample

TARGET = 0.87

Kinds = npt.NDArray[np.int64]


def stock_classifier(models: Path) -> SentenceTransformer:
    """Both folders as one stock model, in float32, whose "embeddings" are the scores of the kinds."""
    # The folder says bf16, and without a pooler in it transformers would make up one that nobody asks.
    settings = {"dtype": torch.float32, "add_pooling_layer": False}
    encoder = SentenceTransformer(str(models / "texts-bert"), device="cpu", model_kwargs=settings)
    return SentenceTransformer(modules=[*encoder, Dense.load(str(models / "texts-head"))], device="cpu")


def bert_answers(models: Path, texts: list[str]) -> Kinds:
    return stock_classifier(models).encode(texts, batch_size=64).argmax(-1)


def baseline_answers(train: list[Example], texts: list[str]) -> Kinds:
    """C (1 or 10) and pairs of words beside words were chosen by the share right of all validation texts."""
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(vectorizer, LogisticRegression(C=10, class_weight="balanced", max_iter=1000))
    model.fit([text for text, _ in train], [kind for _, kind in train])
    return np.asarray(model.predict(texts))


def scores(examples: list[Example], answers: Kinds) -> dict[str, float]:
    """Share that is right: of each kind, their mean ("balanced"), and of all."""
    kinds = np.array([kind for _, kind in examples])
    per_kind = {name: float((answers == kinds)[kinds == number].mean()) for number, name in enumerate(KINDS)}
    return {"all": float((answers == kinds).mean()), "balanced": float(np.mean([*per_kind.values()])), **per_kind}


def show(console: Console, num: int, results: dict[str, dict[str, float]], confusion: npt.NDArray[np.int64]) -> None:
    names = list(next(iter(results.values())))
    table = Table("", *names, title=f"{num} held-out texts, share told right")
    for name, shares in results.items():
        table.add_row(name, *(f"{shares[part]:.1%}" for part in names))
    console.print(table)
    table = Table("is \\ was called", *KINDS, title="texts-bert + texts-head")
    for kind, row in zip(KINDS, confusion, strict=True):
        table.add_row(kind, *map(str, row))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the text classifier on texts of documents it never saw.")
    parser.add_argument("--models", type=Path, default=MODELS_DIR, help="where texts-bert and texts-head are")
    parser.add_argument("--data", type=Path, default=DATA_DIR, help="fetched when not there; default: %(default)s")
    parser.add_argument("--sample", action="store_true", help="only the shipped 200 texts: needs no data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    split = None if options.sample else load_split(fetch(options.data))
    examples = read_held_out_sample() if split is None else split.test
    texts = [text for text, _ in examples]
    answers = bert_answers(options.models, texts)
    results = {"BERT": scores(examples, answers)}
    if split is not None:
        results["TF-IDF, logistic regression"] = scores(examples, baseline_answers(split.train, texts))
    if options.json:
        rounded = {name: {part: round(share, 4) for part, share in of.items()} for name, of in results.items()}
        print(json.dumps({"texts": len(texts), **rounded}))
    else:
        show(Console(), len(texts), results, confusion_matrix([kind for _, kind in examples], answers))
    return 0 if results["BERT"]["balanced"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
