"""Denoisers in GGUF files beside the pipelines that they are like: names, bytes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel, SD3Transformer2DModel
from kit.seeding import seeded_rng
from unit.weights.formats.gguf_files import packed_bytes, under_diffusers_names, write_denoiser

from configs.model import ModelConfig
from weights.formats.checkpoint import read_checkpoint
from weights.formats.ggml_values import unpack_blocks
from weights.formats.source import BasePipeline
from weights.loading.loader import load_from_store
from weights.operations.base_pipeline import open_base
from weights.operations.externalize import externalize, unpacked_bytes, unpacked_types
from weights.operations.layouts import convert, write_inline
from weights.operations.repair import repair, verify
from weights.records.dtypes import BLOCK_SIZES
from weights.records.errors import FormatError
from weights.storage.store import WeightStore


def sd3(**more: Any) -> SD3Transformer2DModel:
    sizes = {"sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16}
    sizes |= {"num_attention_heads": 4, "caption_projection_dim": 64, "joint_attention_dim": 32, "out_channels": 4}
    return SD3Transformer2DModel(**sizes | {"pooled_projection_dim": 64} | more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pipeline of a denoiser alone, with a solver's config."""
    index = {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "SD3Transformer2DModel"]}
    model = sd3()
    model.save_pretrained(tmp_path / "base" / "transformer")
    (tmp_path / "base" / "scheduler").mkdir()
    (tmp_path / "base" / "scheduler" / "scheduler_config.json").write_text("{}")
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (tmp_path / "base" / "model_index.json").write_text(json.dumps(index))
    return tmp_path / "base"


@pytest.fixture
def base(folder: Path, store: WeightStore) -> BasePipeline:
    return open_base(folder, store)


def values_of(tensors: Any, kinds: Any) -> dict[str, torch.Tensor]:
    return {
        name: unpack_blocks(kinds[name], tensor) if name in kinds else tensor.float()
        for name, tensor in tensors.items()
    }


@pytest.mark.drawn
@pytest.mark.parametrize("layout", ["combined", "separate", "inline"])
def test_packed_rows_come_to_lie_where_their_values_belong(
    store: WeightStore, base: BasePipeline, tmp_path: Path, layout: Any
) -> None:
    state, file = sd3().state_dict(), tmp_path / "sd3.gguf"
    values = write_denoiser(file, "sd3", state)
    manifest = externalize(store, "packed", file, like=base, layout=layout)
    part = manifest.components["transformer"]
    assert sum(part.tensors[name].nbytes for name in part.block_types) == packed_bytes(file)
    assert {ref.dtype for ref in part.tensors.values()} - set(BLOCK_SIZES) == {"BF16"}  # in the file there are three
    found = values_of(load_from_store(store.path, "packed")["transformer"], part.block_types)
    for name, expected in under_diffusers_names("sd3", state, values).items():
        wanted = expected if name in part.block_types else expected.bfloat16().float()
        torch.testing.assert_close(found[name], wanted, rtol=1e-6, atol=1e-8)
    assert verify(store, "packed", deep=True).damages == ()
    assert externalize(store, "packed", file, like=base, layout=layout) == manifest
    assert part.module_key == convert(store, "packed", "combined").components["transformer"].module_key


def test_what_is_written_back_is_a_gguf_of_diffusers_names(
    store: WeightStore, base: BasePipeline, tmp_path: Path
) -> None:
    file = tmp_path / "sd3.gguf"
    write_denoiser(file, "sd3", sd3().state_dict())
    manifest = externalize(store, "packed", file, like=base, dtype="float32")
    write_inline(store, "packed", tmp_path / "back")
    reader = gguf.GGUFReader(tmp_path / "back" / "transformer" / "diffusion_pytorch_model.gguf")
    part = manifest.components["transformer"]
    assert {one.name: one.tensor_type.name for one in reader.tensors} == {
        name: ref.dtype for name, ref in part.tensors.items()
    }
    tensors = load_from_store(store.path, "packed")["transformer"]
    for one in reader.tensors:
        stored = tensors[one.name].contiguous().view(torch.uint8).flatten().numpy()
        assert np.array_equal(one.data.view(np.uint8).flatten(), stored), one.name


def test_a_damaged_extent_is_repaired_from_the_file(store: WeightStore, base: BasePipeline, tmp_path: Path) -> None:
    file = tmp_path / "sd3.gguf"
    write_denoiser(file, "sd3", sd3().state_dict())
    manifest = externalize(store, "packed", file, like=base)
    extent = next(iter(manifest.extents.values()))
    data = bytearray((store.packs / extent.pack).read_bytes())
    data[extent.offset] ^= 1
    (store.packs / extent.pack).write_bytes(data)
    assert verify(store, "packed", deep=True).damages
    repair(store)
    assert verify(store, "packed", deep=True).damages == ()


