"""Guidance's branches on two ranks: the bits of one rank, and failures that stay with their step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.ranks import run_ranks
from kit.seeding import seeded_random
from kit.tiny.pipelines import make
from safetensors.torch import load_file
from torch import nn

from deployments.engines.building.build import build_module
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.diffusion.shared_sequence import SHARED_CLASSES
from deployments.engines.ranks.following import RankChannel, follow
from deployments.engines.ranks.group import RankGroup, RankLost
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.records.protocol import AdapterUse, ConditionedRequest
from infra.bench.rank_prediction import TokenWork
from weights.operations.adapters import LoraAdapter, LoraPair

LAYOUT = RankLayout(cfg=2)


def pipeline_of(pair: Any, ranks: RankChannel | None) -> DenoisePipeline:
    modules = {
        name: build_module(
            "diffusers",
            None,
            pair.folder / name,
            load_file(pair.folder / name / "diffusion_pytorch_model.safetensors"),
        )
        for name in (pair.denoiser_name, "vae")
    }
    return create_pipeline(pair.ours.family.class_name, pair.folder, modules, ranks=ranks)


def on_ranks(pair: Any, lead: Callable[[DenoisePipeline, RankGroup], Any], layout: RankLayout = LAYOUT) -> list[Any]:
    """Return the result of `lead` with rank 0's pipeline, and the errors that ended the followers of others."""

    def rank_of(group: RankGroup) -> Any:
        if group.rank:
            follower = pipeline_of(pair, None).follower(group)
            try:
                return follow(group, {"tiny": follower})
            except RankLost as lost:
                return lost
        found = lead(pipeline_of(pair, RankChannel(group, "tiny")), group)
        group.close()
        return found

    return run_ranks(layout, rank_of)


def drawn_jobs(pair: Any, make_request: Any) -> list[ConditionedRequest]:
    random = seeded_random()
    jobs = []
    for number in range(3):
        request = make_request(
            request_id=str(number),
            seed=random.randrange(2**32),
            num_images=random.randint(1, 3),
            num_inference_steps=random.randint(1, 4),
            guidance_scale=random.uniform(1.5, 6.0),
            true_cfg_scale=random.uniform(1.5, 6.0),
        )
        jobs.append(ConditionedRequest(request, pair.conditioning(random.randrange(10**6), negative=True), {}))
    return jobs


def images_of(pipeline: DenoisePipeline, jobs: list[ConditionedRequest]) -> dict[str, Any]:
    """Return latents and images by request, of all in one batch."""
    engine, latents, decode = DiffusionEngine(pipeline), {}, pipeline.decode

    def noting_decode(states: Any) -> Any:
        latents.update((state.request.request_id, state.latents) for state in states)
        return decode(states)

    pipeline.decode = noting_decode  # type: ignore[method-assign]
    for job in jobs:
        engine.add_request(job)
    images = {}
    while engine.has_work:
        images |= {output.request_id: output.images for output in engine.step()}
        assert engine.failures == {}
    return {name: (latents[name], torch.from_numpy(image)) for name, image in images.items()}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, LAYOUT) for name in ("flux", "sdxl", "stable_diffusion", "stable_diffusion_3")),
        ("sdxl", RankLayout(cfg=2, sequence=2)),  # whose tokens no plan divides
    ],
)
def test_images_are_those_of_one_rank(
    name: str, layout: RankLayout, request: pytest.FixtureRequest, make_request: Any
) -> None:
    pair = request.getfixturevalue(name)
    jobs = drawn_jobs(pair, make_request)
    alone = images_of(pipeline_of(pair, None), jobs)

    def lead(pipeline: DenoisePipeline, group: RankGroup) -> tuple[dict[str, Any], int]:
        return images_of(pipeline, jobs), group.sent_bytes["cfg"]

    (ranked, sent), *ends = on_ranks(pair, lead, layout)
    assert ends == [None] * (layout.size - 1)
    for request_id, found in alone.items():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, ranked[request_id], strict=True))
    assert sent > 0


