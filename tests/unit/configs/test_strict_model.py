"""Configs refuse what pydantic would take for a number."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.admission import AdmissionConfig, SloClassConfig
from configs.cluster import StoreConfig
from configs.model import GenerationDefaults, ModelConfig


@pytest.mark.parametrize("value", [True, False, "5", " 5 ", "1e3"])
def test_a_number_is_no_truth_and_no_text(value: object) -> None:
    for model, field, kind in (
        (AdmissionConfig, "max_waiting", "integer"),
        (AdmissionConfig, "default_timeout_s", "number"),
        (SloClassConfig, "target_s", "number"),
        (GenerationDefaults, "seed", "integer"),
    ):
        with pytest.raises(ValidationError, match=rf"{field}\n  Input should be a valid {kind}"):
            model.model_validate({field: value})


def test_sizes_and_truths_stay_what_they_were() -> None:
    assert StoreConfig.model_validate({"path": "s", "node_budget_bytes": "2 GiB"}).node_budget_bytes == 2**31
    assert ModelConfig.model_validate({"id": "m", "path": "p", "preload": True}).preload
    assert AdmissionConfig.model_validate({"max_waiting": 5.0, "default_timeout_s": 5}).default_timeout_s == 5.0


def test_only_programs_of_torch_export_are_compiled() -> None:
    assert ModelConfig.model_validate({"id": "m", "path": "/m/bert.PT2", "compiled": True}).compiled
    for path in ("/m/bert.onnx", "/m/bert", "hf://some/bert"):
        with pytest.raises(ValidationError, match=f"compiled\n  compiled is for a program of torch.export .*'{path}'"):
            ModelConfig.model_validate({"id": "m", "path": path, "compiled": True})