def test_what_no_linear_layer_multiplies_is_unpacked_and_its_bytes_are_told(
    store: WeightStore, base: BasePipeline, tmp_path: Path
) -> None:
    """A table of positions in Q8_0, and leading sizes of 1 that ggml does not keep."""
    state, file, kind = sd3().state_dict(), tmp_path / "sd3.gguf", gguf.GGMLQuantizationType.Q8_0
    values = write_denoiser(tmp_path / "plain.gguf", "sd3", state)
    table = gguf.quants.quantize(state["pos_embed.pos_embed"][0].numpy(), kind)
    values["pos_embed"] = torch.from_numpy(gguf.quants.dequantize(table, kind))
    writer = gguf.GGUFWriter(file, "sd3")
    for one in gguf.GGUFReader(tmp_path / "plain.gguf").tensors:
        data, dtype = (table, kind) if one.name == "pos_embed" else (one.data, one.tensor_type)
        writer.add_tensor(one.name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = read_checkpoint(file, like=base)
    assert unpacked_bytes(unpacked_types(checkpoint)) == 4 * values["pos_embed"].numel()
    externalize(store, "packed", file, like=base, dtype="float32")
    found = load_from_store(store.path, "packed")["transformer"]["pos_embed.pos_embed"]
    torch.testing.assert_close(found[0], values["pos_embed"], rtol=1e-6, atol=1e-8)
    assert unpacked_types(read_checkpoint(tmp_path / "plain.gguf", like=base)) == ()


def test_what_is_not_like_its_base_is_refused_in_words(store: WeightStore, base: BasePipeline, tmp_path: Path) -> None:
    state, file = sd3().state_dict(), tmp_path / "sd3.gguf"
    write_denoiser(file, "sd3", state)

    def refusal(path: Path) -> str:
        with pytest.raises(FormatError) as caught:
            externalize(store, "packed", path, like=base)
        assert store.find_manifest("packed") is None
        return str(caught.value)

    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-4096])
    assert "cut.gguf: truncated: tensor " in refusal(tmp_path / "cut.gguf")

    def copied(name: str, architecture: str, left_out: str = "") -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        for one in gguf.GGUFReader(file).tensors:
            if one.name != left_out:
                writer.add_tensor(one.name, one.data, raw_dtype=one.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    words = refusal(copied("flux.gguf", "flux"))
    assert "GGUF architecture 'flux' is a FluxTransformer2DModel or Flux2Transformer2DModel, and " in words
    assert "has none (transformer SD3Transformer2DModel)" in words
    words = refusal(copied("wan.gguf", "wan"))
    assert "GGUF architecture 'wan' is no part of a pipeline that is read (known: flux, sd3, qwen_image, " in words
    assert "diffusers cannot read its transformer" in refusal(copied("less.gguf", "sd3", "t_embedder.mlp.0.bias"))
    write_denoiser(tmp_path / "wide.gguf", "sd3", sd3(joint_attention_dim=64).state_dict())
    assert "context_embedder.weight has shape [64, 64], that of" in refusal(tmp_path / "wide.gguf")
    assert "`like` is for a single .safetensors or .gguf file" in refusal(base.folder)


def test_missing_tensors_that_need_no_translation_are_named(store: WeightStore, tmp_path: Path) -> None:
    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    model.save_config(tmp_path / "base" / "transformer")
    index = {"_class_name": "QwenImagePipeline", "transformer": ["diffusers", "QwenImageTransformer2DModel"]}
    (tmp_path / "base" / "model_index.json").write_text(json.dumps(index))
    state, file = model.state_dict(), tmp_path / "qwen.gguf"
    lost = str(seeded_rng().choice(sorted(state)))
    write_denoiser(file, "qwen_image", {name: tensor for name, tensor in state.items() if name != lost})
    with pytest.raises(FormatError, match=f"its transformer lacks 1 of {len(state)} tensors of .*: {lost}"):
        externalize(store, "packed", file, like=open_base(tmp_path / "base", store))
    write_denoiser(file, "qwen_image", {f"model.diffusion_model.{name}": tensor for name, tensor in state.items()})
    assert externalize(store, "packed", file, like=open_base(tmp_path / "base", store)).class_name


def test_a_config_names_a_denoiser_as_transformer() -> None:
    entry = ModelConfig.model_validate({"id": "small", "transformer": "/m/flux.gguf", "like": "flux"})
    assert (entry.path, entry.like) == (Path("/m/flux.gguf"), "flux")
    for given, words in (
        ({"transformer": "/m/flux.gguf"}, "say which pipeline it belongs to"),
        ({"transformer": "/m/flux.gguf", "like": "flux", "path": "/m/x"}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=words):
            ModelConfig.model_validate({"id": "small"} | given)
