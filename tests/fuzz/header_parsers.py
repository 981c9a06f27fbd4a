"""Every parser of the weights library as one function of bytes, and small valid inputs to mutate."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy

from weights.formats.checkpoint import read_checkpoint
from weights.formats.gguf import read_gguf
from weights.formats.kuiper import KuiperHeader, read_kuiper
from weights.formats.lora import METADATA_KEY, read_lora_configs
from weights.formats.safetensors import read_header
from weights.formats.tensors import FileTensor, SourceTensor
from weights.operations.feature_sizes import feature_sizes
from weights.records.dtypes import tensor_nbytes
from weights.records.manifest import Component, ExtentRef, Manifest, TensorRef, read_manifest

Parse = Callable[[Path, bytes], None]
ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.int64), "c": np.zeros((), np.float16)}


def parse_safetensors(folder: Path, data: bytes) -> None:
    file = written(folder / "x.safetensors", data)
    check_inside(read_header(file).tensors.values(), len(data))


def parse_gguf(folder: Path, data: bytes) -> None:
    file = written(folder / "x.gguf", data)
    header = read_gguf(file)
    assert data.startswith(header.raw)
    check_inside(header.tensors.values(), len(data))


def parse_kuiper(folder: Path, data: bytes) -> None:
    file = written(folder / "x.bin", data)
    header = read_kuiper(file)
    assert data.startswith(header.raw)
    check_inside(header.tensors.values(), len(data))


def parse_shard_index(folder: Path, data: bytes) -> None:
    parse_checkpoint_json(folder / "sharded", "model.safetensors.index.json", data, weights="model-1.safetensors")


def parse_config(folder: Path, data: bytes) -> None:
    parse_checkpoint_json(folder / "plain", "config.json", data, weights="model.safetensors")


def parse_model_index(folder: Path, data: bytes) -> None:
    name = "vae/diffusion_pytorch_model.safetensors"
    parse_checkpoint_json(folder / "pipeline", "model_index.json", data, weights=name)


def parse_lora(folder: Path, data: bytes) -> None:
    for config in read_lora_configs(folder / "x.safetensors", {METADATA_KEY: data.decode("utf-8", "replace")}).values():
        for alpha in (config.alpha_of("blocks.0.attn.to_q"), config.alpha_of("to_q")):
            assert alpha is None or math.isfinite(config.scale(alpha, 4))


def parse_modules(folder: Path, data: bytes) -> None:
    """Sizes of an embedding are told while the directory is written, so nothing but FormatError may come of it."""
    skeleton = folder / "sentence"
    (skeleton / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (skeleton / "config.json").write_text('{"hidden_size": 4}')
    for name in ("modules.json", "1_Pooling/config.json"):
        for file in ("modules.json", "1_Pooling/config.json"):
            (skeleton / file).write_bytes(valid_modules() if file == "modules.json" else b'{"pooling_mode": ["cls"]}')
        written(skeleton / name, data)
        part = Component(name="model", library="transformers", class_name="BertModel", folder=".", tensors={})
        fields = valid_manifest().model_dump() | {"kind": "embedding", "components": {"model": part}, "extents": {}}
        manifest = Manifest.model_validate(fields)
        size = feature_sizes(manifest.kind, manifest.components.values(), skeleton).out_features
        assert size is None or type(size) is int


def parse_manifest(folder: Path, data: bytes) -> None:
    manifest = read_manifest(written(folder / "manifest.json", data))
    for component in manifest.components.values():
        for ref in component.tensors.values():
            assert ref.offset + ref.nbytes <= manifest.extents[ref.extent].nbytes


PARSERS: dict[str, Parse] = {
    "safetensors": parse_safetensors,
    "gguf": parse_gguf,
    "kuiper": parse_kuiper,
    "shard_index": parse_shard_index,
    "config": parse_config,
    "model_index": parse_model_index,
    "manifest": parse_manifest,
    "lora": parse_lora,
    "modules": parse_modules,
}


def parse_checkpoint_json(folder: Path, name: str, data: bytes, weights: str) -> None:
    if not folder.exists():
        (folder / weights).parent.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / weights).write_bytes(safetensors.numpy.save(ARRAYS))
    written(folder / name, data)
    for component in read_checkpoint(folder).components:
        tensors: list[SourceTensor] = list(component.tensors.values())
        assert all(tensor.file.resolve().is_relative_to(folder.resolve()) for tensor in tensors)


def check_inside(tensors: Iterable[FileTensor], file_bytes: int) -> None:
    """Check what every reader downstream relies on."""
    for tensor in tensors:
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= file_bytes
        assert tensor.nbytes == tensor_nbytes(tensor.dtype, tensor.shape)


_NUMBERS = (0, 1, 2, 3, 7, 16, 31, 32, 33, 64, 255, 256, 2**15, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62)


def with_other_numbers(data: bytes, draw: random.Random) -> bytes:
    """Put other numbers into a file, mostly near its beginning; its length stays."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        number = draw.choice(_NUMBERS) + draw.choice((0, 0, 0, -1, 1))
        raw = draw.choice((struct.pack("<q", number), struct.pack("<f", draw.choice((0, -1, 1e30, number)))))
        raw = raw[: draw.choice((1, 2, 4, 8))]
        most = len(data) - len(raw)
        if most > 0:
            at = min(draw.randint(0, draw.choice((32, 300, most))), most)
            changed[at : at + len(raw)] = raw
    return bytes(changed)


