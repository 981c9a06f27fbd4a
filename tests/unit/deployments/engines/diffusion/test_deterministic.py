"""Deterministic requests: alone, row by row and by repeatable kernels where a device rounds by batch, else as all."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deployments.engines.costs.memory_limits import MemoryLimits
from deployments.engines.diffusion import pipeline
from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.nn.batch_invariant import repeatable_kernels
from deployments.engines.records.protocol import ConditionedRequest


@pytest.fixture(autouse=True)
def memory_of_its_own(sdxl, monkeypatch):
    """Let each test teach the pipeline, which all share, about memory for itself alone."""
    limits = MemoryLimits()
    for learning in (sdxl.ours, sdxl.ours._decoder):
        monkeypatch.setattr(learning, "_memory", limits)


@pytest.fixture
def rounding(sdxl, monkeypatch):
    """A pipeline on a device whose results depend on the rows of a forward; and the forwards that it made."""
    ours, calls = sdxl.ours, []
    monkeypatch.setattr(pipeline, "computes_on_host", lambda device: False)
    forward, decode = ours._forward, ours._codec.decode

    def rounded(rows, *size):
        calls.append((len(rows), torch.are_deterministic_algorithms_enabled()))
        return forward(rows, *size) * (1 + len(rows) / 100)

    def rounded_decode(latents, **options):
        calls.append((len(latents), torch.are_deterministic_algorithms_enabled()))
        return decode(latents * (1 + len(latents) / 100), **options)

    monkeypatch.setattr(ours, "_forward", rounded)
    monkeypatch.setattr(ours._codec, "decode", rounded_decode)
    return calls


def run(sdxl, *jobs):
    """Return the images of requests that begin together."""
    engine, found = DiffusionEngine(sdxl.ours), {}
    for job in jobs:
        engine.add_request(job)
    while engine.has_work:
        found |= {output.request_id: output.images for output in engine.step() if output.images is not None}
    assert not engine.failures
    return found


def job(sdxl, make_request, name, **changes):
    options = {"guidance_scale": 3.0, "num_inference_steps": 3} | changes
    request = make_request(request_id=name, seed=len(name), **options)
    return ConditionedRequest(request, sdxl.conditioning(3, negative=True))


def test_company_and_rounding_change_nothing(sdxl, make_request, rounding):
    plain = job(sdxl, make_request, "plain")
    mine = job(sdxl, make_request, "mine", deterministic=True, num_images=2)
    alone = run(sdxl, mine)["mine"]
    assert set(rounding) == {(1, True)}
    rounding.clear()
    others = [plain, job(sdxl, make_request, "other"), job(sdxl, make_request, "exact", deterministic=True)]
    chance = random.Random(4)
    for _ in range(2):
        chance.shuffle(others)
        together = run(sdxl, *others, mine)
        assert np.array_equal(together["mine"], alone)
    assert (4, False) in rounding  # the others do share forwards
    assert not np.array_equal(together["plain"], run(sdxl, plain)["plain"])  # and on such a device it shows
    assert not torch.are_deterministic_algorithms_enabled()


def test_little_memory_changes_no_form(sdxl, make_request, rounding):
    """Memory limits that an earlier request has met do not change the forwards of a deterministic one."""
    mine = job(sdxl, make_request, "mine", deterministic=True, num_images=3)
    alone = run(sdxl, mine)["mine"]
    state = sdxl.ours.start_request(mine.request, mine.conditioning)
    for kind in (("decode", 32, 32), pipeline.memory_kind(pipeline.parts_of([state])[0])):
        sdxl.ours._memory.ran_out(kind, 2)
    assert np.array_equal(run(sdxl, mine)["mine"], alone)


def test_on_the_host_a_deterministic_request_shares_forwards(sdxl, make_request, monkeypatch):
    sizes, forward = [], sdxl.ours._forward
    monkeypatch.setattr(sdxl.ours, "_forward", lambda rows, *size: sizes.append(len(rows)) or forward(rows, *size))
    mine, plain = job(sdxl, make_request, "mine", deterministic=True), job(sdxl, make_request, "other")
    together, alone = run(sdxl, mine, plain), run(sdxl, mine)
    assert max(sizes) == 4
    assert np.array_equal(together["mine"], alone["mine"])


def test_an_image_without_memory_fails_instead_of_going_in_tiles(sdxl, make_request, monkeypatch):
    codec = sdxl.ours._codec
    whole = type(codec.vae).decode

    def decode(vae, latents, **options):
        if not vae.use_tiling:
            raise torch.OutOfMemoryError("none left")
        return whole(vae, latents, **options)

    monkeypatch.setattr(type(codec.vae), "decode", decode)
    engine = DiffusionEngine(sdxl.ours)
    found, failed = {}, {}
    for request in (job(sdxl, make_request, "mine", deterministic=True), job(sdxl, make_request, "other")):
        engine.add_request(request)
    while engine.has_work:
        found |= {output.request_id: output.images for output in engine.step()}
        failed |= engine.failures
    assert set(found) == {"other"}
    assert isinstance(failed["mine"], torch.OutOfMemoryError)


def test_settings_of_the_process_come_back():
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with repeatable_kernels():
            assert torch.backends.cudnn.deterministic
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == before
    assert torch.utils.deterministic.fill_uninitialized_memory
