"""Programs as stages in a replica of the text-encoder service: tokenizer -> BERT -> classifier, beside transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from kit.programs import MAX_LENGTH, Classifier, export_bert, export_classifier, onnx_bert, tiny_bert
from transformers import AutoTokenizer, BertModel

from cluster.registry.directory import ModelRecord
from cluster.registry.manifests import summarize
from configs.pipeline import PipelineConfig
from deployments.engines.programs.bound import BoundProgram
from deployments.engines.programs.rows import ProgramJob, run_jobs
from deployments.modules.budget import ModuleBudget
from deployments.modules.cache import ModuleCache
from deployments.modules.encoders import TextEncoderBuilder
from deployments.pipelines.edge_types import tensor_of
from deployments.pipelines.planning import PipelineUnusable, plan_pipeline
from deployments.pipelines.plans import Edge, SegmentCall
from deployments.pipelines.segments import SegmentRunner
from deployments.records.errors import InvalidRequest
from deployments.services.text_encoder import _EncoderOps
from deployments.text.cache import EncodingCache
from deployments.text.encode import CachedEncoders
from weights.loading.provider import LocalExtents
from weights.operations.externalize import externalize
from weights.operations.intake import import_model
from weights.programs.exported import externalize_program
from weights.records.manifest import Manifest
from weights.storage.store import WeightStore

TOKENIZER = Path(__file__).parents[4] / "infra" / "demo" / "models" / "texts-bert"
TEXTS = ["a text", "another text that is longer", "the third one of them", "words"]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PIPELINE = {
    "id": "kinds",
    "inputs": {"text": "text"},
    "stages": [
        {"name": "tokens", "tokenizer": "texts", "inputs": {"text": "$text"}},
        {"name": "bert", "model": "bert", "inputs": {"input_ids": "$tokens"}},
        {"name": "classifier", "model": "classifier", "inputs": {"features": "$bert.pooler_output"}},
    ],
    "outputs": {"logits": "$classifier", "states": "$bert.last_hidden_state"},
}


class Extents(LocalExtents):
    def release(self, extents: object) -> None: ...

    def prefetch(self, extents: object) -> None: ...


class Bench:
    """A store with a tokenizer and two programs, and what a replica does with them. `batches` are their sizes."""

    def __init__(self, folder: Path) -> None:
        self.bert: BertModel = tiny_bert(len(AutoTokenizer.from_pretrained(TOKENIZER)))
        self.classifier = Classifier()
        self.batches: list[int] = []
        store = WeightStore(folder / "store")
        self.manifests = {
            "texts": externalize(store, "texts", TOKENIZER, dtype="float32"),
            "bert": externalize_program(store, "bert", export_bert(self.bert)),
            "classifier": externalize_program(store, "classifier", export_classifier(self.classifier)),
        }
        onnx.save(onnx_bert(self.bert), folder / "bert.onnx")
        self.manifests["onnx"] = import_model(store, "onnx", folder / "bert.onnx")
        self.records = {name: _record(store, manifest) for name, manifest in self.manifests.items()}
        builder = TextEncoderBuilder()
        self.cache = ModuleCache(self._fetch, Extents(store.packs), store.models, ModuleBudget(2**30), builder)
        self.encoders = CachedEncoders(EncodingCache(10**6), self._no_texts)

    async def _fetch(self, model: str, version: str | None) -> Manifest:
        return self.manifests[model]

    async def _no_texts(self, *_: Any) -> list[Any]:
        raise AssertionError("nothing is to be encoded")

    async def run_rows(self, jobs: Sequence[ProgramJob], priority: int, timeout_s: float | None) -> list[Any]:
        assert len({job.group for job in jobs}) == 1
        self.batches.append(len(jobs))
        return run_jobs(jobs)

    async def run(self, config: dict[str, Any], max_batch_size: int = 32, **inputs: Any) -> dict[str, np.ndarray]:
        plan = plan_pipeline(PipelineConfig.model_validate(config), self.records, max_batch_size)
        (segment,) = plan.segments()
        given = {Edge("", name): value for name, value in inputs.items()}
        call = SegmentCall(segment, given, len(next(iter(inputs.values()))))
        ops = _EncoderOps(self.cache, self.encoders, call, self.run_rows)
        result = await SegmentRunner().run_segment(call, (), ops)
        edges = plan.outputs.items()
        return {name: tensor_of(name, result.outputs[edge], plan.output_types[name]).data for name, edge in edges}

    def expected(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and hidden states (zeros behind the shorter ones), by transformers alone."""
        given = AutoTokenizer.from_pretrained(TOKENIZER)(texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            found = self.bert(given["input_ids"], given["attention_mask"])
            return self.classifier.dense(found.pooler_output), (
                found.last_hidden_state * given["attention_mask"][..., None]
            )


def _record(store: WeightStore, manifest: Manifest) -> ModelRecord:
    summary = summarize(manifest, store.skeleton(manifest))
    return ModelRecord(manifest.model, "ready", summary.kind, features=summary.features, signature=summary.signature)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("programs"))


@pytest.mark.drawn
@pytest.mark.parametrize(("bert", "max_batch_size"), [("bert", 32), ("bert", 3), ("onnx", 32)])
async def test_a_chain_of_programs_gives_what_transformers_gives(bench: Bench, bert: str, max_batch_size: int) -> None:
    tokens, second, classifier = PIPELINE["stages"]
    stages = [tokens, {**second, "model": bert}, classifier]
    found = await bench.run({**PIPELINE, "stages": stages}, max_batch_size, text=TEXTS)
    logits, states = bench.expected(TEXTS)
    np.testing.assert_allclose(found["logits"], logits, **CLOSE)
    np.testing.assert_allclose(found["states"], states, **CLOSE)


async def test_texts_of_unlike_lengths_are_one_batch(bench: Bench) -> None:
    bench.batches.clear()
    await bench.run(PIPELINE, text=TEXTS)
    assert bench.batches == [4, 4]


async def test_a_text_beyond_the_range_is_named_with_its_item_and_stage(bench: Bench) -> None:
    long = "word " * (MAX_LENGTH + 1)
    expected = r"stage 'bert': item 1: input 'input_ids' has size \d+ in dimension 1, the program takes 1 to"
    with pytest.raises(InvalidRequest, match=f"{expected} {MAX_LENGTH}"):
        await bench.run(PIPELINE, text=["short", long])


async def test_nothing_is_leased_afterwards(bench: Bench) -> None:
    await bench.run(PIPELINE, text=TEXTS)
    assert not any(slot.leases for slot in bench.cache._modules.slots.values())
    things = [slot.thing for slot in bench.cache._modules.slots.values()]
    assert sum(isinstance(thing, BoundProgram) for thing in things) == 2


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ({"inputs": {"features": "$tokens"}}, r"expected FP32\[-1,16\], but \$tokens is tokens"),
        ({"inputs": {"feature": "$bert.pooler_output"}}, "has no parameter 'feature'; did you mean 'features'"),
        ({"inputs": {"features": "$bert"}}, r"'bert' has several outputs; choose one of \$bert.last_hidden_state"),
    ],
)
def test_edges_that_do_not_fit_a_program_are_mistakes(bench: Bench, stage: dict[str, Any], problem: str) -> None:
    *before, last = PIPELINE["stages"]
    config = {**PIPELINE, "stages": [*before, {**last, **stage}]}
    with pytest.raises(PipelineUnusable, match=problem):
        plan_pipeline(PipelineConfig.model_validate(config), bench.records)