def written(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


def valid_inputs(folder: Path) -> dict[str, bytes]:
    """One small input per parser that it accepts, binary ones by the independent library."""
    return {
        "safetensors": safetensors.numpy.save(ARRAYS, {"format": "np"}),
        "gguf": valid_gguf(folder / "seed.gguf"),
        "kuiper": valid_kuiper(),
        "shard_index": json.dumps({"weight_map": dict.fromkeys("abc", "model-1.safetensors")}).encode(),
        "config": json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 4}).encode(),
        "model_index": json.dumps(
            {
                "_class_name": "P",
                "vae": ["diffusers", "Vae"],
                "tokenizer": ["transformers", "Tokenizer"],
                "x": [None, None],
            }
        ).encode(),
        "manifest": valid_manifest().model_dump_json().encode(),
        "lora": json.dumps(
            {
                "unet.r": 4,
                "unet.lora_alpha": 8,
                "unet.use_rslora": True,
                "unet.rank_pattern": {"to_k": 2},
                "unet.alpha_pattern": {"attn.to_q": 2, "^blocks.0.ff": 3, ".*\\.to_out\\.0": 1.5},
            }
        ).encode(),
        "modules": valid_modules(),
    }


def valid_modules() -> bytes:
    stages = [("Transformer", ""), ("Pooling", "1_Pooling")]
    return json.dumps(
        [{"type": f"sentence_transformers.models.{type_}", "path": path} for type_, path in stages]
    ).encode()


def valid_gguf(file: Path) -> bytes:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("eps", 1e-5)
    writer.add_bool("flag", True)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "é", ""])
    writer.add_array("scores", [0.5, 1.5])
    writer.add_array("flags", [True, False])
    writer.add_tensor("token_embd.weight", np.ones((2, 3), np.float32))
    quantized = gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.w", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


def valid_kuiper() -> bytes:
    header = KuiperHeader(
        dim=4,
        hidden_dim=6,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=3,
        max_seq_len=5,
        group_size=4,
        shared_classifier=False,
    )
    return header.raw + bytes(sum(tensor_nbytes(dtype, shape) for _, dtype, shape in header.layout()))


def valid_manifest() -> Manifest:
    ref = TensorRef(extent="e", offset=512, nbytes=8, dtype="F32", shape=(2,), sha256="0" * 64)
    block = TensorRef(extent="e", offset=1024, nbytes=34, dtype="Q8_0", shape=(1, 32), sha256="1" * 64)
    component = Component(
        name="vae", library="diffusers", class_name="Vae", folder="vae", tensors={"w": ref, "q": block}
    )
    extent = ExtentRef(id="e", pack="m_weight_combined", offset=4096, nbytes=2048, checksum="0" * 32)
    return Manifest(
        model="m",
        kind="diffusion",
        class_name="P",
        skeleton="m/skeleton",
        source="s",
        fingerprint="f",
        components={"vae": component},
        extents={"e": extent},
    )
