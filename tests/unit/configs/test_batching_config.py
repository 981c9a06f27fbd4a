"""Settings of the batcher, and how mistakes in them are told."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.batching import BatchingConfig


def test_the_defaults_wait_only_as_long_as_it_pays() -> None:
    config = BatchingConfig()
    assert (config.strategy, config.max_queue_delay_us, config.preferred_batch_sizes) == ("prefer_latency", None, ())
    assert config.default_queue_policy.timeout_us is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default_priority": 3, "priority_levels": 2}, "default_priority 3 is beyond priority_levels 2"),
        ({"queue_policies": {2: {}, 0: {}}}, r"unknown priorities \[0, 2\] \(known: 1 to 1\)"),
        ({"preferred_batch_sizes": [8, 64]}, r"\[64\] are not within 1 to max_batch_size 32"),
        ({"preferred_batch_sizes": [0]}, r"\[0\] are not within"),
        ({"strategy": "prefer_batch"}, "prefer_batch needs max_queue_delay_us"),
        ({"strategy": "fastest"}, "prefer_latency"),
        ({"max_batch_size": 0}, "greater than or equal to 1"),
        ({"max_queue_delay_us": -1}, "greater than or equal to 0"),
        ({"max_wait": 3}, "max_wait"),
        ({"default_queue_policy": {"timeout_action": "delay"}}, "'reject' or 'defer'"),
    ],
)
def test_mistakes_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BatchingConfig.model_validate(settings)


def test_prefer_batch_with_a_delay() -> None:
    config = BatchingConfig(strategy="prefer_batch", max_queue_delay_us=100, preferred_batch_sizes=(8, 16, 32))
    assert config.preferred_batch_sizes == (8, 16, 32)
