"""The controller's settings: classes of service by model, and what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.admission import ControllerConfig, SloClassConfig


def test_a_model_has_the_class_that_the_config_gives_it() -> None:
    config = ControllerConfig.model_validate(
        {"slo_classes": {"gold": {"target_s": 2}, "batch": {"weight": 0.5}}, "models": {"a": "gold", "b": "batch"}}
    )
    assert config.slo_of("a") == ("gold", SloClassConfig(target_s=2.0))
    assert config.slo_of("b") == ("batch", SloClassConfig(weight=0.5))  # in place of the one that is built in
    assert config.slo_of("any") == ("standard", SloClassConfig())
    assert ControllerConfig(models={"a": "interactive"}).slo_of("a")[1].weight == 4.0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"models": {"a": "golden"}}, r"models\.a: no service class 'golden' .known: batch, interactive, standard"),
        ({"policy": "fastest"}, "latency-first"),
        ({"tick_s": 5}, "less than or equal to 1"),
        ({"slo_classes": {"gold": {"target_s": 0}}}, "greater than 0"),
        ({"slo": {}}, "slo"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ControllerConfig.model_validate(settings)
