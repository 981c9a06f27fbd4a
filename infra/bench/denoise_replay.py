"""The part of `infra.bench denoise` on forwards that are replayed: the demo's denoisers, with and without, in turn.

What counts is the thread's CPU time, so that other work on the machine changes little. The bits are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import diffusers
import torch

from configs.options import Acceleration
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.diffusion.state import DenoiseState
from deployments.engines.graph.replay import Replays
from deployments.engines.records.protocol import DiffusionRequest

MODELS: Final = Path(__file__).parents[1] / "demo/models"
REQUESTS: Final = (1, 4, 8)
_SIDE_PX: Final = 32
_MAX_ROUNDS: Final = 24
_MIN_ROUNDS: Final = 3  # after which each forward that can be is replayed


def measure_replay(num_steps: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Measure for about so long; returns a row for each model and number of requests.

    The milliseconds are the least and the median of a step, and `ratio` is that of the medians.
    """
    with torch.no_grad():
        return [
            _measure(name, count, num_steps, seconds / 6, seed)
            for name in ("digits-flux", "digits-sdxl")
            for count in REQUESTS
        ]


def _measure(name: str, count: int, num_steps: int, seconds: float, seed: int) -> dict[str, Any]:
    ways = {"eager": make_pipeline(name, None), "replayed": make_pipeline(name, Replays(min_forwards=2))}
    times: dict[str, list[float]] = {way: [] for way in ways}
    end_s, round_ = time.perf_counter() + seconds, 0
    while round_ <= _MIN_ROUNDS or (time.perf_counter() < end_s and round_ < _MAX_ROUNDS):
        latents = []
        for way, pipeline in ways.items():
            seeds = range(seed + round_ * count, seed + (round_ + 1) * count)
            states = [start_request(pipeline, number, num_steps) for number in seeds]
            took_s = _run(pipeline, states)
            times[way] += took_s if round_ >= _MIN_ROUNDS else []
            latents.append(torch.cat([state.latents for state in states]))
        if not torch.equal(*latents):
            raise RuntimeError(f"{name}: replayed forwards give other bits")
        round_ += 1
    medians = {way: statistics.median(found) * 1e3 for way, found in times.items()}
    return {
        "model": name,
        "num_requests": count,
        "steps": len(times["eager"]),
        **{f"{way}_ms": found for way, found in medians.items()},
        **{f"least_{way}_ms": min(found) * 1e3 for way, found in times.items()},
        "ratio": medians["replayed"] / medians["eager"],
    }


def make_pipeline(name: str, replays: Replays | None) -> DenoisePipeline:
    """Return a demo model's denoise loop in float32."""
    folder = MODELS / name
    is_flux = (folder / "transformer").is_dir()
    denoiser: Any = diffusers.FluxTransformer2DModel if is_flux else diffusers.UNet2DConditionModel
    part = "transformer" if is_flux else "unet"
    modules = {
        part: denoiser.from_pretrained(folder / part).float().eval(),
        "vae": diffusers.AutoencoderKL.from_pretrained(folder / "vae").float().eval(),
    }
    class_name = "FluxPipeline" if is_flux else "StableDiffusionXLPipeline"
    return create_pipeline(class_name, folder, modules, replays=replays)


def start_request(
    pipeline: DenoisePipeline, seed: int, num_steps: int, acceleration: Acceleration | None = None
) -> DenoiseState:
    """Return a request with a random text, guided where the model has a negative one."""
    generator, config = torch.Generator().manual_seed(seed), pipeline.denoiser.config
    prefixes: Sequence[str] = ("",)
    if pipeline.family.denoiser_name == "transformer":
        width, pooled = config.joint_attention_dim, config.pooled_projection_dim
    else:
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        width, prefixes = config.cross_attention_dim, ("", "negative_")
    text = {}
    for prefix in prefixes:
        text[f"{prefix}prompt_embeds"] = torch.randn(1, 16, width, generator=generator)
        text[f"{prefix}pooled_prompt_embeds"] = torch.randn(1, pooled, generator=generator)
    request = DiffusionRequest(
        request_id=str(seed),
        seed=seed,
        height=_SIDE_PX,
        width=_SIDE_PX,
        num_inference_steps=num_steps,
        guidance_scale=3.0,
        acceleration=acceleration,
    )
    return pipeline.start_request(request, text)


def _run(pipeline: DenoisePipeline, states: Sequence[DenoiseState]) -> list[float]:
    """Return the CPU seconds of each step."""
    found = []
    while not states[0].done:
        begin_s = time.thread_time()
        pipeline.step(states)
        found.append(time.thread_time() - begin_s)
    return found
