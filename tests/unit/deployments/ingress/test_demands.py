"""The time that is left to a request: the least of its own, its caller's, and the queue's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from configs.cluster import WorkerConfig
from deployments.ingress.messages.terms import Terms, demand_of
from deployments.ingress.service.demands import Demands
from deployments.records import ClipRequest, ImageRequest


@pytest.mark.parametrize(
    ("asked", "longest", "usual", "waited", "left"),
    [
        (None, None, None, 0.0, 60.0),
        (None, None, 20.0, 0.0, 20.0),
        (5.0, None, 20.0, 0.0, 5.0),
        (90.0, None, 20.0, 0.0, 60.0),
        (5.0, None, 20.0, 2.0, 3.0),
        (None, 300.0, 20.0, 1.0, 299.0),
        (5.0, 300.0, None, 1.0, 4.0),
        (400.0, 300.0, None, 0.0, 300.0),
    ],
)
def test_the_least_of_all_limits_counts(
    asked: float | None, longest: float | None, usual: float | None, waited: float, left: float
) -> None:
    config: Any = SimpleNamespace(http=SimpleNamespace(request_timeout_s=60.0))
    queue: Any = SimpleNamespace(config=SimpleNamespace(default_timeout_s=usual))
    nobody: Any = None
    terms = replace(Terms(), timeout_s=asked, max_timeout_s=longest, waited_s=waited)
    assert Demands(config, queue, nobody).timeout_s(terms) == left


@pytest.mark.parametrize(
    ("request_", "is_stock", "work", "share"),
    [
        (
            ImageRequest(model="m", prompt="x", n=3, width=32, height=16, num_inference_steps=4),
            False,
            3 * 32 * 16 * 4,
            3 / 8,
        ),
        (ImageRequest(model="m", prompt="x", n=3, num_inference_steps=4), True, 3 * 4, 3 / 8),
        (ImageRequest(model="m", prompt="x", height=16, num_inference_steps=4), False, 16 * 4, 1 / 8),
        (ImageRequest(model="m", prompt="x", width=16), False, 16, 1 / 8),
        (ClipRequest(model="m", prompt="x", width=32, height=16, num_inference_steps=4), True, 4, 1 / 8),
    ],
)
def test_work_is_counted_in_pixels_and_steps(request_: Any, is_stock: bool, work: float, share: float) -> None:
    config: Any = SimpleNamespace(worker=WorkerConfig(max_running_images=8))
    found = demand_of(request_, Terms(), 5.0, config, is_stock=is_stock)
    assert (found.work, found.share) == (work, share)
