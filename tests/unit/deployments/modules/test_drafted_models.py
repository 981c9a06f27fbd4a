"""A language model with a draft model on a replica: one engine, one lease, and the answers of the model alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.deployments.modules.test_language_model_memory import replica
from unit.weights.formats.test_own_draft import ADDER, small_adder

from configs.cluster import WorkerConfig
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.records.protocol import SamplingParams, TextRequest
from deployments.engines.servable import why_unservable
from deployments.modules.draft_parts import with_draft_parts
from deployments.modules.loading import is_denoise_component
from weights.formats.checkpoint import read_checkpoint
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore


def answered(engine: LLMEngine) -> list[int]:
    prompt = engine.encode_text("12+34=")
    engine.add_request(TextRequest("r", prompt, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)))
    found: list[int] = []
    while engine.has_work:
        found += [token for delta in engine.step() for token in delta.token_ids]
        assert not engine.failures
    return found


@pytest.mark.parametrize("device", ["cpu", "cpu-private"])
async def test_both_are_leased_as_one_and_counted(device: str, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    small_adder(tmp_path / "small")
    externalize(store, "plain", ADDER)
    externalize(store, "drafted", ADDER, parts={"draft": tmp_path / "small"})
    settings = WorkerConfig(device=device, kv_cache_bytes=2**24)
    answers, engines, sizes = [], [], []
    for name in ("plain", "drafted"):
        cache = replica(store, settings)
        manifest = await cache.manifests.find_version(name)
        sizes.append(
            sum(sum(part.footprint.values()) for part in cache.planner.plan(manifest, is_denoise_component).values())
        )
        async with cache.lease(name, is_denoise_component) as lease:
            assert set(lease.modules) == {"model"}
            engines.append(lease.modules["model"])
            answers.append(answered(engines[-1]))
    assert answers[0] == answers[1]
    assert engines[0]._draft is None
    assert engines[1]._draft is not None
    weights = sum(ref.nbytes for ref in store.manifest("drafted").components["draft"].tensors.values())
    if device == "cpu-private":
        assert sizes[1] > sizes[0] + weights - 2**15, "but for a block of the cache, which has as many bytes"


def test_what_it_could_not_draft_with_is_refused_by_name(tmp_path: Path) -> None:
    small_adder(tmp_path / "small")
    assert why_unservable(read_checkpoint(ADDER, parts={"draft": tmp_path / "small"})) is None
    file = tmp_path / "small" / "config.json"
    said = file.read_text()
    for class_name, kind, words in (
        (
            "BloomForCausalLM",
            "bloom",
            "small: a BloomForCausalLM is no draft model and has none: expected a model of text",
        ),
        ("MambaForCausalLM", "mamba", "small: a MambaForCausalLM is no draft model and has none"),
        (
            "Gemma4AssistantForCausalLM",
            "gemma4_assistant",
            "a Gemma4AssistantForCausalLM drafts for a Gemma4ForConditionalGeneration, not for a Llama",
        ),
    ):
        file.write_text(said.replace("LlamaForCausalLM", class_name).replace('"llama"', f'"{kind}"'))
        found = why_unservable(read_checkpoint(ADDER, parts={"draft": tmp_path / "small"}))
        assert found is not None
        assert words in found, found


def record(**fields: Any) -> Any:
    found = SimpleNamespace(**fields)
    found.model_copy = lambda update: record(**fields | update)
    return found


def test_a_draft_is_a_part_of_its_model_and_others_stay() -> None:
    model, draft, vision = (record(tensors={"w": hash_}, config_hash=hash_) for hash_ in "mds")
    parts = {"model": model, "draft": draft, "vision": vision}
    found = with_draft_parts(record(kind="llm", components=parts))
    assert list(found.components) == ["model", "vision"]
    assert found.components["model"].tensors == {"w": "m", "draft/w": "d"}
    assert found.components["model"].config_hash == "m+d"
    for kind, components in (("diffusion", parts), ("llm", {"model": model}), ("llm", {"draft": draft})):
        other = record(kind=kind, components=components)
        assert with_draft_parts(other) is other