def drawn_lora(pair: Any) -> LoraAdapter:
    """A LoRA of all linear layers of the denoiser, those of its modulation among them."""
    pairs = {}
    for path, layer in pair.ours.denoiser.named_modules():
        if isinstance(layer, nn.Linear):
            down, up = torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2)
            pairs[path] = LoraPair(down / layer.in_features**0.5, up, 0.2)
    return LoraAdapter(Path("drawn"), {pair.denoiser_name: pairs})


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("flux", LAYOUT), ("sdxl", LAYOUT), ("stable_diffusion_3", LAYOUT)),
        *(("flux", RankLayout(sequence=2)), ("flux", RankLayout(cfg=2, sequence=2))),
    ],
)
def test_images_with_loras_are_those_of_one_rank(
    name: str, layout: RankLayout, request: pytest.FixtureRequest, make_request: Any
) -> None:
    """Rows of one batch have one of them, both, and none."""
    pair = request.getfixturevalue(name)
    loras = {"bold": drawn_lora(pair), "thin": drawn_lora(pair)}
    uses = [(), (AdapterUse("bold", 0.8),), (AdapterUse("bold", 0.5), AdapterUse("thin", 1.3))]
    jobs = [
        ConditionedRequest(
            replace(job.request, adapters=own), pair.conditioning(number, negative=True, length=16), loras
        )
        for number, (job, own) in enumerate(zip(drawn_jobs(pair, make_request), uses, strict=True))
    ]
    alone = images_of(pipeline_of(pair, None), jobs)
    plain = images_of(
        pipeline_of(pair, None), [replace(job, request=replace(job.request, adapters=())) for job in jobs]
    )

    def lead(pipeline: DenoisePipeline, group: RankGroup) -> tuple[dict[str, Any], dict[Any, int]]:
        return images_of(pipeline, jobs), dict(group.sent_bytes)

    (ranked, sent), *ends = on_ranks(pair, lead, layout)
    assert ends == [None] * (layout.size - 1)
    for request_id, (latents, image) in alone.items():
        assert torch.equal(plain[request_id][0], latents) == (request_id == "0")
        if layout.sequence == 1:
            assert torch.equal(ranked[request_id][0], latents)
        assert (ranked[request_id][1].int() - image.int()).abs().max() <= (0 if layout.sequence == 1 else 1)
    assert all(sent[axis] > 0 for axis in ("cfg", "sequence") if getattr(layout, axis) > 1)


def test_one_latent_is_exchanged_a_step(flux: Any, make_request: Any) -> None:
    request = make_request(num_inference_steps=3, true_cfg_scale=2.0)
    text = flux.conditioning(1, negative=True)

    def lead(pipeline: DenoisePipeline, group: RankGroup) -> tuple[int, int]:
        state = pipeline.start_request(request, text)
        pipeline.step([state])
        return group.sent_bytes["cfg"], state.latents.nbytes

    (sent, latent), _ = on_ranks(flux, lead)
    assert sent == 1024 + latent


def test_rows_that_one_rank_cannot_compute_fail_alone(flux: Any, make_request: Any) -> None:
    """A step that fails on the follower is that step's error; the next one runs."""
    request, text = make_request(true_cfg_scale=2.0), flux.conditioning(1, negative=True)
    broken = []

    def lead(pipeline: DenoisePipeline, group: RankGroup) -> Any:
        state = pipeline.start_request(request, text)
        broken.append(True)
        with pytest.raises(RuntimeError, match="rank 1: ValueError: out of order"):
            pipeline.step([state])
        broken.clear()
        pipeline.step([state])
        return state.step_index

    def rank_of(group: RankGroup) -> Any:
        pipeline = pipeline_of(flux, RankChannel(group, "tiny") if group.rank == 0 else None)
        if group.rank == 0:
            found = lead(pipeline, group)
            group.close()
            return found
        forward = pipeline.denoiser.forward

        def failing(*arguments: Any, **options: Any) -> Any:
            if broken:
                raise ValueError("out of order")
            return forward(*arguments, **options)

        pipeline.denoiser.forward = failing
        return follow(group, {"tiny": pipeline.follower(group)})

    assert run_ranks(LAYOUT, rank_of) == [1, None]


