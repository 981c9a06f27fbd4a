"""Drawn requests of every family give the same bits however their forwards run: replayed, say."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.seeding import seeded_random, seeded_rng
from unit.deployments.engines.diffusion.reader_pairs import create_ours
from unit.deployments.engines.stock.tiny_classes import assembled
from unit.deployments.engines.stock.tiny_pipelines import make, saved
from unit.deployments.engines.stock.tiny_seeing import edit_small_areas, qwen_edit

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.graph.replay import Replays
from deployments.engines.protocol import DiffusionRequest

CLASSES = sorted({family.class_name for family in FAMILIES.values()})
OF_FIXTURES = {  # of conftest.py, for tests of their own, too
    "FluxPipeline": "flux",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusionPipeline": "stable_diffusion",
    "StableDiffusion3Pipeline": "stable_diffusion_3",
}
LENGTHS = [*range(1, 12), 16, 17, 30, 31, 32, 33, 40]  # of prompts: many that are padded alike
Conditioning = dict[str, torch.Tensor]
Job = tuple[DiffusionRequest, Conditioning]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are slower on more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_ours(class_name: str, folder: Path) -> DenoisePipeline:
    if class_name.startswith("QwenImageEdit"):
        saved(lambda: assembled(class_name, **qwen_edit()), folder)
    else:
        make(class_name, folder)
    return create_ours(class_name, folder)


@pytest.fixture(scope="module", params=CLASSES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[DenoisePipeline, Path]:
    """A pipeline and its folder."""
    if request.param in OF_FIXTURES:
        pair = request.getfixturevalue(OF_FIXTURES[request.param])
        return pair.ours, pair.folder
    folder = tmp_path_factory.mktemp(request.param)
    return make_ours(request.param, folder), folder


@pytest.fixture
def draw(model: tuple[DenoisePipeline, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Return what draws a request of the model, and what stands for its texts."""
    edit_small_areas(monkeypatch)  # images of references
    ours, chance = model[0], seeded_random()
    return lambda **options: drawn_job(ours, chance, **options)


def drawn_job(ours: DenoisePipeline, chance: random.Random, **options: Any) -> Job:
    family, scale = ours.family, chance.choice([1.0, 2.5])
    side = 64 if family.max_references else 32
    height, width = chance.choice([(side, side), (side, side), (side, 2 * side), (2 * side, side)])
    image = seeded_rng().integers(0, 256, (height, width, 3), dtype="uint8")
    if family.max_references:
        options["references"] = (image,) * chance.randrange(1, min(2, family.max_references) + 1)
    elif chance.random() < 0.5 and (family.attends_to_image or "inpainting" in family.edits):
        options |= {"init_image": image, "strength": 0.9}
        if not family.attends_to_image and chance.random() < 0.5:
            options["mask_image"] = image[..., 0]
    settings = {
        "request_id": str(chance.random()),
        "seed": chance.randrange(2**32),
        "num_images": chance.choice([1, 1, 2]),
        "num_inference_steps": chance.choice([3, 4]),
        "guidance_scale": scale,
        "true_cfg_scale": scale,
    }
    request = DiffusionRequest(height=height, width=width, **(settings | options))
    text, pooled = family.text_widths(ours.denoiser)
    texts = {}
    for prefix in ("", "negative_"):
        texts[f"{prefix}prompt_embeds"] = torch.randn(1, chance.choice(LENGTHS), text)
        if pooled is not None:
            texts[f"{prefix}pooled_prompt_embeds"] = torch.randn(1, pooled)
    return request, texts


def run(ours: DenoisePipeline, jobs: list[Job], adapters: Any = None) -> list[torch.Tensor]:
    """Return the latents of requests that step together, and leave when they are done."""
    states = [ours.start_request(request, texts, adapters) for request, texts in jobs]
    while running := [state for state in states if not state.done]:
        ours.step(running)
    return [state.latents for state in states]


@pytest.mark.parametrize("num_turns", [6, pytest.param(60, marks=pytest.mark.long)])
def test_replayed_forwards_are_the_modules_own(
    model: tuple[DenoisePipeline, Path], draw: Callable[..., Job], num_turns: int
) -> None:
    """What a forward reads of its inputs as a value of Python, the length of a prompt say, no replay may remember."""
    plain, folder = model
    replays = Replays(min_forwards=2)
    modules = {plain.family.denoiser_name: plain.denoiser, "vae": plain._codec.vae}
    ours = create_pipeline(plain.family.class_name, folder, modules, replays=replays)
    for turn in range(num_turns):
        jobs = [draw() for _ in range(1 + turn % 3 // 2)]
        for (request, texts), found, expected in zip(jobs, run(ours, jobs), run(plain, jobs), strict=True):
            lengths = [len(one[0]) for name, one in texts.items() if "pooled" not in name]
            assert torch.equal(found, expected), (request, lengths)
    known = list(replays._known.values())
    assert any(one.is_tried for one in known)
    assert not any(one.is_refused for one in known)
