"""Guidance's branches on two ranks: the bits of one rank, and failures that stay with their step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.ranks import run_ranks
from kit.seeding import seeded_random
from safetensors.torch import load_file

from deployments.engines.building.build import build_module
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.diffusion.ranked_rows import RowsFollower
from deployments.engines.ranks.following import RankChannel, follow
from deployments.engines.ranks.group import RankGroup, RankLost
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.records.protocol import ConditionedRequest

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


def on_ranks(pair: Any, lead: Callable[[DenoisePipeline, RankGroup], Any]) -> list[Any]:
    """Return what `lead` makes of rank 0's pipeline, and what ended the follower of another."""

    def rank_of(group: RankGroup) -> Any:
        if group.rank:
            follower = RowsFollower(group, pipeline_of(pair, None))
            try:
                return follow(group, {"tiny": follower})
            except RankLost as lost:
                return lost
        found = lead(pipeline_of(pair, RankChannel(group, "tiny")), group)
        group.close()
        return found

    return run_ranks(LAYOUT, rank_of)


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


@pytest.mark.parametrize("name", ["flux", "sdxl", "stable_diffusion", "stable_diffusion_3"])
def test_images_are_those_of_one_rank(name: str, request: pytest.FixtureRequest, make_request: Any) -> None:
    pair = request.getfixturevalue(name)
    jobs = drawn_jobs(pair, make_request)
    alone = images_of(pipeline_of(pair, None), jobs)
    (ranked, sent), ended = on_ranks(pair, lambda pipeline, group: (images_of(pipeline, jobs), group.sent_bytes["cfg"]))
    assert ended is None
    for request_id, found in alone.items():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, ranked[request_id], strict=True))
    assert sent > 0


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
        return follow(group, {"tiny": RowsFollower(group, pipeline)})

    assert run_ranks(LAYOUT, rank_of) == [1, None]
