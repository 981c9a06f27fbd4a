"""A worker that encodes text itself: the same tensors as the service's, in room that goes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.cluster import WorkerConfig
from deployments.engines.records.protocol import EngineError
from deployments.modules.encoders import TextEncoderBuilder, is_text_encoder
from deployments.modules.loading import ComponentBuilder, is_denoise_component
from deployments.replicas.step_loop import DeviceThread
from deployments.text.cache import EncodingCache
from deployments.text.encode import CachedEncoders, encode_batch_or_raise
from deployments.text.fallback import WARNING, FallbackEncoder
from deployments.text.requests import ConditioningRequest, unpack

pytestmark = pytest.mark.slow  # imports diffusers

MODELS = Path(__file__).parents[4] / "infra" / "demo" / "models"
FLUX = {"flux": MODELS / "digits-flux"}
REQUEST = ConditioningRequest("flux", "a handwritten seven", None, False, max_sequence_length=24)


async def of_the_service(open_host: Callable[..., Any], request: ConditioningRequest) -> dict[str, torch.Tensor]:
    async def run(jobs: Any, priority: int, timeout_s: float | None) -> Any:
        return encode_batch_or_raise(jobs)

    encoders = CachedEncoders(EncodingCache(10**7), run)
    conditioning = await encoders.condition(open_host(TextEncoderBuilder(), FLUX), request, is_text_encoder)
    return unpack(conditioning.tensors)


@pytest.fixture
def builder() -> ComponentBuilder:
    return ComponentBuilder(WorkerConfig())


async def test_it_gives_what_the_service_gives(open_host: Callable[..., Any], builder: ComponentBuilder) -> None:
    host = open_host(builder, FLUX)
    own = FallbackEncoder(host, DeviceThread())
    expected = await of_the_service(open_host, REQUEST)
    for number in (1, 2):
        conditioning = await own.condition(REQUEST)
        found = unpack(conditioning.tensors)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor)
        assert conditioning.warnings == (WARNING,)
        assert own.num_requests == number
    assert (conditioning.cache.hits, conditioning.cache.misses) == (2, 0)  # it remembers, too


async def test_encoders_leave_for_the_denoiser(open_host: Callable[..., Any], builder: ComponentBuilder) -> None:
    """They need not fit side by side: whoever has encoded holds nothing."""
    host = open_host(builder, FLUX)
    manifest = await host.manifests.find_version("flux")
    denoiser = sum(part.nbytes for part in manifest.components.values() if is_denoise_component(part))
    encoders = manifest.nbytes - denoiser
    host = open_host(builder, FLUX, budget_bytes=max(denoiser, encoders))
    own = FallbackEncoder(host, DeviceThread())
    for _ in range(2):
        conditioning = await own.condition(replace(REQUEST, prompt=f"{REQUEST.prompt} {own.num_requests}"))
        assert unpack(conditioning.tensors)
        assert not +host._provider.leases or all(not slot.leases for slot in host._modules.slots.values())
        async with host.lease("flux", is_denoise_component) as lease:
            assert "transformer" in lease.modules
            assert not any(is_text_encoder(slot.component) for slot in host._modules.slots.values())


async def test_a_failure_leaves_nothing_leased(open_host: Callable[..., Any], builder: ComponentBuilder) -> None:
    host = open_host(builder, FLUX)
    own = FallbackEncoder(host, DeviceThread())
    with pytest.raises(EngineError, match="tokens"):
        await own.condition(replace(REQUEST, prompt="seven " * 100, long_text="error"))
    assert all(not slot.leases for slot in host._modules.slots.values())
    cut = await own.condition(replace(REQUEST, prompt="seven " * 100))
    assert cut.warnings[-1] == WARNING
    assert any("was cut to" in warning for warning in cut.warnings[:-1])
