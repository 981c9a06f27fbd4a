"""Variants of a pipeline class are read from configs, and damage in those is not told here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.model import ModelConfig
from weights.formats.pipeline_variant import pipeline_variant
from weights.store import WeightStore

DEMO = Path(__file__).parents[4] / "infra" / "demo" / "models"


@pytest.mark.parametrize("model", ["digits-flux", "digits-sdxl"])
def test_a_summary_has_it(tmp_path: Path, model: str) -> None:
    from cluster.registry.importing import import_checkpoint

    summary = import_checkpoint(WeightStore(tmp_path), ModelConfig(id="m", path=DEMO / model))
    is_flux = model == "digits-flux"
    switches = {"guidance_embeds": False, "use_dynamic_shifting": False} if is_flux else {}
    assert summary.variant == switches | {"pixels_per_latent": 4}
    again = import_checkpoint(WeightStore(tmp_path), ModelConfig(id="m", path=DEMO / model)).variant
    assert {name: type(value) for name, value in again.items()} == {
        name: type(value) for name, value in summary.variant.items()
    }, "from a file, numbers are numbers still"


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"guidance_embeds": "no"}), json.dumps({"other": True})])
def test_configs_that_do_not_say(tmp_path: Path, text: str) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(text)
    assert pipeline_variant(tmp_path) == {}
