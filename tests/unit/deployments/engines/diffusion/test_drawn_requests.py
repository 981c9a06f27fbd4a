"""Drawn requests of every family: the same bits replayed or in halves, and with a LoRA those of changed weights."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.seeding import seeded_random, seeded_rng
from kit.tiny.classes import assembled
from kit.tiny.pipelines import make, saved
from kit.tiny.seeing import edit_small_areas, qwen_edit
from torch import nn
from unit.deployments.engines.diffusion.reader_pairs import create_ours

from deployments.engines.costs.memory_limits import MemoryLimits
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.graph.replay import Replays
from deployments.engines.records.protocol import AdapterUse, DiffusionRequest
from weights.operations.adapters import LoraAdapter, LoraPair

NEWER_EDIT = "QwenImageEditPlusPipeline of 2511"  # it reads its images as if their time were over
MODELS = [*sorted({family.class_name for family in FAMILIES.values()}), NEWER_EDIT]
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


def make_ours(name: str, folder: Path) -> DenoisePipeline:
    def build_edit() -> Any:
        parts = qwen_edit()
        net = parts["transformer"]
        net = type(net).from_config(net.config, zero_cond_t=name == NEWER_EDIT)
        return assembled(class_name, **parts | {"transformer": net})

    class_name = name.split()[0]
    if class_name.startswith("QwenImageEdit"):
        saved(build_edit, folder)
    else:
        make(class_name, folder)
    return create_ours(class_name, folder)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[DenoisePipeline, Path]:
    """A pipeline and its folder."""
    if request.param in OF_FIXTURES:
        pair = request.getfixturevalue(OF_FIXTURES[request.param])
        return pair.ours, pair.folder
    folder = tmp_path_factory.mktemp(request.param)
    return make_ours(request.param, folder), folder


@pytest.fixture
def draw(model: tuple[DenoisePipeline, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Return a function that draws a request of the model, and its conditioning."""
    edit_small_areas(monkeypatch)  # images of references
    ours, chance = model[0], seeded_random()
    return lambda **options: drawn_job(ours, chance, **options)


def drawn_job(ours: DenoisePipeline, chance: random.Random, **options: Any) -> Job:
    family, scale = ours.family, chance.choice([1.0, 2.5])
    side = 64 if family.references.most else 32
    height, width = chance.choice([(side, side), (side, side), (side, 2 * side), (2 * side, side)])
    image = seeded_rng().integers(0, 256, (height, width, 3), dtype="uint8")
    if family.references.most:
        options["references"] = (image,) * chance.randrange(1, min(2, family.references.most) + 1)
    elif chance.random() < 0.5 and (family.steps.attends_to_image or "inpainting" in family.defaults.edits):
        options |= {"init_image": image, "strength": 0.9}
        if not family.steps.attends_to_image and chance.random() < 0.5:
            options["mask_image"] = image[..., 0]
    settings: dict[str, Any] = {
        "request_id": str(chance.random()),
        "seed": chance.randrange(2**32),
        "num_images": chance.choice([1, 1, 2]),
        "num_inference_steps": chance.choice([3, 4]),
        "guidance_scale": scale,
        "true_cfg_scale": scale,
    }
    request = DiffusionRequest(height=height, width=width, **(settings | options))
    text, pooled = family.network.text_widths(ours.denoiser)
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


