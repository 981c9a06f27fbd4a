"""A request never takes so small a part of a replica that the replica would have to refuse it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from configs.cluster import ClusterConfig
from deployments.ingress.asking import ask_of
from deployments.ingress.terms import Terms
from deployments.records import CompletionRequest, EmbeddingRequest, HeadRequest, ImageRequest

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
    ask = ask_of(request_, Terms(), 60.0, config)
    assert ask.share == pytest.approx(max(share, 1 / most))
