"""Texts with LoRAs the whole way: from PEFT's folder through store, module cache and engine to the service's answer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM
from unit.deployments.engine_loops import written_chunks

from configs.cluster import WorkerConfig
from deployments.engines.llm.tokenizer import load_tokenizer
from deployments.modules.budget import ModuleBudget
from deployments.modules.cache import ModuleCache
from deployments.modules.loading import ComponentBuilder
from deployments.records import CompletionRequest
from deployments.records.errors import InvalidRequest
from deployments.replicas.step_loop import DeviceThread
from deployments.services.text_service import TextService, whole_text
from weights.loading.provider import LocalExtents
from weights.operations.intake import import_model
from weights.records.manifest import ExtentRef, Manifest
from weights.storage.store import WeightStore

ADDER = Path(__file__).parents[4] / "infra/demo/models/adder"
PROMPT = "What is 12 + 7?"


class Extents(LocalExtents):
    """Extents of the local disk, which nobody counts."""

    def release(self, extents: Sequence[ExtentRef]) -> None: ...
    def prefetch(self, extents: Sequence[ExtentRef]) -> None: ...


def save_lora(folder: Path, stock: Any, seed: int) -> None:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(stock), config).requires_grad_(False)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    adapted.save_pretrained(folder)


@pytest.fixture(scope="module")
def stock() -> Any:
    return AutoModelForCausalLM.from_pretrained(ADDER, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folders(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("one", "two")):
        save_lora(root / name, stock, seed)
    foreign = AutoModelForCausalLM.from_config(type(stock.config)(**stock.config.to_dict() | {"num_hidden_layers": 5}))
    save_lora(root / "deeper", foreign, 3)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture
def service(folders: dict[str, Path], tmp_path: Path) -> TextService:
    store = WeightStore(tmp_path)
    import_model(store, "adder", ADDER, dtype="float32")
    for name, folder in folders.items():
        import_model(store, name, folder)

    async def fetch(model: str, version: str | None) -> Manifest:
        return store.manifest(model)

    settings = WorkerConfig(kv_cache_bytes=2**22)
    cache = ModuleCache(fetch, Extents(store.packs), store.models, ModuleBudget(2**30), ComponentBuilder(settings))
    return TextService(cache, DeviceThread())


async def answer(service: TextService, *uses: tuple[str, float]) -> str:
    lora = tuple({"name": name, "scale": scale} for name, scale in uses)
    request = CompletionRequest(model="adder", prompt=PROMPT, lora=lora, max_tokens=12, temperature=0, ignore_eos=True)
    return whole_text("adder", await written_chunks(service, request)).text


def expected(stock: Any, folders: dict[str, Path], tokenizer: Any, *uses: tuple[str, float]) -> str:
    """PEFT's merge of all adapters into a copy of the model."""
    model = copy.deepcopy(stock)
    for name, scale in uses:
        adapted = peft.PeftModel.from_pretrained(model, folders[name])
        for module in adapted.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", scale)
        model = adapted.merge_and_unload()
    ids = tokenizer.encode(PROMPT)
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=None,
    )
    return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))


async def test_each_request_is_answered_with_its_own_loras(
    service: TextService, stock: Any, folders: dict[str, Path]
) -> None:
    sets: list[tuple[tuple[str, float], ...]] = [
        (),
        (("one", 1.0),),
        (("two", -0.5), ("one", 0.5)),
        (("two", 1.0),),
        (),
    ]
    tokenizer = load_tokenizer(ADDER)
    found = [await answer(service, *uses) for uses in sets]
    assert found == [expected(stock, folders, tokenizer, *uses) for uses in sets]
    assert len(set(found)) == 4


async def test_one_of_another_base_is_an_invalid_request(service: TextService) -> None:
    with pytest.raises(InvalidRequest, match=r"'model\.layers\.4\..*\(7 of 35\) are not in LlamaForCausalLM"):
        await answer(service, ("deeper", 1.0))
    assert await answer(service) == await answer(service, ("one", 0.0))
