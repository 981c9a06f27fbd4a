"""Checkpoint folders: the layouts that are known, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weights.errors import FormatError
from weights.formats.checkpoint import LORA_FILE, read_checkpoint

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
    assert read_checkpoint(sentence).kind == "embedding"
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


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/etc/passwd", "gone.safetensors", ".."])
def test_a_shard_must_be_a_file_beside_the_index(sharded: Path, name: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="is not a file beside it"):
        read_checkpoint(sharded)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}'])
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


def test_a_component_outside_the_checkpoint_is_refused(write_pipeline) -> None:
    other = write_pipeline("other", {"vae": ONE})
    folder = write_pipeline("p", {"vae": ONE})
    index = {"_class_name": "P", f"../{other.name}/vae": ["diffusers", "TinyVae"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="model_index"):
        read_checkpoint(folder)


def test_what_is_no_checkpoint(tmp_path: Path, write_model) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        read_checkpoint(tmp_path / "gone")
    with pytest.raises(FormatError, match="unknown layout"):
        read_checkpoint(tmp_path)
    bare = write_model("bare", ONE)
    (bare / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="no safetensors weights"):
        read_checkpoint(bare)
    (bare / "model_index.json").write_text('{"vae": ["diffusers", "Vae"]}')
    with pytest.raises(FormatError, match="names no component"):
        read_checkpoint(bare)
    (bare / "model.safetensors").write_bytes(b"junk")
    (bare / "model_index.json").unlink()
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        read_checkpoint(bare)
