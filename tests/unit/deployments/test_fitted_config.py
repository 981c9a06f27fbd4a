"""A config made for models and a machine fits both, whatever they are."""

from __future__ import annotations

from typing import Any

import pytest
from kit.seeding import seeded_random

from configs.cluster import ClusterConfig
from configs.hub_names import hub_hint
from configs.model import ModelConfig
from deployments.fitted_config import Machine, fitted_config, model_id

GIB = 2**30


def config_of(nbytes: dict[str, int], machine: Machine) -> ClusterConfig:
    entries: dict[str, Any] = {"models": [{"id": id_, "path": f"/models/{id_}"} for id_ in nbytes]}
    return ClusterConfig.model_validate(fitted_config(entries, nbytes, machine))


def test_drawn_machines_get_a_config_that_is_theirs() -> None:
    draw = seeded_random()
    for _ in range(200):
        nbytes = {f"m{number}": draw.randrange(1, 40 * GIB) for number in range(draw.randrange(1, 6))}
        memory_bytes = draw.randrange(2 * GIB, 512 * GIB)
        cards = [draw.randrange(8, 140) * GIB for _ in range(draw.choice([0, 0, 1, 4]))]
        machine = Machine(draw.randrange(1, 96), memory_bytes, draw.randrange(GIB, memory_bytes), cards)
        config = config_of(nbytes, machine)
        store_bytes = config.ray.object_store_bytes
        assert store_bytes <= min(memory_bytes / 2, machine.shared_bytes)
        room_bytes = min(memory_bytes // 2, machine.shared_bytes * 9 // 10)
        if sum(nbytes.values()) * 1.2 + GIB < room_bytes:
            assert store_bytes > sum(nbytes.values())
        roles = (config.ingress, config.text_encoder, config.worker)
        assert sum(role.num_replicas * role.num_cpus for role in roles) <= (config.ray.num_cpus or 0)
        assert config.worker.num_replicas == max(1, len(cards))
        assert config.worker.device == ("cuda" if cards else "cpu")
        if cards:
            assert 0 < config.worker.weights_budget_bytes < min(cards)
        if len(nbytes) > 1:
            assert config.worker.kv_cache_bytes is None


def test_a_language_model_alone_has_all_of_its_workers_memory() -> None:
    assert config_of({"m": GIB}, Machine(4, 16 * GIB, 8 * GIB)).worker.kv_cache_bytes == "auto"


@pytest.mark.parametrize(
    ("source", "id_"),
    [
        ("/models/Qwen3-8B-Q4_K_M.gguf", "qwen3-8b-q4_k_m"),
        ("hf://Qwen/Qwen3-0.6B@v1", "qwen3-0.6b"),
        ("hf://Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf", "qwen3-0.6b-q8_0"),
        ("s3://bucket/some models/ink.safetensors", "ink"),
        ("./köln & co/", "k-ln-co"),
        ("/models/....", "model"),
    ],
)
def test_an_id_is_the_name_of_the_model(source: str, id_: str) -> None:
    assert model_id(source) == id_
    assert model_id(source, {id_}) == f"{id_}-2"
    assert model_id(source, {id_, f"{id_}-2"}) == f"{id_}-3"
    ModelConfig.model_validate({"id": id_, "path": "/m"})


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "hf://Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/a/b/resolve/main/c/d.gguf?download=true", "hf://a/b/c/d.gguf"),
        ("https://hf.co/a/b/blob/v2/d.gguf", "hf://a/b@v2/d.gguf"),
        ("https://example.com/a/b", ""),
        ("some/long/folder", ""),
        ("file.gguf", ""),
    ],
)
def test_a_pages_address_and_a_bare_name_are_understood(source: str, meant: str) -> None:
    assert hub_hint(source) == meant
    if meant:
        ModelConfig.model_validate({"id": "m", "path": meant})
