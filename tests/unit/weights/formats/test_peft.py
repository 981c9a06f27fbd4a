"""LoRAs of language models as PEFT saves them: read as PEFT means them, refused by name, held against their base."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.records.errors import ModelUnservable
from cluster.registry.importing import import_checkpoint
from configs.model import AdapterConfig, ModelConfig
from deployments.engines.servable import why_unservable
from weights.formats.checkpoint import read_checkpoint
from weights.formats.folder import LORA_FILE
from weights.formats.lora import PEFT_CONFIG, PEFT_FILE
from weights.operations.adapters import load_adapter, parse_adapter
from weights.operations.layouts import write_inline
from weights.records.errors import AdapterError, FormatError
from weights.storage.store import WeightStore

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def tiny_llama(hidden_size: int = 16) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=12,
            hidden_size=hidden_size,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def save_lora(folder: Path, **options: Any) -> peft.PeftModel:
    """A random LoRA as PEFT itself writes it."""
    options = {"r": 2, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(init_lora_weights=False, **options))
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


def rewrite(folder: Path, **options: Any) -> None:
    config = json.loads((folder / PEFT_CONFIG).read_text())
    (folder / PEFT_CONFIG).write_text(json.dumps(config | options))


@pytest.mark.parametrize(
    "options",
    [
        {"lora_alpha": 6},
        {"lora_alpha": 6, "use_rslora": True, "r": 3},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"self_attn.q_proj": 5, "down_proj": 1}},
    ],
)
def test_pairs_and_scales_are_those_of_peft(options, tmp_path):
    model = save_lora(tmp_path, **options)
    adapter = load_adapter(tmp_path)
    assert list(adapter.components) == ["model"]
    pairs = adapter.components["model"]
    layers = {name: one for name, one in model.base_model.model.named_modules() if hasattr(one, "lora_A")}
    assert pairs.keys() == layers.keys()
    assert len(pairs) == 3
    for name, layer in layers.items():
        assert pairs[name].scale == pytest.approx(layer.scaling["default"], rel=1e-12)
        assert torch.equal(pairs[name].down, layer.lora_A["default"].weight)
        assert torch.equal(pairs[name].up, layer.lora_B["default"].weight)


def test_the_store_keeps_it_with_its_config(tmp_path):
    save_lora(tmp_path / "lora", lora_alpha=6)
    store = WeightStore(tmp_path / "store")
    import_checkpoint(store, AdapterConfig(id="lora", path=tmp_path / "lora", base=("absent",)))
    manifest = store.manifest("lora")
    (component,) = manifest.components.values()
    assert (manifest.kind, component.library) == ("adapter", "peft")
    tensors = load_file(tmp_path / "lora" / PEFT_FILE)
    stored = parse_adapter(store.skeleton(manifest), tensors, component.metadata)
    assert {pair.scale for pair in stored.components["model"].values()} == {3.0}
    write_inline(store, "lora", tmp_path / "back")
    for name in (PEFT_CONFIG, PEFT_FILE):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "lora" / name).read_bytes()
    rewrite(tmp_path / "lora", lora_alpha=8)
    import_checkpoint(store, AdapterConfig(id="lora", path=tmp_path / "lora", base=("absent",)))
    (other,) = store.manifest("lora").components.values()
    assert other.weights_hash == component.weights_hash
    assert other.module_key != component.module_key  # another scale is another adapter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS', expected 'CAUSAL_LM'"),
        ({"bias": "all"}, "bias is 'all', expected 'none'"),
        ({"use_dora": "yes"}, "use_dora='yes', expected true or false"),
        ({"lora_bias": True}, "lora_bias=True: a LoRA bias is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: a copy of whole modules is not supported"),
        ({"layer_replication": [[0, 1]]}, "repeated layers is not supported"),
        ({"lora_alpha": None}, "lora_alpha is null"),
        ({"lora_alpha": "8"}, "lora_alpha='8', expected a finite number"),
        ({"alpha_pattern": {"(a+)+b": 3}}, "is a regular expression"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused_by_name(options, message, tmp_path):
    save_lora(tmp_path)
    rewrite(tmp_path, **options)
    with pytest.raises(AdapterError, match=message) as caught:
        read_checkpoint(tmp_path)
    assert PEFT_CONFIG in str(caught.value)


def test_a_dora_has_a_magnitude_for_each_module(tmp_path):
    save_lora(tmp_path / "dora", use_dora=True)
    read_checkpoint(tmp_path / "dora")
    file = tmp_path / "dora" / PEFT_FILE
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("lora_magnitude_vector"))
    save_file(tensors | {name: torch.ones(3)}, file)
    with pytest.raises(AdapterError, match=r"lora_magnitude_vector of .* has the shape \(3,\)"):
        read_checkpoint(tmp_path / "dora")
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(AdapterError, match="is missing, and the config says use_dora"):
        read_checkpoint(tmp_path / "dora")


def test_saved_modules_of_peft_are_refused(tmp_path):
    save_lora(tmp_path / "saved", modules_to_save=["lm_head"])
    rewrite(tmp_path / "saved", modules_to_save=None)
    with pytest.raises(AdapterError, match=r"'base_model.model.lm_head.weight' is not of PEFT's layout"):
        read_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no tensors"),
        ({f"{Q}.lora_A.weight": (2, 16)}, f"tensor '{Q}.lora_B.weight' is missing"),
        ({f"{Q}.lora_A.weight": (2, 16), f"{Q}.lora_B.weight": (16, 3)}, r"lora_A \(2, 16\), lora_B \(16, 3\)"),
        ({f"{Q}.lora_A.weight": (2, 16, 1), f"{Q}.lora_B.weight": (16, 2, 1)}, "do not fit"),
        ({"model.q_proj.lora_A.weight": (2, 16)}, "'model.q_proj.lora_A.weight' is not of PEFT's layout"),
        ({"base_model.model.lora_A.weight": (2, 16)}, "not of PEFT's layout"),
        ({f"{Q}.lora_embedding_A": (2, 16)}, "a LoRA of token vectors is not supported"),
        ({f"{Q}.base_layer.weight": (16, 16)}, "save it with save_embedding_layers=False"),
    ],
)
def test_tensors_that_are_no_lora_are_named(tensors, message, tmp_path):
    save_lora(tmp_path)
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / PEFT_FILE)
    with pytest.raises(AdapterError, match=message):
        read_checkpoint(tmp_path)


def test_a_pickle_is_refused_with_what_to_do(tmp_path):
    save_lora(tmp_path)
    (tmp_path / PEFT_FILE).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(FormatError, match="has to be saved as safetensors"):
        read_checkpoint(tmp_path)


def test_a_base_that_it_does_not_fit_is_refused_when_it_is_registered(tmp_path):
    store = WeightStore(tmp_path / "store")
    for id_, hidden_size in (("fits", 16), ("larger", 32)):
        tiny_llama(hidden_size).save_pretrained(tmp_path / id_)
        import_checkpoint(store, ModelConfig(id=id_, path=tmp_path / id_))
    save_lora(tmp_path / "lora", target_modules=["q_proj", "lm_head"])
    save_lora(tmp_path / "gone", target_modules=["q_proj"])
    tensors = load_file(tmp_path / "gone" / PEFT_FILE)
    moved = {name.replace("q_proj", "qkv_proj"): tensor for name, tensor in tensors.items()}
    save_file(moved, tmp_path / "gone" / PEFT_FILE)
    (tmp_path / "images").mkdir()
    save_file(
        {"unet.q.lora_A.weight": torch.ones(2, 3), "unet.q.lora_B.weight": torch.ones(3, 2)},
        tmp_path / "images" / LORA_FILE,
    )

    def register(id_: str, base: str) -> None:
        entry = AdapterConfig(id=id_, path=tmp_path / id_, base=(base,))
        import_checkpoint(store, entry, why_unservable=why_unservable)

    for id_, base, message in (
        ("lora", "larger", "a layer 'lm_head' of shape [12, 16], which in 'larger' is [12, 32]"),
        ("gone", "fits", "changes 'model.layers.0.self_attn.qkv_proj', which 'fits' does not have"),
        ("images", "fits", "a LoRA of diffusion pipelines, which cannot change 'fits', of kind 'llm'"),
    ):
        with pytest.raises(ModelUnservable, match=re.escape(message)):
            register(id_, base)
        assert id_ not in store.model_names()
    register("lora", "fits")
