"""A request never takes so small a part of a replica that the replica would have to refuse it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from configs.cluster import ClusterConfig
from deployments.ingress.asking import ask_of
from deployments.ingress.terms import Terms
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest, HeadRequest, ImageRequest

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


def test_the_same_asked_again_has_the_same_mark() -> None:
    config = ClusterConfig.model_validate({"store": {"path": "/s"}, "models": [{"id": "m", "path": "/m"}]})

    def mark(request: Any) -> int:
        return ask_of(request, Terms(), 60.0, config).mark

    def requests(model: str, text: str) -> list[Any]:
        chat = ChatRequest.model_validate({"model": model, "messages": [{"role": "user", "content": text}]})
        features = np.frombuffer(text.encode().ljust(64), np.float32).reshape(1, -1)
        return [
            ImageRequest(model=model, prompt=text),
            chat,
            CompletionRequest(model=model, prompt=text),
            CompletionRequest(model=model, prompt=tuple(map(ord, text))),
            EmbeddingRequest(model=model, input=(text,)),
            EmbeddingRequest(model=model, input=(tuple(map(ord, text)),)),
            HeadRequest(model, features),
        ]

    for one, same, other in zip(requests("m", "one"), requests("m", "one"), requests("m", "other"), strict=True):
        assert mark(one) == mark(same) != mark(other)
        assert mark(one)
    seeds = {mark(ImageRequest(model="m", prompt="x", seed=seed)) for seed in range(3)}
    assert len(seeds) == 1  # one that is drawn differs every time
