"""A whole text classifier with real weights as one segment; sentence-transformers on the same files is the judge."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cluster.registry.directory import ModelRecord
from configs.pipeline import PipelineConfig
from deployments.engines.text.encoder import load_text_encoder
from deployments.engines.text.sentence_layers import DenseHead, load_dense_head
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.plans import SegmentCall, SegmentResult
from deployments.pipelines.records import PipelineRequest, TensorValue
from deployments.pipelines.segments import SegmentRunner
from weights.operations.feature_sizes import FeatureSizes

pytestmark = pytest.mark.slow

MODELS = Path(__file__).parents[4] / "infra/demo/models"
LABELS = list(json.loads((MODELS / "texts-head/config.json").read_text())["id2label"].values())
CONFIG = {
    "id": "text-classifier",
    "inputs": {"text": "text"},
    "stages": [
        {"name": "tokens", "tokenizer": "texts-bert", "inputs": {"text": "$text"}},
        {"name": "embedding", "model": "texts-bert", "inputs": {"tokens": "$tokens"}},
        {"name": "logits", "model": "texts-head", "inputs": {"features": "$embedding"}},
        {"name": "classes", "function": "classify", "inputs": {"logits": "$logits", "labels": LABELS}},
    ],
    "outputs": {"label": "$classes.label", "scores": "$classes.scores"},
}


class InProcess:
    """The replica's half, around real modules, without leases, cache and batcher."""

    def __init__(self) -> None:
        from safetensors.torch import load_file

        bert, head = MODELS / "texts-bert", MODELS / "texts-head"
        tensors = {name: tensor.float() for name, tensor in load_file(bert / "model.safetensors").items()}
        self.encoder = load_text_encoder(bert, "transformers", None, bert, tensors)
        self.head_module: DenseHead = load_dense_head(head, load_file(head / "model.safetensors"))
        self.segments = SegmentRunner()

    def take_warnings(self) -> tuple[str, ...]:
        return ()

    async def tokenize(self, model: str, texts: Sequence[str], first: int) -> list[tuple[int, ...]]:
        return self.encoder.tokenize(texts)

    async def encode(self, model: str, texts: Sequence[tuple[int, ...]], first: int) -> list[torch.Tensor]:
        return [output["embedding"] for output in self.encoder.encode(texts)]

    async def head(self, model: str, features: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return self.head_module.apply(features, out)

    def run_segment(self, call: SegmentCall, upstream: tuple[()]) -> asyncio.Task[SegmentResult]:
        return asyncio.create_task(self.segments.run_segment(call, upstream, self))


async def test_labels_and_scores_are_those_of_the_stock_library() -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense

    ask = InProcess()
    head = ask.head_module
    vectors, scores = FeatureSizes(None, head.in_features), FeatureSizes(head.in_features, head.out_features)
    known = {
        "texts-bert": ModelRecord(
            "texts-bert", "ready", "embedding", features=FeatureSizes(out_features=head.in_features)
        ),
        "texts-head": ModelRecord(
            "texts-head", "ready", "head", features=FeatureSizes(head.in_features, head.out_features)
        ),
    }
    pipelines = Pipelines(
        [PipelineConfig.model_validate(CONFIG)], ask, SimpleNamespace(records=known), max_batch_size=4
    )
    assert len(pipelines.plan("text-classifier").units) == 1
    words = (MODELS / "texts-bert/README.md").read_text().split()
    texts = [" ".join(random.choices(words, k=random.randint(1, 60))) for _ in range(10)]
    data = np.array([text.encode() for text in texts], dtype=object)
    result = await pipelines.run_pipeline(
        PipelineRequest("text-classifier", {"text": TensorValue("text", "BYTES", data)})
    )

    stock = SentenceTransformer(str(MODELS / "texts-bert"), device="cpu").float()
    vectors = stock.encode(texts, convert_to_tensor=True)
    with torch.no_grad():
        logits = Dense.load(str(MODELS / "texts-head"))({"sentence_embedding": vectors})["sentence_embedding"]
    scores = logits.softmax(-1).numpy()
    np.testing.assert_allclose(result.outputs["scores"].data, scores, atol=1e-5)
    assert [label.decode() for label in result.outputs["label"].data] == [LABELS[row.argmax()] for row in scores]
    assert ask.segments.segment_stats().num_chunks == 3
    assert ask.segments.segment_stats().num_temporary == 0
