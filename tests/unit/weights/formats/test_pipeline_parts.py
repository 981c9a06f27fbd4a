"""A pipeline that lacks a part is refused by the name of the part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cluster.records.errors import ModelUnservable
from cluster.registry.importing import import_checkpoint
from configs.model import ModelConfig
from weights.formats.checkpoint import read_checkpoint
from weights.formats.pipeline_parts import PIPELINES, pipeline_variant, why_incomplete
from weights.records.errors import FormatError
from weights.storage.store import WeightStore

MODELS = Path(__file__).parents[4] / "infra" / "demo" / "models"
FLUX, SDXL = MODELS / "digits-flux", MODELS / "digits-sdxl"


def _copy(source: Path, target: Path, without: tuple[str, ...] = (), **index: object) -> Path:
    """Copy a pipeline, without files and folders, and with other entries in its index."""
    shutil.copytree(source, target)
    for name in without:
        path = target / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    file = target / "model_index.json"
    changed = json.loads(file.read_text()) | index
    file.write_text(json.dumps({name: value for name, value in changed.items() if value != "absent"}))
    return target


@pytest.mark.parametrize("folder", [FLUX, SDXL, MODELS / "adder", MODELS / "bold", MODELS / "texts-bert"])
def test_what_is_whole_and_what_is_no_pipeline_passes(folder: Path) -> None:
    assert why_incomplete(read_checkpoint(folder)) is None


@pytest.mark.parametrize(
    ("without", "index", "lack"),
    [
        (("vae/diffusion_pytorch_model.safetensors",), {}, "no weights of component 'vae'"),
        (("unet",), {}, "no weights of component 'unet'"),
        (("text_encoder_2/config.json",), {}, r"its text_encoder_2 has no config \(text_encoder_2/config.json is not"),
        (("tokenizer_2",), {}, r"its text_encoder_2 has no tokenizer \(no file in the folder tokenizer_2\)"),
        (("scheduler",), {}, "it has no solver"),
        ((), {"text_encoder_2": [None, None]}, "model_index.json names no text_encoder_2"),
        ((), {"vae": "absent"}, "model_index.json names no vae"),
        (("text_encoder",), {}, "no weights of component 'text_encoder'"),  # it is named, so somebody lost it
        (("text_encoder", "tokenizer"), {"text_encoder": [None, None], "tokenizer": [None, None]}, None),
        ((), {"_class_name": "WanPipeline", "vae": "absent"}, None),
    ],
)
def test_a_lacking_part_is_named(
    tmp_path: Path, without: tuple[str, ...], index: dict[str, object], lack: str | None
) -> None:
    folder = _copy(SDXL, tmp_path / "sdxl", without, **index)
    store = WeightStore(tmp_path / "store")
    entry = ModelConfig(id="sdxl", path=str(folder))
    if lack is None:
        assert import_checkpoint(
            store, entry, why_unservable=lambda checkpoint, bases, dtype: why_incomplete(checkpoint)
        ).class_name
        return
    with pytest.raises((FormatError, ModelUnservable), match=lack):
        import_checkpoint(store, entry, why_unservable=lambda checkpoint, bases, dtype: why_incomplete(checkpoint))
    assert store.model_names() == []
    assert not list(store.packs.glob("*"))


def test_the_parts_are_those_of_the_families() -> None:
    from deployments.engines.diffusion.families import FAMILIES

    assert PIPELINES.keys() == FAMILIES.keys()
    for name, parts in PIPELINES.items():
        family = FAMILIES[name]
        assert family.denoiser_name == parts.denoiser
        assert tuple(use.component for use in family.texts.encoders(None, "truncate")) == parts.encoders


DEMO = Path(__file__).parents[4] / "infra" / "demo" / "models"


@pytest.mark.parametrize("model", ["digits-flux", "digits-sdxl"])
def test_a_summary_has_it(tmp_path: Path, model: str) -> None:
    from cluster.registry.importing import import_checkpoint

    summary = import_checkpoint(WeightStore(tmp_path), ModelConfig(id="m", path=DEMO / model))
    is_flux = model == "digits-flux"
    switches = {"guidance_embeds": False, "use_dynamic_shifting": False} if is_flux else {}
    own = switches if is_flux else {"sample_height": 8, "sample_width": 8}
    assert summary.variant == own | {"pixels_per_latent": 4}
    again = import_checkpoint(WeightStore(tmp_path), ModelConfig(id="m", path=DEMO / model)).variant
    assert {name: type(value) for name, value in again.items()} == {
        name: type(value) for name, value in summary.variant.items()
    }, "from a file, numbers are numbers still"


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"guidance_embeds": "no"}), json.dumps({"other": True})])
def test_configs_that_do_not_say(tmp_path: Path, text: str) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(text)
    assert pipeline_variant(tmp_path) == {}
