"""Steps in a replica of the text-encoder service, over the demo's classifier."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder
from unit.deployments.engines.text.test_classifiers import make, pairs_of

from configs.model import LongText
from deployments.engines.records.protocol import EngineError
from deployments.engines.text.sentence_layers import DenseHead
from deployments.modules.cache import ModuleCache
from deployments.modules.encoders import TextEncoderBuilder
from deployments.pipelines.plans import SegmentCall, SegmentPlan, StagePlan
from deployments.services import text_encoder
from deployments.services.text_encoder import _EncoderOps
from deployments.text.cache import Encoding, EncodingCache
from deployments.text.encode import CachedEncoders, EncodeJob, encode_batch_or_raise
from weights.memory.lifetimes import place

MODELS = Path(__file__).parents[4] / "infra" / "demo" / "models"
BERT, HEAD = MODELS / "texts-bert", MODELS / "texts-head"
LONG = "many words and more of them " * 100


class Bench:
    """`terms` are what the calls of the encoder were made with."""

    def __init__(self, host: ModuleCache) -> None:
        self.host = host
        self.terms: list[tuple[int, float | None]] = []
        self.encoders = CachedEncoders(EncodingCache(10**7), self._run)

    async def _run(self, jobs: Sequence[EncodeJob], priority: int, timeout_s: float | None) -> list[Encoding]:
        self.terms.append((priority, timeout_s))
        return encode_batch_or_raise(jobs)

    def ops(self, long_text: LongText = "truncate") -> _EncoderOps:
        stage = StagePlan("s", "embed", "bert", {}, {}, {})
        plan = SegmentPlan("p", (stage,), (), 4, {}, place([]))
        call = SegmentCall(plan, {}, 1, 2, 3.5, {}, {"bert": long_text})
        return _EncoderOps(self.host, self.encoders, call, self._no_rows)

    async def _no_rows(self, *_: Any) -> list[Any]:
        raise AssertionError("no program is to be run")

    def is_idle(self) -> bool:
        return not any(slot.leases for slot in self.host._modules.slots.values())


@pytest.fixture
def bench(open_host: Callable[..., ModuleCache]) -> Bench:
    return Bench(open_host(TextEncoderBuilder(), {"bert": BERT, "head": HEAD}))


async def test_ids_give_the_embedding_of_their_text(bench: Bench, calls_on_loop: Any) -> None:
    ops, texts = bench.ops(), ["one text", "another one"]
    tokenized = calls_on_loop(text_encoder, "tokenize_items")
    ids = await ops.tokenize("bert", texts, 0)
    assert tokenized == [False]
    by_ids = await ops.encode("bert", ids, 0)
    by_text = await ops.encode("bert", texts, 0)
    for first, second in zip(by_ids, by_text, strict=True):
        assert torch.equal(first, second)
    assert bench.terms == [(2, 3.5)]  # the second time they were in the cache
    assert ops.take_warnings() == []
    assert bench.is_idle()


@pytest.mark.parametrize("stage", ["tokenize", "encode"])
async def test_what_is_too_long_follows_the_models_rule(bench: Bench, stage: str) -> None:
    ops = bench.ops()
    await getattr(ops, stage)("bert", ["short", LONG], 8)
    (warning,) = ops.take_warnings()
    assert warning.startswith("input 9 was cut to ")
    assert ops.take_warnings() == []
    with pytest.raises(EngineError, match=r"input 9 has .* tokens, and at most"):
        await getattr(bench.ops("error"), stage)("bert", ["short", LONG], 8)
    with pytest.raises(EngineError, match="long_text 'chunk'"):
        await getattr(bench.ops("chunk"), stage)("bert", ["short"], 0)
    assert bench.is_idle()


async def test_a_cut_text_is_its_beginning(bench: Bench) -> None:
    ops = bench.ops()
    (ids,) = await ops.tokenize("bert", [LONG], 0)
    (whole,) = await ops.tokenize("bert", ["many words and more of them " * 3], 0)
    assert ids[: len(whole) - 1] == whole[:-1]
    by_ids, by_text = await ops.encode("bert", [ids], 0), await ops.encode("bert", [LONG], 0)
    assert torch.equal(by_ids[0], by_text[0])


async def test_a_head_is_applied_where_it_is_asked_to(bench: Bench) -> None:
    tensors = {name: tensor.float() for name, tensor in load_file(HEAD / "model.safetensors").items()}
    weight, bias = tensors["linear.weight"], tensors.get("linear.bias", torch.zeros(1))
    features = torch.randn(3, weight.shape[1])
    expected = features @ weight.T + bias
    torch.testing.assert_close(await bench.ops().head("head", features, None), expected)
    out = torch.empty(3, weight.shape[0])
    assert await bench.ops().head("head", features, out) is out
    torch.testing.assert_close(out, expected)
    with pytest.raises(EngineError, match="expected floating vectors"):
        await bench.ops().head("head", features[:, 1:], out)
    assert bench.is_idle()


async def test_who_leaves_gives_back_nothing_that_a_thread_still_writes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena is another call's afterwards."""
    begun, go = threading.Event(), threading.Event()
    apply = DenseHead.apply

    def slow(self: DenseHead, features: torch.Tensor, out: torch.Tensor | None = None) -> Any:
        begun.set()
        assert go.wait(10)
        return apply(self, features, out)

    monkeypatch.setattr(DenseHead, "apply", slow)
    size = load_file(HEAD / "model.safetensors")["linear.weight"].shape
    out = torch.full((1, size[0]), float("nan"))
    running = asyncio.create_task(bench.ops().head("head", torch.zeros(1, size[1]), out))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):  # however often
        running.cancel()
        await asyncio.sleep(0)
    assert not running.done()
    assert not bench.is_idle()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not out.isnan().any()
    assert bench.is_idle()


async def test_scores_of_pairs_equal_those_of_crossencoder(
    open_host: Callable[..., ModuleCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make(tmp_path / "ranker", "BertForSequenceClassification", 1)
    bench, pairs = Bench(open_host(TextEncoderBuilder(), {"ranker": tmp_path / "ranker"})), pairs_of(3, 5)
    ops = bench.ops()
    found = await ops.score("ranker", [tuple(pair) for pair in pairs], 0)
    stock = CrossEncoder(str(tmp_path / "ranker"), device="cpu").predict(pairs, convert_to_tensor=True)
    torch.testing.assert_close(torch.cat(list(found)), stock, atol=1e-5, rtol=0)
    await ops.score("ranker", [("alpha", "beta " * 100)], 7)
    [warning] = ops.take_warnings()
    assert warning.startswith("document 7 was cut to 64 tokens")
    assert bench.is_idle()
