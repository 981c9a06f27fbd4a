"""Solvers of requests to pipelines that diffusers runs, and their options, beside diffusers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from kit.tiny.clips import VIDEOS, wan
from kit.tiny.pipelines import PIPELINES, saved
from unit.deployments.engines.stock.test_stock_pipelines import PROMPT, load, one_thread, run, split

from deployments.engines.diffusion.stochastic_solvers import SOLVERS
from deployments.engines.records.protocol import EngineError, StockRequest
from deployments.engines.stock.engine import StockEngine

__all__ = ["one_thread"]

WAN, PAG = VIDEOS["WanPipeline"][1], PIPELINES["StableDiffusionPAGPipeline"][1]


def wan_as_published() -> Any:
    pipeline = wan()
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    pipeline.register_modules(scheduler=diffusers.UniPCMultistepScheduler(**flow))
    return pipeline


def test_the_shift_of_wans_solver_is_the_requests(tmp_path: Path) -> None:
    stock = saved(wan_as_published, tmp_path)
    engine, found = StockEngine(load(tmp_path)), []
    for shift in (3.0, 8.0):
        stock.scheduler = diffusers.UniPCMultistepScheduler.from_config(stock.scheduler.config, flow_shift=shift)
        made = stock(PROMPT, **WAN, num_inference_steps=2, generator=torch.Generator().manual_seed(3), output_type="np")
        request = StockRequest(
            f"r{shift}", 3, PROMPT, **split("WanPipeline", WAN), scheduler_options={"flow_shift": shift}
        )
        found.append(run(engine, request)[0].images)
        np.testing.assert_array_equal(found[-1], (made.frames[0] * 255).round().astype(np.uint8))
    assert (found[0] != found[1]).any()
    with pytest.raises(EngineError, match="flow_shift is 0, expected a number from"):
        run(engine, StockRequest("r", 3, PROMPT, **split("WanPipeline", WAN), scheduler_options={"flow_shift": 0}))


@pytest.mark.drawn
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_solvers_of_our_own_draw_of_the_requests_seed(solver: str, tmp_path: Path) -> None:
    stock = saved(PIPELINES["StableDiffusionPAGPipeline"][0], tmp_path)
    rest = split("StableDiffusionPAGPipeline", PAG)
    engine = StockEngine(load(tmp_path))
    found = [run(engine, StockRequest(f"r{n}", 3, PROMPT, **rest, scheduler=solver))[0].images for n in range(2)]
    stock.scheduler = SOLVERS[solver].from_pretrained(tmp_path, subfolder="scheduler")
    made = stock(PROMPT, **PAG, num_inference_steps=2, generator=torch.Generator().manual_seed(3), output_type="np")
    for images in found:
        np.testing.assert_array_equal(images, (made.images * 255).round().astype(np.uint8))
