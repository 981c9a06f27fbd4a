"""Requests of workflows for videos, over tiny models: the frames of diffusers' own call on the same latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.classes import CASES, assembled, wan_net
from kit.tiny.clips import VIDEOS, wan
from kit.tiny.pipelines import saved
from kit.workflows import Told, png_file
from unit.deployments.engines.stock.test_stock_pipelines import load, one_thread
from unit.deployments.engines.stock.test_stock_pipelines import run as run_engine
from unit.deployments.engines.stock.test_stock_samplers import wan_of_two
from unit.deployments.workflows.test_videos import Films, film, scene, two

from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.known import check_class
from deployments.records import ClipRequest
from deployments.services.clips import clip_request
from deployments.workflows.backend import Report
from deployments.workflows.running import run

__all__ = ["one_thread"]
pytestmark = pytest.mark.slow  # imports diffusers
SEED, SHIFT, TOKENS = 7, 5.0, 16
PICTURE = seeded_rng().integers(0, 256, (2, 32, 32, 3), np.uint8)


class Projector(Films):
    """A backend over one stock engine."""

    def __init__(self, class_name: str, folder: Path) -> None:
        super().__init__({"start": png_file(PICTURE[0]), "end": png_file(PICTURE[1])})
        self.name, self.engine = class_name, StockEngine(load(folder))
        self.found = dict.fromkeys(("one", "wan_high_noise", "wan_low_noise"), ("wan",))

    def facts(self, model: str) -> Any:
        return super().facts(model).__class__(self.name)

    async def video(self, request: ClipRequest, report: Report) -> np.ndarray:
        steps = request.sampler.num_steps if request.sampler is not None else 0
        short = request.model_copy(update={"max_sequence_length": TOKENS, "num_inference_steps": steps})
        stock = clip_request(short, self.name, check_class(self.name))
        frames = run_engine(self.engine, stock)[0].images
        assert frames is not None
        self.frames = frames
        return frames


def wan_of_pictures() -> Any:
    """Return a tiny Wan 2.2 that begins at a picture, which no image encoder reads."""
    parts = {name: one for name, one in wan().components.items() if one is not None}
    denoiser = wan_net(diffusers.WanTransformer3DModel, in_channels=36)
    return diffusers.WanImageToVideoPipeline(**parts | {"transformer": denoiser})


LOADS: dict[str, Any] = {name: ("LoadImage", {"image": name}) for name in ("start", "end")}
SQUARE = {"width": 32, "height": 32, "length": 5, "batch_size": 1}
PICTURES = [PIL.Image.fromarray(one) for one in PICTURE]
CASES_OF: Mapping[str, tuple[str, Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "noise": ("WanPipeline", wan, {}, {"guidance_scale": 3.0}),
    "two denoisers": (
        "WanPipeline",
        wan_of_two,
        two(
            **{"first_scheduler": "normal", "second_scheduler": "normal", "second_cfg": 2.0},
            **{"first_end_at_step": 2, "second_start_at_step": 2},
        ),
        {"guidance_scale": 3.0, "guidance_scale_2": 2.0},
    ),
    "a picture that is seen": (
        "WanImageToVideoPipeline",
        lambda: assembled("WanImageToVideoPipeline", **CASES["WanImageToVideoPipeline"].parts()),
        LOADS | scene("WanImageToVideo", start_image=("start", 0), **SQUARE),
        {"guidance_scale": 3.0, "image": PICTURES[0]},
    ),
    "two pictures": (
        "WanImageToVideoPipeline",
        wan_of_pictures,
        LOADS | scene("WanFirstLastFrameToVideo", start_image=("start", 0), end_image=("end", 0), **SQUARE),
        {"guidance_scale": 3.0, "image": PICTURES[0], "last_image": PICTURES[1]},
    ),
    "a reference": (
        "WanVACEPipeline",
        lambda: assembled("WanVACEPipeline", **CASES["WanVACEPipeline"].parts()),
        LOADS
        | scene("WanVaceToVideo", reference_image=("start", 0), strength=1.0, **SQUARE)
        | {
            "trim": ("TrimVideoLatent", {"samples": ("sample", 0), "trim_amount": ("scene", 3)}),
            "decode": ("VAEDecode", {"samples": ("trim", 0), "vae": ("vae", 0)}),
        },
        {"guidance_scale": 3.0, "reference_images": [PICTURES[0]]},
    ),
    "guidance": (
        "HunyuanVideoPipeline",
        lambda: assembled("HunyuanVideoPipeline", **CASES["HunyuanVideoPipeline"].parts()),
        {"cat": ("FluxGuidance", {"conditioning": ("text", 0), "guidance": 4.0})}
        | {"text": ("CLIPTextEncode", {"text": "a cat", "clip": ("clip", 0)})},
        {"guidance_scale": 4.0, "true_cfg_scale": 3.0},
    ),
    "a rate": (
        "LTXPipeline",
        VIDEOS["LTXPipeline"][0],
        {
            "rate": ("LTXVConditioning", {"positive": ("cat", 0), "negative": ("dog", 0), "frame_rate": 24.0}),
            "empty": ("EmptyLTXVLatentVideo", SQUARE | {"length": 9}),
        },
        {"guidance_scale": 3.0, "frame_rate": 24},
    ),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES_OF)
async def test_a_workflows_video_is_that_of_diffusers(case: str, tmp_path: Path) -> None:
    class_name, build, nodes, options = CASES_OF[case]
    stock = saved(build, tmp_path)
    empty: Any = ("EmptyHunyuanLatentVideo", SQUARE)
    prompts: Sequence[Any] = [("rate", 0), ("rate", 1)] if "rate" in nodes else [("cat", 0), ("dog", 0)]
    # Wan's pipelines leave the schedule to their scheduler, others give it even levels.
    schedule = {"sampler_name": "euler", "scheduler": "normal" if class_name.startswith("Wan") else "simple"}
    sampler = dict(film().nodes["sample"].inputs) | {"seed": SEED, **schedule, "steps": 4}
    sampler = {name: one for name, one in sampler.items() if isinstance(one, int | float | str)}
    sampler |= {"model": ("shift", 0), "positive": prompts[0], "negative": prompts[1], "latent_image": ("empty", 0)}
    nodes = {"empty": empty, "sample": ("KSampler", sampler)} | nodes
    if "scene" in nodes:
        nodes["sample"][1].update(schedule)
    backend = Projector(class_name, tmp_path)
    await run(film("one", **nodes), backend, Told())
    stock.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    if case == "two denoisers":
        stock.register_to_config(boundary_ratio=0.8)  # between the second step and the third
    length = 9 if class_name == "LTXPipeline" else 5
    made = stock(
        **{"prompt": "a cat", "negative_prompt": "a dog", "height": 32, "width": 32, "num_frames": length, **options},
        num_inference_steps=4,
        max_sequence_length=TOKENS,
        generator=torch.Generator().manual_seed(SEED),
        output_type="np",
    ).frames[0]
    assert backend.frames.shape == made.shape
    assert np.abs(backend.frames - (made * 255).round()).max() <= 1