@pytest.mark.drawn(over="length")
@pytest.mark.parametrize("length", [16, 13])  # the second one is padded to the first
@pytest.mark.parametrize("layout", [RankLayout(sequence=2), RankLayout(sequence=4), RankLayout(cfg=2, sequence=2)])
def test_tokens_of_a_row_are_shared(layout: RankLayout, length: int, flux: Any, make_request: Any) -> None:
    """Attention sums the keys in another order: float32 differs by that alone. Each rank sends three parts of four."""
    request = make_request(num_inference_steps=2, true_cfg_scale=2.0, num_images=2)
    text = flux.conditioning(seeded_random().randrange(10**6), negative=True, length=length)

    def lead(pipeline: DenoisePipeline, group: RankGroup | None) -> tuple[torch.Tensor, int]:
        state = pipeline.start_request(request, text)
        while not state.done:
            pipeline.step([state])
        return state.latents, 0 if group is None else group.sent_bytes["sequence"]

    expected, _ = lead(pipeline_of(flux, None), None)
    (latents, sent), *ends = on_ranks(flux, lead, layout)
    assert ends == [None] * (layout.size - 1)
    assert (latents - expected).abs().max() <= 1e-5 * expected.abs().max()
    _, patches, out_width = latents.shape
    work = TokenWork(4 // layout.cfg, patches + 16, 32, 2, patches, out_width, itemsize=4)
    assert sent == request.num_inference_steps * work.sent_bytes(layout.sequence)


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "width"), [("QwenImagePipeline", 16), ("Flux2Pipeline", 48)])
def test_families_with_a_plan_share_tokens(name: str, width: int, tmp_path: Path, make_request: Any) -> None:
    """Prompts have other lengths, so that one is padded."""
    stock = make(name, tmp_path)
    pair = SimpleNamespace(folder=tmp_path, denoiser_name="transformer", ours=SimpleNamespace(family=FAMILIES[name]))
    request = make_request(num_inference_steps=2, true_cfg_scale=2.0, guidance_scale=3.0, width=32, height=32)
    text = {"prompt_embeds": torch.randn(1, 16, width), "negative_prompt_embeds": torch.randn(1, 12, width)}
    if name == "Flux2Pipeline":
        del text["negative_prompt_embeds"]

    def lead(pipeline: DenoisePipeline, group: RankGroup | None) -> tuple[torch.Tensor, int]:
        state = pipeline.start_request(request, text)
        while not state.done:
            pipeline.step([state])
        return state.latents, 0 if group is None else group.sent_bytes["sequence"]

    expected, _ = lead(pipeline_of(pair, None), None)
    (latents, sent), ended = on_ranks(pair, lead, RankLayout(sequence=2))
    assert ended is None
    assert sent > 0
    assert (latents - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert type(stock.transformer).__name__ in SHARED_CLASSES


def test_rows_that_cannot_be_divided_are_rank_0s(flux: Any, make_request: Any) -> None:
    """Four heads are no multiple of three: the bits are those of one rank, and nothing is sent."""
    request, text = make_request(true_cfg_scale=2.0), flux.conditioning(1, negative=True, length=5)

    def lead(pipeline: DenoisePipeline, group: RankGroup | None) -> torch.Tensor:
        state = pipeline.start_request(request, text)
        pipeline.step([state])
        assert group is None or not group.sent_bytes
        return state.latents

    found, *_ = on_ranks(flux, lead, RankLayout(sequence=3))
    assert torch.equal(found, lead(pipeline_of(flux, None), None))


def test_a_failure_among_shared_tokens_ends_the_group(flux: Any, make_request: Any) -> None:
    request, text = make_request(), flux.conditioning(1, length=16)

    def lead(pipeline: DenoisePipeline, group: RankGroup) -> None:
        state = pipeline.start_request(request, text)
        pipeline.denoiser.single_transformer_blocks[0].forward = broken
        with pytest.raises(RankLost, match="rank 0 failed in a step: out of order"):
            pipeline.step([state])

    def broken(*arguments: Any, **options: Any) -> Any:
        raise ValueError("out of order")

    _, lost = on_ranks(flux, lead, RankLayout(sequence=2))
    assert isinstance(lost, RankLost)
