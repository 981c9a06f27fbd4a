"""Identities: what is part of a version or a module's key, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from safetensors.torch import load_file, save_file
from unit.weights.comparing import random_tensors, same

from weights.formats.folder import LORA_FILE
from weights.formats.lora import METADATA_KEY
from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.records.errors import StoreVersionError
from weights.records.manifest import Component, TensorRef
from weights.storage.store import WeightStore


def test_a_shared_component_is_the_same_module(store: WeightStore, write_pipeline) -> None:
    vae = random_tensors()
    keys = []
    for name in ("a", "b"):
        source = write_pipeline(name, {"vae": vae, "unet": {"w": torch.rand(4)}})
        keys.append(externalize(store, name, source).components)
    assert keys[0]["vae"].module_key == keys[1]["vae"].module_key
    assert keys[0]["unet"].module_key != keys[1]["unet"].module_key


def test_what_a_lora_says_beside_its_tensors_is_part_of_its_identity(store: WeightStore, tmp_path: Path) -> None:
    tensors = {"unet.q.lora_A.weight": torch.rand(2, 300), "unet.q.lora_B.weight": torch.rand(300, 2)}
    keys = []
    for number, config in enumerate([{"unet.lora_alpha": 4}, {"unet.lora_alpha": 64}, {"unet.lora_alpha": 4}]):
        source = tmp_path / f"lora{number}"
        source.mkdir()
        save_file(tensors, source / LORA_FILE, metadata={METADATA_KEY: json.dumps(config)})
        keys.append(externalize(store, f"lora{number}", source).components["lora"].module_key)
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]
    assert len(list(store.packs.iterdir())) == 1


def test_what_a_library_never_reads_is_no_part_of_an_identity(store: WeightStore, write_pipeline) -> None:
    vae = {"w": torch.rand(4)}
    keys = []
    for name, metadata in (("a", {"format": "pt"}), ("b", {"format": "np", "made": "yesterday"})):
        source = write_pipeline(name, {"vae": vae})
        save_file(vae, source / "vae" / "diffusion_pytorch_model.safetensors", metadata=metadata)
        keys.append(externalize(store, name, source).components["vae"].module_key)
    assert keys[0] == keys[1]


def test_what_a_gguf_header_says_is_part_of_the_identity(store: WeightStore, tmp_path: Path) -> None:
    weights, keys = seeded_rng().random((4, 64), np.float32), []
    for base in (1e4, 1e6):
        source = tmp_path / f"{base:.0f}.gguf"
        writer = gguf.GGUFWriter(source, "llama")
        writer.add_rope_freq_base(base)
        writer.add_tensor("w", weights)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        keys.append(externalize(store, f"m{base:.0f}", source).components["model"].module_key)
    assert keys[0] != keys[1]


def test_no_name_can_stand_for_two_tensors() -> None:
    def component(*names: str) -> Component:
        refs = {
            name: TensorRef(extent="e", offset=0, nbytes=4, dtype="F32", shape=(1,), sha256="0" * 64) for name in names
        }
        return Component(name="c", library="l", class_name=None, folder=".", tensors=refs, config_hash="h")

    pair, forged = component("a", "b"), component(f"a\0F32\0(1,)\0{'0' * 64}\nb")
    assert pair.weights_hash != forged.weights_hash
    assert component("a", "b").structure_key != component("a\0F32\0(1,)\0b").structure_key


def test_a_changed_source_is_a_new_version_and_the_old_pack_stays(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.rand(10), "kept": torch.arange(100)})
    old = externalize(store, "m", source)
    old_file = (store.packs / "m_weight_combined").read_bytes()
    write_model("m", {"w": torch.rand(11), "kept": torch.arange(100)})
    new = externalize(store, "m", source)
    assert new.fingerprint != old.fingerprint
    assert (store.packs / "m_weight_combined").read_bytes() == old_file
    assert store.skeleton(old).is_dir()
    assert store.skeleton(new).is_dir()
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))
    assert new.components["model"].tensors["kept"] == old.components["model"].tensors["kept"]


def test_other_settings_are_another_version(store: WeightStore, write_pipeline) -> None:
    source = write_pipeline("p", {"vae": {"w": torch.rand(4)}, "unet": {"w": torch.rand(4)}})
    assert set(externalize(store, "p", source).components) == {"vae", "unet"}
    part = externalize(store, "p", source, component="vae", dtype="float16")
    assert (part.kind, set(part.components)) == ("embedding", {"vae"})
    assert part.components["vae"].tensors["w"].dtype == "F16"


def test_a_manifest_of_a_newer_version_is_not_written_over(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.rand(10)})
    externalize(store, "m", source)
    file = store.models / "m" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 99}))
    before = file.read_text()
    with pytest.raises(StoreVersionError, match="manifest version 99"):
        externalize(store, "m", source)
    assert file.read_text() == before
