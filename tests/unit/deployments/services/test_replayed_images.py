"""Recorded forwards of a replica: they go with the modules whose weights they read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from kit.waiting import until
from unit.deployments.services.test_merged_images import OpenHost, Studio, open_studio, request_of

from deployments.engines.graph.replay import BoundCalls

pytestmark = pytest.mark.slow  # imports diffusers
__all__ = ["OpenHost", "open_studio"]


async def test_what_is_bound_to_weights_is_gone_when_they_are(
    open_studio: Callable[..., Studio], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node wants its memory back, and Python's collector may come late: once the engine's task has ended."""
    found: list[weakref.ref[Any]] = []
    run = BoundCalls.run

    def noting(self: BoundCalls, *inputs: Any) -> Any:
        weights = [one for _, args, _ in self.calls for one in args if getattr(one, "ndim", 0) == 2]
        found.append(weakref.ref(weights[0]))
        return run(self, *inputs)

    monkeypatch.setattr(BoundCalls, "run", noting)
    studio = open_studio()
    for seed in range(2):
        await studio.draw(request_of(seed, None, num_inference_steps=12))
    assert found
    assert found[-1]() is not None
    monkeypatch.undo()
    gc.collect()
    gc.disable()
    try:
        assert studio.cache.evict("flux") == []
        await until(lambda: found[-1]() is None, "an end of what was bound")
    finally:
        gc.enable()
