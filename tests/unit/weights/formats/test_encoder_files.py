"""The files that make one text encoder another, beside its config and its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from weights.formats.encoder_files import parts_hash, tokenizer_folder
from weights.formats.source import skeleton_files
from weights.operations.externalize import externalize
from weights.records.manifest import Component
from weights.storage.store import WeightStore

MODELS = Path(__file__).parents[4] / "infra" / "demo" / "models"


def edited(file: str, key: str, value: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | {key: value}))

    return edit


def written(file: str, text: str = "{}") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)

    return write


OTHERS = {
    "pooling": edited("1_Pooling/config.json", "pooling_mode", "cls"),
    "limit": edited("sentence_bert_config.json", "max_seq_length", 7),
    "tokenizer": edited("tokenizer.json", "version", "other"),
    "tokenizer config": edited("tokenizer_config.json", "model_max_length", 9),
    "a vocabulary beside it": written("vocab.txt", "a"),
    "stages": lambda folder: (folder / "modules.json").write_text("[]"),
    "one stage more": written("2_Normalize/config.json"),
    "end tokens": written("generation_config.json"),
}
SAME = {
    "readme": written("README.md", "other words"),
    "index": written("model.safetensors.index.fp16.json"),
    "another runtime's": written("onnx/model.json"),
    "solver": written("scheduler/scheduler_config.json"),
}


def hash_of(folder: Path, component: str = ".") -> str:
    return parts_hash(folder, component, skeleton_files(folder))


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / "texts-bert", tmp_path / "bert"))


@pytest.mark.parametrize("what", OTHERS)
def test_what_it_is_built_from_tells_encoders_apart(bert: Path, what: str) -> None:
    before = hash_of(bert)
    OTHERS[what](bert)
    assert hash_of(bert) != before


@pytest.mark.parametrize("what", SAME)
def test_what_it_is_not_built_from_does_not(bert: Path, what: str) -> None:
    before = hash_of(bert)
    SAME[what](bert)
    assert hash_of(bert) == before


def test_pipelines_may_number_their_encoders_differently(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODELS / "digits-flux", tmp_path / "flux"))
    second = hash_of(folder, "text_encoder_2")
    assert second != hash_of(folder, "text_encoder")
    for part in ("text_encoder", "tokenizer"):
        (folder / f"{part}_2").rename(folder / f"{part}_3")
    assert hash_of(folder, "text_encoder_3") == second
    edited("tokenizer/tokenizer_config.json", "model_max_length", 3)(folder)
    assert hash_of(folder, "text_encoder_3") == second
    edited("tokenizer_3/tokenizer_config.json", "model_max_length", 3)(folder)
    assert hash_of(folder, "text_encoder_3") != second


def test_an_encoder_without_such_files_has_none(tmp_path: Path) -> None:
    (tmp_path / "image_encoder").mkdir()
    (tmp_path / "image_encoder" / "config.json").write_text("{}")
    assert hash_of(tmp_path, "image_encoder") == hash_of(tmp_path) == ""
    assert tokenizer_folder("text_encoder_2") == "tokenizer_2"
    assert tokenizer_folder(".") == "."


def keys_of(parts: dict[str, Component]) -> dict[str, str]:
    return {name: part.module_key for name, part in parts.items()}


def test_pipelines_share_the_encoders_that_they_share(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    flux = externalize(store, "flux", MODELS / "digits-flux").components
    tuned = externalize(store, "tuned", MODELS / "digits-flux-inverted").components
    assert {name for name in flux if flux[name].module_key != tuned[name].module_key} == {"transformer"}
    folder = Path(shutil.copytree(MODELS / "digits-flux", tmp_path / "other"))
    edited("tokenizer/tokenizer_config.json", "model_max_length", 3)(folder)
    other = externalize(store, "other", folder).components
    assert {name for name in flux if flux[name].module_key != other[name].module_key} == {"text_encoder"}
    assert flux["text_encoder"].structure_key == other["text_encoder"].structure_key
    alone = externalize(store, "alone", MODELS / "digits-flux", component="text_encoder").components
    assert alone["text_encoder"].module_key == flux["text_encoder"].module_key


@pytest.mark.parametrize("name", ["digits-flux", "texts-bert", "texts-head", "adder"])
def test_a_manifest_of_before_is_completed_when_it_is_read(tmp_path: Path, name: str) -> None:
    """The keys of components that read no text are what they were."""
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "m", MODELS / name)
    assert store.manifest("m") == manifest
    file = store.models / "m" / "manifest.json"
    before = json.loads(file.read_text())
    for part in before["components"].values():
        del part["parts_hash"]
    file.write_text(json.dumps(before))
    plain = keys_of({name: Component.model_validate(part) for name, part in before["components"].items()})
    readers = {"digits-flux": {"text_encoder", "text_encoder_2"}, "texts-bert": {"model"}, "adder": {"model"}}
    for read in (store.manifest("m"), externalize(store, "m", MODELS / name)):
        assert keys_of(read.components) == keys_of(manifest.components)
    changed = {part for part, key in plain.items() if key != manifest.components[part].module_key}
    assert changed == readers.get(name, set())
    shutil.rmtree(store.skeleton(manifest))
    assert keys_of(store.manifest("m").components) == plain
