"""Whole folders of sentence-transformers, written by its own classes: every pooling, Dense layers and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.seeding import seeded_random
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from torch import nn

from deployments.engines.libraries.embedding_rules import Prompts, read_prompts
from deployments.engines.records.protocol import EngineError
from deployments.engines.servable import why_unservable
from deployments.modules.encoders import TextEncoderBuilder
from deployments.text.cache import Encoding, EncodingCache
from deployments.text.encode import CachedEncoders, EncodeJob, encode_batch_or_raise
from infra.supported.encoders import CLASSIFIERS, ENCODERS, WORDS, Row, make_model, measure_difference, why_refused
from weights.formats.checkpoint import read_checkpoint
from weights.operations.externalize import externalize
from weights.operations.feature_sizes import feature_sizes
from weights.operations.layouts import write_inline
from weights.records.errors import FormatError
from weights.storage.store import WeightStore

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def draw_texts(count: int = 7) -> list[str]:
    draw = seeded_random()
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(count)]


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that saves a tiny BERT with stages behind it, and returns the stock model and its folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def saved(*later: nn.Module, modes: Any = "mean", **said: Any) -> tuple[SentenceTransformer, Path]:
        make_model(tmp_path / "bert", Row("BertModel"))
        inner = Transformer(str(tmp_path / "bert"))
        stock = SentenceTransformer(modules=[inner, Pooling(32, modes), *later], device="cpu", **said)
        stock.save_pretrained(str(tmp_path / "saved"))
        return stock, tmp_path / "saved"

    return saved


@pytest.fixture
def embed(open_host: Any) -> Any:
    """Return a function that embeds texts by a folder, as a replica does that has taken it into its store."""

    async def run(jobs: Any, priority: int, timeout_s: float | None) -> list[Encoding]:
        assert all(isinstance(job, EncodeJob) for job in jobs)
        return encode_batch_or_raise(jobs)

    async def embedded(folder: Path, texts: list[str], before: Any = None) -> torch.Tensor:
        host, encoders = open_host(TextEncoderBuilder(), {"m": folder}), CachedEncoders(EncodingCache(10**7), run)
        async with host.lease("m", lambda component: True) as lease:
            prompts = lease.modules["model"].encoder.prompts
            said = prompts.before(None) if before is None else before(prompts)
            found = await encoders.embed(lease.modules, texts, before=said)
        return torch.stack([output["embedding"] for output in found.outputs])

    return embedded


@pytest.mark.drawn
@pytest.mark.parametrize("modes", [*MODES, ("cls", "mean"), MODES])
async def test_every_pooling_equals_sentence_transformers(save: Any, embed: Any, modes: Any) -> None:
    stock, folder = save(modes=modes)
    texts = draw_texts()
    expected = torch.stack([stock.encode(text, convert_to_tensor=True) for text in texts])
    torch.testing.assert_close(await embed(folder, texts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "later",
    [
        (Dense(32, 12, activation_function=nn.Tanh()),),
        (Dense(32, 32, bias=False, activation_function=nn.Identity()), Normalize()),
        (Normalize(), Dense(32, 40, use_residual=True), Dense(40, 8, activation_function=nn.GELU()), Normalize()),
    ],
    ids=["one", "sentence-t5", "two"],
)
async def test_dense_layers_equal_sentence_transformers(save: Any, embed: Any, later: Any) -> None:
    stock, folder = save(*later)
    texts = draw_texts()
    checkpoint = read_checkpoint(folder)
    assert why_unservable(checkpoint) is None
    size = feature_sizes(checkpoint.kind, checkpoint.components, folder).out_features
    assert size == stock.get_embedding_dimension()
    expected = torch.stack([stock.encode(text, convert_to_tensor=True) for text in texts])
    torch.testing.assert_close(await embed(folder, texts), expected, atol=1e-5, rtol=1e-5)


async def test_a_model_with_dense_layers_is_written_back_whole(save: Any, tmp_path: Path) -> None:
    stock, folder = save(Dense(32, 12), Normalize())
    store = WeightStore(tmp_path / "store")
    externalize(store, "m", folder)
    write_inline(store, "m", tmp_path / "again")
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu")
    texts = draw_texts(3)
    torch.testing.assert_close(again.encode(texts), stock.encode(texts), atol=1e-6, rtol=1e-6)


async def test_prompts_are_chosen_as_sentence_transformers_chooses_them(save: Any, embed: Any) -> None:
    prompts = {"query": "alpha beta ", "passage": "gamma ", "other": "pi xi "}
    stock, folder = save(prompts=prompts, default_prompt_name="other")
    texts = draw_texts(4)
    cases = [
        (None, stock.encode(texts)),
        (lambda known: known.before("query"), stock.encode(texts, prompt_name="query")),
        (lambda known: known.before(None, "query"), stock.encode_query(texts)),
        (lambda known: known.before(None, "document"), stock.encode_document(texts)),
    ]
    for before, expected in cases:
        found = await embed(folder, texts, before)
        torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-5, rtol=1e-5)
    with pytest.raises(EngineError, match=r"no prompt 'quary' \(known: .*other"):
        read_prompts(folder).before("quary")
    with pytest.raises(EngineError, match="either prompt_name or input_type"):
        read_prompts(folder).before("query", "query")
    assert Prompts({"passage": "p: ", "other": "o: "}, "other").before(None, "document") == "p: "
    assert Prompts({"other": "o: "}, "other").before(None, "query") == ""


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prompts": ["x"]}, "prompts: expected at most 256 texts by name"),
        ({"prompts": {"a": 5}}, "prompts: expected at most 256"),
        ({"prompts": {"a": "x" * 10_000}}, "at most 8192 characters"),
        ({"prompts": {"a": "x"}, "default_prompt_name": "b"}, "default_prompt_name 'b' is not one of the prompts"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(save: Any, config: dict[str, Any], message: str) -> None:
    _, folder = save()
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    assert message in str(why_unservable(read_checkpoint(folder)))


def test_pooling_without_the_prompt_is_refused_where_there_is_one(save: Any) -> None:
    _, folder = save(prompts={"query": "alpha "})
    path = folder / "1_Pooling" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"include_prompt": False}))
    assert "leaves the prompt out (include_prompt)" in str(why_unservable(read_checkpoint(folder)))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_features": 13}, "config.json asks for [13"),
        ({"module_output_name": "elsewhere"}, "module_output_name: expected 'sentence_embedding'"),
        ({"activation_function": "os.system"}, "unknown activation_function 'os.system'"),
        ({"module_input_name": "token_embeddings", "module_output_name": None}, "over 'token_embeddings'"),
        (None, "no safetensors weights beside the config.json of a Dense module"),
    ],
)
def test_a_dense_layer_that_cannot_be_used_is_refused(save: Any, change: Any, message: str) -> None:
    _, folder = save(Dense(32, 12))
    path = folder / "2_Dense" / "config.json"
    if change is None:
        (folder / "2_Dense" / "model.safetensors").unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    try:
        reason = why_unservable(read_checkpoint(folder)) or ""
    except FormatError as error:
        reason = str(error)
    assert message in reason
    assert "2_Dense" in reason


QUICK = ("MPNet", "DebertaV2", "ModernBert", "NomicBert", "Gte", "XLMRoberta", "FNet", "Yoso", "GPT2", "Gemma3Text")
ROWS = [row for row in (*ENCODERS, *CLASSIFIERS) if row.refused or row.class_name in {f"{name}Model" for name in QUICK}]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.class_name)
def test_classes_equal_stock_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    """The whole table is in tests/e2e."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = make_model(tmp_path, row)
    assert row.refused in why_refused(tmp_path)
    if not row.refused:
        assert why_refused(tmp_path) == ""
        assert measure_difference(tmp_path, module, seeded_random()) < 1e-5
