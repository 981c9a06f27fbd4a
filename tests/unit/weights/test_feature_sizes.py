"""The vectors that models give and take, told from their folders, against the stock libraries and the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from weights.formats.safetensors import read_header
from weights.operations.externalize import externalize
from weights.operations.feature_sizes import FeatureSizes, feature_sizes
from weights.records.errors import FormatError
from weights.storage.store import WeightStore

MODELS = Path(__file__).parents[3] / "infra" / "demo" / "models"


def sizes(store: WeightStore, folder: Path, component: str | None = None) -> FeatureSizes:
    manifest = externalize(store, "m", folder, component=component)
    return feature_sizes(manifest.kind, manifest.components.values(), store.skeleton(manifest))


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / "texts-bert", tmp_path / "bert"))


def hidden_size() -> int:
    header = read_header(MODELS / "texts-bert" / "model.safetensors")
    (shape,) = (ref.shape for name, ref in header.tensors.items() if name.endswith("word_embeddings.weight"))
    return int(shape[1])


def test_a_head_has_two_sizes_and_labels(store: WeightStore, tmp_path: Path) -> None:
    shape = read_header(MODELS / "texts-head" / "model.safetensors").tensors["linear.weight"].shape
    labels = json.loads((MODELS / "texts-head" / "config.json").read_text())["id2label"]
    expected = FeatureSizes(shape[1], shape[0], tuple(labels[str(number)] for number in range(len(labels))))
    assert sizes(store, MODELS / "texts-head") == expected
    folder = Path(shutil.copytree(MODELS / "texts-head", tmp_path / "head"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": None}))
    assert sizes(store, folder) == FeatureSizes(shape[1], shape[0])


def test_a_component_as_an_embedding_model(store: WeightStore) -> None:
    config = json.loads((MODELS / "digits-sdxl" / "text_encoder_2" / "config.json").read_text())
    assert sizes(store, MODELS / "digits-sdxl", "text_encoder_2").out_features == config["projection_dim"]
    config = json.loads((MODELS / "digits-flux" / "text_encoder" / "config.json").read_text())
    assert sizes(store, MODELS / "digits-flux", "text_encoder").out_features == config["hidden_size"]


@pytest.mark.parametrize("name", ["digits-flux", "adder", "bold"])
def test_other_kinds_have_none(store: WeightStore, name: str) -> None:
    assert sizes(store, MODELS / name) == FeatureSizes()


@pytest.mark.parametrize(
    ("pooling", "times"),
    [
        ({"pooling_mode": "mean"}, 1),
        ({"pooling_mode": ["cls", "mean"]}, 2),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True, "pooling_mode_cls_token": False}, 2),
        ({"word_embedding_dimension": 3}, 1),
    ],
)
def test_several_poolings_are_side_by_side(store: WeightStore, bert: Path, pooling: Any, times: int) -> None:
    (bert / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert sizes(store, bert) == FeatureSizes(out_features=times * hidden_size())


def test_the_pooling_is_where_modules_json_says(store: WeightStore, bert: Path) -> None:
    (bert / "1_Pooling").rename(bert / "pool")
    (bert / "pool" / "config.json").write_text('{"pooling_mode": ["cls", "mean"]}')
    modules = json.loads((bert / "modules.json").read_text())
    for stage in modules:
        stage["path"] = "pool" if stage["type"].endswith("Pooling") else stage["path"]
    (bert / "modules.json").write_text(json.dumps(modules))
    assert sizes(store, bert).out_features == 2 * hidden_size()


def test_without_stages_the_pooling_is_the_mean(store: WeightStore, bert: Path) -> None:
    (bert / "modules.json").unlink()
    (bert / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["cls", "mean"]}')
    assert sizes(store, bert).out_features == hidden_size()


@pytest.mark.parametrize("file", ["config.json", "1_Pooling/config.json", "modules.json"])
def test_damage_is_left_to_whoever_builds_it(store: WeightStore, bert: Path, file: str) -> None:
    manifest = externalize(store, "m", bert)
    (store.skeleton(manifest) / file).write_text("{")
    assert feature_sizes(manifest.kind, manifest.components.values(), store.skeleton(manifest)) == FeatureSizes()
    head = externalize(store, "head", MODELS / "texts-head")
    (store.skeleton(head) / "config.json").write_text("{")
    assert feature_sizes(head.kind, head.components.values(), store.skeleton(head)).labels == ()


def test_the_files_are_the_stock_ones(bert: Path) -> None:
    """Files that the other tests write stand where the stock folder has them."""
    with pytest.raises(FormatError):
        read_header(bert / "config.json")
    assert {"1_Pooling/config.json", "modules.json"} <= {str(file.relative_to(bert)) for file in bert.rglob("*.json")}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("1_Pooling/config.json", '{"pooling_mode": 5}'),
        ("modules.json", "[" * 100_000),
        ("modules.json", "5"),
        ("modules.json", '[{"type": 5, "path": "x"}]'),
        ("modules.json", '[{"type": "x.Pooling", "path": ["y"]}]'),
        ("modules.json", '[{"type": "x.Pooling", "path": "../../elsewhere"}]'),
        ("config.json", '{"hidden_size": %s}' % ("9" * 4000)),
    ],
)
def test_sizes_that_nobody_can_tell_are_none(store: WeightStore, bert: Path, file: str, text: str) -> None:
    """The directory asks for them while it publishes a model: an error there would leave the model registering."""
    manifest = externalize(store, "m", bert)
    (store.skeleton(manifest) / file).write_text(text)
    assert feature_sizes(manifest.kind, manifest.components.values(), store.skeleton(manifest)).out_features in (
        None,
        hidden_size(),
    )
