"""Checkpoint folders: the layouts that are known, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weights.formats.checkpoint import read_checkpoint
from weights.formats.folder import LORA_FILE
from weights.formats.kuiper import KuiperHeader, write_kuiper
from weights.records.dtypes import tensor_nbytes
from weights.records.errors import FormatError

ONE = {"w": torch.rand(2, 3)}


def test_a_pipeline_has_the_components_with_weights(write_pipeline) -> None:
    folder = write_pipeline("p", {"vae": ONE, "transformer": {"x": torch.rand(4)}})
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.kind, checkpoint.class_name) == ("diffusion", "TinyPipeline")
    assert {part.name: (part.library, part.class_name, list(part.tensors)) for part in checkpoint.components} == {
        "vae": ("diffusers", "TinyVae", ["w"]),
        "transformer": ("diffusers", "TinyTransformer", ["x"]),
    }
    assert {str(file) for file in checkpoint.skeleton_files()} == {
        "model_index.json",
        "vae/config.json",
        "transformer/config.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/merges.txt",
    }


def test_one_component_of_a_pipeline(write_pipeline) -> None:
    folder = write_pipeline("p", {"vae": ONE, "transformer": ONE})
    checkpoint = read_checkpoint(folder, component="vae")
    assert (checkpoint.kind, [part.name for part in checkpoint.components]) == ("embedding", ["vae"])
    with pytest.raises(FormatError, match=r"no component 'scheduler' with weights \(known: vae, transformer\)"):
        read_checkpoint(folder, component="scheduler")


def test_llm_and_encoder_folders(write_model) -> None:
    assert read_checkpoint(write_model("llm", ONE)).kind == "llm"
    encoder = write_model("encoder", ONE, architectures=["BertModel"])
    assert (read_checkpoint(encoder).kind, read_checkpoint(encoder).class_name) == ("embedding", "BertModel")
    sentence = write_model("sentence", ONE)
    (sentence / "modules.json").write_text("[]")
    assert read_checkpoint(sentence).kind == "llm"
    assert read_checkpoint(write_model("nameless", ONE, architectures=None)).class_name is None
    with pytest.raises(FormatError, match="this is no pipeline"):
        read_checkpoint(encoder, component="vae")


def test_a_lora_folder_keeps_its_metadata(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / LORA_FILE, metadata={"k": "v"})
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.kind, checkpoint.components[0].library) == ("adapter", "peft")
    assert checkpoint.components[0].metadata == {"k": "v"}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.rand(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.rand(3)}, tmp_path / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_shards_are_one_component(sharded: Path) -> None:
    (component,) = read_checkpoint(sharded).components
    assert {name: entry.file.name for name, entry in component.tensors.items()} == {
        "a": "model-1.safetensors",
        "b": "model-2.safetensors",
    }


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    save_file({"a": torch.rand(2)}, sharded / "model-2.safetensors")
    with pytest.raises(FormatError, match=r"model-2\.safetensors: tensor 'a' is also in model-1\.safetensors"):
        read_checkpoint(sharded)


def test_an_index_of_a_tensor_that_no_shard_has_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"}}))
    assert read_checkpoint(sharded).components[0].tensors.keys() == {"a", "b"}  # another shard has it: it is read
    index.write_text(json.dumps({"weight_map": weight_map | {"c": "model-2.safetensors"}}))
    with pytest.raises(FormatError, match=r"index\.json: tensor 'c' is in none of the shards"):
        read_checkpoint(sharded)
    index.write_text(json.dumps({"weight_map": weight_map | {f"c{i}": "model-1.safetensors" for i in range(9)}}))
    with pytest.raises(FormatError, match=r"tensor 'c0' and 8 more is in none"):
        read_checkpoint(sharded)


@pytest.mark.parametrize("left", ["config", "nothing", "no folder"])
def test_a_component_without_its_file_is_refused_by_name(write_pipeline, left: str) -> None:
    folder = write_pipeline("p", {"vae": ONE, "unet": ONE})
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    if left != "config":
        (folder / "unet" / "config.json").unlink()
    if left == "no folder":
        (folder / "unet").rmdir()
    with pytest.raises(FormatError, match=r"p/unet: no weights of component 'unet', a 'TinyUnet'.*model_index\.json"):
        read_checkpoint(folder)
    assert read_checkpoint(folder, component="vae").components[0].name == "vae"
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"unet": [None, None]}))
    assert [part.name for part in read_checkpoint(folder).components] == ["vae"]


def test_what_has_no_weights_needs_none(write_pipeline) -> None:
    folder = write_pipeline("p", {"vae": ONE})
    index = json.loads((folder / "model_index.json").read_text())
    index |= {
        "feature_extractor": ["transformers", "CLIPImageProcessor"],  # no folder
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],  # left out by many
        "guider": ["diffusers", "SkipLayers"],
    }
    (folder / "guider").mkdir()
    (folder / "guider" / "guider_config.json").write_text("{}")
    (folder / "tokenizer" / "config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps(index))
    assert [part.name for part in read_checkpoint(folder).components] == ["vae"]


@pytest.mark.parametrize(
    "name", ["../model-1.safetensors", "/etc/passwd", "gone.safetensors", "..", "", "x" * 300, "\ud800"]
)
def test_a_shard_must_be_a_file_beside_the_index(sharded: Path, name: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="is not a file beside it"):
        read_checkpoint(sharded)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_needs_a_weight_map(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FormatError, match="no weight_map"):
        read_checkpoint(sharded)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "1" * 5000,
        "[" * 100_000,
        '{"architectures": 3}',
        '{"architectures": [3]}',
        '{"architectures": {}}',
    ],
)
@pytest.mark.parametrize("file", ["config.json", "model_index.json"])
def test_a_damaged_json_file_is_named(write_model, file: str, text: str) -> None:
    folder = write_model("m", ONE)
    (folder / file).write_text(text)
    if (file, text) == ("config.json", '{"architectures": {}}'):
        assert read_checkpoint(folder).class_name is None
        return
    with pytest.raises(FormatError, match=str(folder)):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["../other/vae", "..", ".", "", "/etc", "vae/.", "a\0b", "\ud800", "x" * 256])
def test_a_component_outside_the_checkpoint_is_refused(write_pipeline, name: str) -> None:
    write_pipeline("other", {"vae": ONE})
    folder = write_pipeline("p", {"vae": ONE})
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "P", name: ["diffusers", "TinyVae"]}))
    with pytest.raises(FormatError, match="is not a plain name"):
        read_checkpoint(folder)


def test_what_is_no_checkpoint(tmp_path: Path, write_model) -> None:
    with pytest.raises(FormatError, match="no such folder or file"):
        read_checkpoint(tmp_path / "gone")
    with pytest.raises(FormatError, match="unknown layout"):
        read_checkpoint(tmp_path)
    (tmp_path / "models--a--b/snapshots/0123").mkdir(parents=True)
    with pytest.raises(FormatError, match=r"a hub's cache; name a snapshot in it, such as .*a--b/snapshots/0123"):
        read_checkpoint(tmp_path / "models--a--b")
    bare = write_model("bare", ONE)
    (bare / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="no safetensors weights"):
        read_checkpoint(bare)
    (bare / "model_index.json").write_text(
        '{"scheduler": ["diffusers", "TinyScheduler"], "vae": [null, null], "layers": [2, 5]}'
    )
    with pytest.raises(FormatError, match="names no component"):
        read_checkpoint(bare)
    (bare / "model.safetensors").write_bytes(b"junk")
    (bare / "model_index.json").unlink()
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        read_checkpoint(bare)


def test_the_only_variant_of_a_component_is_taken(write_pipeline) -> None:
    folder = write_pipeline("p", {"vae": ONE})
    plain = folder / "vae" / "diffusion_pytorch_model.safetensors"
    plain.rename(folder / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    (component,) = read_checkpoint(folder).components
    assert (component.files, component.format) == (("diffusion_pytorch_model.fp16.safetensors",), "safetensors")
    save_file(ONE, folder / "vae" / "diffusion_pytorch_model.bf16.safetensors")
    with pytest.raises(FormatError, match=r"vae: several variants.*bf16\.safetensors, .*fp16\.safetensors"):
        read_checkpoint(folder)
    save_file({"plain": torch.rand(1)}, plain)
    assert list(read_checkpoint(folder).components[0].tensors) == ["plain"], "without a variant goes first"


@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_a_component_may_be_sharded(write_pipeline, variant: str) -> None:
    folder = write_pipeline("p", {"vae": ONE})
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    weight_map = {}
    for number in (1, 2):
        name = f"diffusion_pytorch_model{variant}-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": torch.rand(2)}, folder / "vae" / name)
        weight_map[f"w{number}"] = name
    index = folder / "vae" / f"diffusion_pytorch_model.safetensors.index{variant}.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (component,) = read_checkpoint(folder).components
    assert set(component.tensors) == {"w1", "w2"}
    assert component.files == tuple(weight_map.values())


def test_a_hub_cache_of_links_is_followed(write_pipeline, tmp_path: Path) -> None:
    folder = write_pipeline("p", {"vae": ONE})
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    for number, file in enumerate(file for file in folder.rglob("*") if file.is_file()):
        file.rename(blobs / str(number))
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / str(number))
    checkpoint = read_checkpoint(snapshot)
    assert [part.name for part in checkpoint.components] == ["vae"]
    assert Path("vae/config.json") in set(checkpoint.skeleton_files())


@pytest.mark.parametrize("sharded", [False, True])
def test_torch_weights_are_read_only_when_allowed(write_model, sharded: bool) -> None:
    folder = write_model("m", ONE)
    (folder / "model.safetensors").unlink()
    name = "pytorch_model-00001-of-00001.bin" if sharded else "pytorch_model.bin"
    torch.save({"w": ONE["w"]}, folder / name)
    if sharded:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(FormatError, match=rf"{name}: a pickle.*allow_torch.*safetensors"):
        read_checkpoint(folder)
    checkpoint = read_checkpoint(folder, allow_torch=True)
    (component,) = checkpoint.components
    assert (checkpoint.kind, component.format, component.files) == ("llm", "torch", (name,))
    assert bytes(component.tensors["w"].read()) == ONE["w"].numpy().tobytes()
    save_file(ONE, folder / "model.safetensors")
    assert read_checkpoint(folder).components[0].format == "safetensors"


def test_a_single_safetensors_file(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file(ONE, file, metadata={"k": "v"})
    checkpoint = read_checkpoint(file)
    (component,) = checkpoint.components
    assert (checkpoint.kind, checkpoint.class_name, list(checkpoint.skeleton_files())) == ("tensors", None, [])
    assert (component.name, component.files, component.metadata) == ("model", ("x.safetensors",), {"k": "v"})
    with pytest.raises(FormatError, match="this is no pipeline"):
        read_checkpoint(file, component="vae")


def write_gguf_file(file: Path, architecture: str = "llama", tensor: str = "w") -> None:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tensor(tensor, np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", "llm"), ("qwen3moe", "llm"), ("flux", "tensors"), ("bert", "tensors"), ("gemma-embedding", "tensors")],
)
@pytest.mark.parametrize("as_folder", [False, True])
def test_a_gguf_model(tmp_path: Path, architecture: str, kind: str, as_folder: bool) -> None:
    file = tmp_path / "x.gguf"
    write_gguf_file(file, architecture)
    checkpoint = read_checkpoint(tmp_path if as_folder else file)
    (component,) = checkpoint.components
    assert (checkpoint.kind, checkpoint.class_name, component.class_name) == (kind, architecture, architecture)
    assert (component.name, component.format, component.files) == ("model", "gguf", ("x.gguf",))
    assert checkpoint.headers == {"x.gguf.header": file.read_bytes()[: component.tensors["w"].offset]}


def test_gguf_beside_a_config_is_found_when_there_is_nothing_else(write_model) -> None:
    folder = write_model("m", ONE)
    write_gguf_file(folder / "x.gguf")
    assert read_checkpoint(folder).components[0].format == "safetensors"
    (folder / "model.safetensors").unlink()
    assert read_checkpoint(folder).components[0].format == "gguf"
    write_gguf_file(folder / "y.gguf")
    with pytest.raises(FormatError, match=r"several GGUF models \(x\.gguf, y\.gguf\); name one file"):
        read_checkpoint(folder)


def test_a_kuiper_file(tmp_path: Path) -> None:
    file = tmp_path / "llama.bin"
    header = KuiperHeader(8, 8, 1, 2, 1, 4, 6, 8, True)
    tensors = {name: bytes(tensor_nbytes(dtype, shape)) for name, dtype, shape in header.layout()}
    write_kuiper(file, header, {name: data.__bytes__ for name, data in tensors.items()})
    checkpoint = read_checkpoint(file)
    (component,) = checkpoint.components
    assert (checkpoint.kind, component.format, set(component.tensors)) == ("llm", "kuiper", set(tensors))
    assert checkpoint.headers == {"llama.bin.header": header.raw}
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(FormatError, match="not a KuiperLLama file"):
        read_checkpoint(file, allow_torch=True)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_bin_file_that_is_a_pickle_is_not_taken_for_kuipers(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "model.bin"
    torch.save({"w": torch.ones(2)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(FormatError, match="allow_torch"):
        read_checkpoint(file)
    assert read_checkpoint(file, allow_torch=True).components[0].format == "torch"


def test_an_unknown_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(b"")
    with pytest.raises(FormatError, match=r"'\.ckpt' \(known: \.safetensors, \.gguf"):
        read_checkpoint(tmp_path / "x.ckpt")
