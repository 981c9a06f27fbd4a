"""A request never takes so small a part of a replica that the replica would have to refuse it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from configs.cluster import ClusterConfig
from configs.options import Acceleration
from deployments.ingress.messages.terms import Terms, demand_of
from deployments.records import ClipRequest, CompletionRequest, EmbeddingRequest, HeadRequest, ImageRequest

SKIPPING = ImageRequest(
    model="m", prompt="x", width=16, height=8, num_inference_steps=12, acceleration=Acceleration(interval=3)
)
REQUESTS = (
    (ImageRequest(model="m", prompt="x", n=2), 2 / 16),
    (CompletionRequest(model="m", prompt="x"), 1 / 64),
    (EmbeddingRequest(model="m", input=["a", "b", "c"]), 3 / 40),
    (HeadRequest("m", np.zeros((1, 4), np.float32)), 1 / 64),
)


@pytest.mark.parametrize(("request_", "share"), REQUESTS)
@pytest.mark.parametrize("most", [256, 5, 1])
def test_as_many_start_at_once_as_serve_lets_in(request_: Any, share: float, most: int) -> None:
    config = ClusterConfig.model_validate(
        {
            "store": {"path": "/s"},
            "worker": {"max_ongoing_requests": most, "max_running_images": 16, "max_num_seqs": 64},
            "text_encoder": {"max_ongoing_requests": most, "max_running_inputs": 40},
            "models": [{"id": "m", "path": "/m"}],
        }
    )
    ask = demand_of(request_, Terms(), 60.0, config)
    assert ask.share == pytest.approx(max(share, 1 / most))


@pytest.mark.parametrize(
    ("request_", "is_stock", "work"),
    [
        (ImageRequest(model="m", prompt="x", n=2, width=16, height=8, num_inference_steps=5), False, 16 * 8 * 2 * 5),
        (ImageRequest(model="m", prompt="x", n=2, width=16, height=8, num_inference_steps=5), True, 2 * 5),
        (SKIPPING, False, 16 * 8 * 6),  # of its 12 steps: 0, 1, 2, 4, 7, 10
        (ImageRequest(model="m", prompt="x", n=2, num_inference_steps=5), True, 2 * 5),
        (ClipRequest(model="m", prompt="x", width=16, height=8, num_inference_steps=5), True, 5),
    ],
)
def test_work_of_a_stock_pipeline_does_not_depend_on_whether_the_size_is_said(
    request_: Any, is_stock: bool, work: float
) -> None:
    config = ClusterConfig.model_validate({"store": {"path": "/s"}, "models": [{"id": "m", "path": "/m"}]})
    assert demand_of(request_, Terms(), 60.0, config, is_stock=is_stock).work == work
