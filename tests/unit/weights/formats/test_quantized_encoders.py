"""Text encoders, VAEs and whole folders in low precision: as files of their own, in GGUF, by bitsandbytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel
from unit.weights.comparing import same
from unit.weights.formats.test_low_precision import bitsandbytes_int8, bitsandbytes_nf4
from unit.weights.formats.test_single_file import sd3_medium, sd15, weights_of

from deployments.engines.servable import why_unservable
from weights.formats.checkpoint import read_checkpoint
from weights.loading.loader import load_from_store
from weights.operations.base_pipeline import open_base
from weights.operations.externalize import externalize, unpacked_types
from weights.records.errors import FormatError
from weights.storage.store import WeightStore


def by_bitsandbytes(folder: Path, write: Any) -> dict[str, torch.Tensor]:
    """Quantize the linear weights of a folder in place; return the values that all weights have then."""
    (file,) = folder.glob("*.safetensors")
    stored, values = dict[str, torch.Tensor](), load_file(file)
    for name, tensor in values.items():
        if tensor.ndim != 2 or not name.endswith(("q.weight", "to_q.weight", "wo.weight")) or tensor.numel() % 128:
            stored[name] = tensor
            continue
        parts, wide = write(tensor.float())
        stored |= {name.removesuffix("weight") + part.removeprefix("x."): one for part, one in parts.items()}
        values[name] = wide.half()
    assert len(stored) > len(values)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.drawn
@pytest.mark.parametrize("write", [bitsandbytes_nf4, bitsandbytes_int8], ids=lambda write: write.__name__)
@pytest.mark.parametrize("part", ["transformer", "text_encoder_3"])
def test_a_folder_that_bitsandbytes_quantized_is_stored_as_a_plain_one(
    write: Any, part: str, store: WeightStore, tmp_path: Path
) -> None:
    folder, _ = sd3_medium(tmp_path)
    expected = by_bitsandbytes(folder / part, write)
    manifest = externalize(store, "sd3", folder)
    found = load_from_store(store.path, "sd3")[part]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (torch.float16, tensor.shape)
        assert torch.allclose(found[name].float(), tensor.float(), rtol=2**-10, atol=1e-6), name
    config = json.loads((store.skeleton(manifest) / part / "config.json").read_text())
    assert "quantization_config" not in config
    checkpoint = read_checkpoint(folder)
    assert "quantized" not in str(why_unservable(checkpoint))
    (told,) = unpacked_types(checkpoint)
    assert told.startswith("unpacked ")
    bare = folder.parent / "vae.safetensors"
    save_file(weights_of(folder, "vae"), bare)
    like = externalize(store, "other", bare, like=open_base(folder, None))
    assert like.components[part].module_key == manifest.components[part].module_key
    assert "quantization_config" not in json.loads((store.skeleton(like) / part / "config.json").read_text())


def test_an_encoder_alone_under_its_own_names_replaces_that_of_its_base(store: WeightStore, tmp_path: Path) -> None:
    """As T5 in FP8 is published."""
    folder, _ = sd3_medium(tmp_path)
    externalize(store, "sd3", folder)
    other = T5EncoderModel(T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4))
    short = {name: one.to(torch.float8_e4m3fn) for name, one in other.state_dict().items()}
    assert "shared.weight" in short
    save_file({name: one.clone() for name, one in short.items()}, tmp_path / "t5xxl_fp8.safetensors")
    second = externalize(store, "mine", tmp_path / "t5xxl_fp8.safetensors", like=open_base("sd3", store))
    found, before = load_from_store(store.path, "mine"), load_from_store(store.path, "sd3")
    for name, tensor in found["text_encoder_3"].items():
        assert torch.equal(tensor.float(), short[name].float()), name
    assert same(found["transformer"], before["transformer"])
    assert second.components["text_encoder"].module_key == store.manifest("sd3").components["text_encoder"].module_key


def write_t5(path: Path, tensors: Mapping[str, torch.Tensor], kind: gguf.GGMLQuantizationType, **change: Any) -> Path:
    """As llama.cpp's converter names and ComfyUI's users quantize it."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 8)
    writer = gguf.GGUFWriter(path, change.get("architecture", "t5encoder"))
    for name, tensor in tensors.items():
        given = names.get_name(name, try_suffixes=(".weight",))
        if given is None or name == change.get("without"):
            continue
        plain = tensor.float().numpy()
        is_packed = tensor.ndim == 2 and tensor.shape[1] % 32 == 0 and "relative" not in name
        own = kind if is_packed else gguf.GGMLQuantizationType.F32
        writer.add_tensor(given, gguf.quantize(plain, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gated_sd3(tmp_path: Path) -> Path:
    folder, _ = sd3_medium(tmp_path)
    config = T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    (file,) = (folder / "text_encoder_3").glob("*.safetensors")
    file.unlink()
    T5EncoderModel(config).bfloat16().save_pretrained(folder / "text_encoder_3")
    return folder


@pytest.mark.drawn
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16], ids=str)
def test_a_t5_in_gguf_replaces_that_of_its_base(kind: Any, store: WeightStore, tmp_path: Path) -> None:
    folder = gated_sd3(tmp_path)
    externalize(store, "sd3", folder)
    tensors = {name: torch.randn_like(one.float()) for name, one in weights_of(folder, "text_encoder_3").items()}
    file = write_t5(tmp_path / "t5.gguf", tensors, kind)
    externalize(store, "mine", file, like=open_base("sd3", store))
    found, before = load_from_store(store.path, "mine"), load_from_store(store.path, "sd3")
    assert found["text_encoder_3"].keys() == before["text_encoder_3"].keys()
    values = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 8)
    for name, tensor in found["text_encoder_3"].items():
        expected = torch.from_numpy(np.array(values[str(names.get_name(name, try_suffixes=(".weight",)))]))
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected.reshape(tensor.shape).bfloat16()), name
    assert same(found["transformer"], before["transformer"])


def test_what_is_no_t5_of_its_base_is_refused(store: WeightStore, tmp_path: Path) -> None:
    folder = gated_sd3(tmp_path)
    tensors = weights_of(folder, "text_encoder_3")
    kind = gguf.GGMLQuantizationType.Q8_0

    def refusal(file: Path, base: Path = folder) -> str:
        with pytest.raises(FormatError) as caught:
            externalize(store, "mine", file, like=open_base(base, None))
        return str(caught.value)

    short = write_t5(tmp_path / "short.gguf", tensors, kind, without="encoder.final_layer_norm.weight")
    assert "its text_encoder_3 lacks 1 of" in refusal(short)
    wide = {name: torch.cat((one, one)) if name.endswith("wo.weight") else one for name, one in tensors.items()}
    assert "DenseReluDense.wo.weight has shape [64, 64]" in refusal(write_t5(tmp_path / "wide.gguf", wide, kind))
    (tmp_path / "more").mkdir()
    words = refusal(short, sd15(tmp_path / "more")[0])
    assert "GGUF architecture 't5encoder' is a T5EncoderModel or UMT5EncoderModel" in words
    assert "text encoder alone" in str(why_unservable(read_checkpoint(short)))


def test_a_vae_in_8_bits_has_its_values(store: WeightStore, tmp_path: Path) -> None:
    folder, _ = sd15(tmp_path)
    short = {name: one.to(torch.float8_e4m3fn) for name, one in weights_of(folder, "vae").items()}
    save_file(short, tmp_path / "vae.safetensors")
    externalize(store, "mine", folder, parts={"vae": tmp_path / "vae.safetensors"})
    for name, tensor in load_from_store(store.path, "mine")["vae"].items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.float(), short[name].float()), name