@pytest.mark.drawn
@pytest.mark.parametrize("num_turns", [6, pytest.param(60, marks=pytest.mark.long)])
def test_replayed_forwards_are_the_modules_own(
    model: tuple[DenoisePipeline, Path], draw: Callable[..., Job], num_turns: int
) -> None:
    """No replay may remember a Python value that a forward reads of its inputs, the length of a prompt say.

    Nor what an adapter adds: some of the requests have one of two LoRAs of equal shapes, as it is or merged.
    """
    plain, folder = model
    replays, chance = Replays(min_forwards=2), seeded_random()
    adapters = {name: adapter_of(plain) for name in ("fine", "bold")}
    modules = {plain.family.denoiser_name: plain.denoiser, "vae": plain._codec.vae}
    ours = create_pipeline(plain.family.class_name, folder, modules, replays=replays)
    for turn in range(num_turns):
        jobs = [draw(**drawn_uses(chance)) for _ in range(1 + turn % 3 // 2)]
        latents = run(ours, jobs, adapters), run(plain, jobs, adapters)
        for (request, texts), found, expected in zip(jobs, *latents, strict=True):
            lengths = [len(one[0]) for name, one in texts.items() if "pooled" not in name]
            assert torch.equal(found, expected), (request, lengths)
    known = list(replays._known.values())
    assert any(one.is_tried for one in known)
    assert not any(one.is_refused for one in known)


def drawn_uses(chance: random.Random) -> dict[str, Any]:
    if chance.random() < 0.5:
        return {}
    use = AdapterUse(chance.choice(["fine", "bold"]), chance.choice([0.7, -0.2]))
    return {"adapters": (use,), "merges_adapter": chance.random() < 0.3}


STRENGTH = 0.7


def adapter_of(ours: DenoisePipeline) -> LoraAdapter:
    """Return a LoRA of all layers that can have one, but for embeddings: with one of those nothing is known ahead."""

    def pair(layer: Any) -> LoraPair:
        down, up = (2, *layer.weight.shape[1:]), (len(layer.weight), 2, *[1] * (layer.weight.ndim - 2))
        return LoraPair(0.2 * torch.randn(down), 0.2 * torch.randn(up), 0.5)

    family = ours.family
    layers = {
        name: part
        for name, part in ours.denoiser.named_modules()
        if isinstance(part, nn.Linear | nn.Conv2d) and not name.startswith((*family.network.embedding_parts, "."))
    }
    return LoraAdapter(Path("drawn"), {family.denoiser_name: {name: pair(part) for name, part in layers.items()}})


def with_changed_weights(ours: DenoisePipeline, folder: Path, adapter: LoraAdapter) -> DenoisePipeline:
    denoiser = copy.deepcopy(ours.denoiser).requires_grad_(False)
    for name, pair in adapter.components[ours.family.denoiser_name].items():
        weight = denoiser.get_submodule(name).weight
        weight += (STRENGTH * pair.scale * pair.up.flatten(1) @ pair.down.flatten(1)).view(weight.shape)
    modules = {ours.family.denoiser_name: denoiser, "vae": ours._codec.vae}
    return create_pipeline(ours.family.class_name, folder, modules)


@pytest.mark.drawn
@pytest.mark.parametrize("num_turns", [2, pytest.param(50, marks=pytest.mark.long)])
def test_a_lora_of_all_layers_does_what_changed_weights_do_for_its_request_alone(
    model: tuple[DenoisePipeline, Path], draw: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """Also beside another request, in halves, and where nothing is known ahead: then bit for bit."""
    ours, folder = model
    forward, adapters, sizes = ours._forward, {"drawn": adapter_of(ours)}, list[int]()
    changed = with_changed_weights(ours, folder, adapters["drawn"])

    def small_forward(rows: Any, height: int, width: int) -> torch.Tensor:
        found = forward(rows, height, width)
        sizes.append(len(rows))
        if len(rows) > 1:
            raise MemoryError("for so many rows")
        return found

    for turn in range(num_turns):
        plain = draw(num_images=2, **({} if turn else {"guidance_scale": 1.0, "true_cfg_scale": 1.0}))
        mate = replace(plain[0], request_id="mate", seed=1), plain[1]
        job = replace(plain[0], adapters=(AdapterUse("drawn", STRENGTH),)), plain[1]
        (alone,), (expected,), (unchanged,) = run(ours, [job], adapters), run(changed, [plain]), run(ours, [mate])
        error, effect = ((alone - one).abs().max() for one in (expected, run(ours, [plain])[0]))
        assert error <= 1e-3 * effect, job[0]
        for company in ([mate, job], [job, mate]):
            assert all(
                map(torch.equal, run(ours, company, adapters), [alone if one is job else unchanged for one in company])
            )
        with monkeypatch.context() as patch:
            patch.setattr(ours._modulation, "rows_of", lambda group: ())
            assert torch.equal(run(ours, [job], adapters)[0], alone), job[0]
        with monkeypatch.context() as patch:
            patch.setattr(ours, "_memory", MemoryLimits())
            patch.setattr(ours, "_forward", small_forward)
            assert torch.equal(run(ours, [job], adapters)[0], alone), job[0]
    assert max(sizes) > 1
